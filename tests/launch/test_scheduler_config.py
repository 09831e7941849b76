"""The scheduler's world is what the operator set and what the device side turned out to be, nothing else."""

from typing import Any

import pytest
from token_cache import group

from tokenspeed.device.specs import DeviceSpecs
from tokenspeed.launch.compose import scheduler_config
from tokenspeed.recipes.resolved import SchedulerSettings

GROUPS = (
    group("full", granularity=16),
    group("window", "sliding_window", 8, children=2, window=100),
    group("state", "state", 0, children=3, checkpoint=32),
)


def specs(**changes: Any) -> DeviceSpecs:
    values: dict[str, Any] = {
        "groups": GROUPS, "prefix_granularity": 16, "num_parents": 50, "kv_tokens": 0, "arena_bytes": 0,
        "host_parents": 0, "host_bytes": 0, "storage": False, "weight_bytes": 0, "workspace_bytes": 0,
        "untouched_bytes": 0, "vocab_size": 9, "max_model_len": 99, "max_num_seqs": 2, "device": "test", "kernels": {},
        "kernel_doubts": {},
    }  # fmt: skip
    return DeviceSpecs(**{**values, **changes})


def test_each_group_is_passed_whole() -> None:
    config = scheduler_config(SchedulerSettings(), specs())
    found = [
        (one.group_id, one.kind, one.block_granularity, one.children_per_parent, one.sliding_window_tokens,
         one.checkpoint_granularity)
        for one in config.groups
    ]  # fmt: skip
    assert found == [
        ("full", "full_history", 16, 1, 0, 0),
        ("window", "sliding_window", 8, 2, 100, 0),
        ("state", "state", 0, 3, 0, 32),
    ]


def test_the_tiers_follow_the_device_side() -> None:
    none = scheduler_config(SchedulerSettings(), specs())
    assert (none.host_parents, none.storage) == (0, False)
    host = scheduler_config(SchedulerSettings(), specs(host_parents=7))
    assert (host.host_parents, host.host_cache, host.storage) == (7, True, False)
    both = scheduler_config(SchedulerSettings(), specs(host_parents=7, storage=True))
    assert (both.host_parents, both.host_cache, both.storage) == (7, True, True)


def test_without_a_prefix_cache_the_host_pool_holds_images_only() -> None:
    settings = SchedulerSettings(prefix_cache=False)
    config = scheduler_config(settings, specs(host_parents=7))
    assert (config.host_parents, config.host_cache, config.prefix_cache) == (7, False, False)
    with pytest.raises(ValueError, match="storage"):
        scheduler_config(settings, specs(host_parents=7, storage=True))
