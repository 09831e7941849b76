"""What a journal tells of a request and of the device behind its scheduler: less than an engine knows."""

from tokenspeed.device.specs import DeviceSpecs
from tokenspeed.messages import SamplingParameters, Submit
from tokenspeed.recipes.capacity import GroupFacts
from tokenspeed.telemetry.journal import Submitted
from tokenspeed_scheduler import SchedulerConfig


def submit_of(record: Submitted) -> Submit:
    """The request as a frontend would have sent it; its name is its handle, the only one that a journal has."""
    return Submit(
        handle=record.handle,
        request_id=str(record.handle),
        prompt=record.prompt,
        max_new_tokens=record.max_new_tokens,
        sampling=SamplingParameters(),
        declared=record.declared,
        priority=record.priority,
        namespace=record.namespace,
    )


def specs_of(config: SchedulerConfig) -> DeviceSpecs:
    """What a journal tells of its device: the groups and the pools, no bytes and no model."""
    groups = tuple(
        GroupFacts(
            group_id=group.group_id,
            kind=group.kind,
            block_granularity=group.block_granularity if group.kind != "state" else 0,
            children_per_parent=group.children_per_parent,
            bytes_per_block=0,
            sliding_window_tokens=group.sliding_window_tokens,
            checkpoint_granularity=group.checkpoint_granularity,
        )
        for group in config.groups
    )
    return DeviceSpecs(
        groups=groups,
        prefix_granularity=config.prefix_granularity,
        num_parents=config.num_parents,
        kv_tokens=0,
        arena_bytes=0,
        host_parents=config.host_parents,
        host_bytes=0,
        storage=config.storage,
        weight_bytes=0,
        workspace_bytes=0,
        untouched_bytes=None,
        vocab_size=0,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        device="",
        kernels={},
        kernel_doubts={},
    )
