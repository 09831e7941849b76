"""Builds everything that touches the device, as locals, and returns plain facts and a handle."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from tokenspeed.device.attention.backend import AttentionBackend
from tokenspeed.device.attention.backends import backend_class
from tokenspeed.device.block_tables import BlockTables
from tokenspeed.device.cache_arena import ArenaLayout, CacheArena
from tokenspeed.device.cache_operations import CacheOperations
from tokenspeed.device.forward_thread import ForwardThread
from tokenspeed.device.graphs.check import KeepsStates, ReplayCheck, StateBlocks, checks_replays
from tokenspeed.device.graphs.choice import CaptureSizes, choose_graphs, dispatch_graphs
from tokenspeed.device.graphs.decode import CapturedDecode
from tokenspeed.device.graphs.dispatch import DispatchGraphs
from tokenspeed.device.graphs.pieces import CapturedPrefill
from tokenspeed.device.graphs.start import capture_all
from tokenspeed.device.handle import DeviceHandle
from tokenspeed.device.host_arena import HostArena
from tokenspeed.device.local_handle import LocalDeviceHandle
from tokenspeed.device.placement import Placement
from tokenspeed.device.process_group import agree_on_kernels
from tokenspeed.device.runner import Runner, RunnerParts
from tokenspeed.device.sampling.backends import make_backend
from tokenspeed.device.sampling.ranks import make_sampler
from tokenspeed.device.sizing import CacheSize, cache_size, host_parents, kv_dtype, longest_request, storage_limit
from tokenspeed.device.specs import DeviceSpecs
from tokenspeed.device.step_inputs import StepInputs
from tokenspeed.device.storage.directory import DirectoryStorage
from tokenspeed.device.storage.fingerprint import fingerprint
from tokenspeed.device.storage.tier import StorageTier
from tokenspeed.device.unsound_weights import refuse_unsound_weights
from tokenspeed.device.warm_up import warm_up
from tokenspeed.device.weight_memory import DeviceWeights
from tokenspeed.layers.batch import ForwardBatch, LayerCache
from tokenspeed.layers.cache_spec import CacheGroupSpec, groups_of_layers
from tokenspeed.layers.communication import ALONE, Communication
from tokenspeed.layers.kernels import KernelBinder
from tokenspeed.layers.loader import WHERE_READ, load_weights, open_source
from tokenspeed.layers.rank_dimensions import rank_dimensions
from tokenspeed.layers.weights import LoadedWeights, WeightSpec
from tokenspeed.messages import Phase
from tokenspeed.models import Architecture, Model, architecture
from tokenspeed.recipes.cache_scales import refuse_scales_above_one
from tokenspeed.recipes.model_config import ModelConfig
from tokenspeed.recipes.resolved import ResolvedConfig, SchedulerSettings
from tokenspeed.recipes.topology import default_threads
from tokenspeed_kernel.binding import binding_objective, recording_selections
from tokenspeed_kernel.platform import select_device
from tokenspeed_kernel.plugins import load_platforms, load_plugins
from tokenspeed_kernel.start_report import doubts, log_start_report

if TYPE_CHECKING:
    from tokenspeed_scheduler import Plan

POISON_VARIABLE = "TOKENSPEED_POISON_KV"
"""Set to 1, the arena starts as NaN instead of zeros: whatever reads beyond what was written shows."""

PROMPT_LOGPROB_SLICE = 16
"""The least number of rows for which logits exist at one time; prompt log-probabilities are taken slice by slice."""

WARM_UP_TOKENS = 64
"""Of the warm-up's prefill: enough that every kernel for many tokens runs, and a tenth of a second of a start."""

Report = Callable[[Phase, int, int, str], None]


@dataclass(frozen=True)
class DeviceBuild:
    """What the builder returns; nothing else of the device side can be reached from it."""

    specs: DeviceSpecs
    handle: DeviceHandle


def build_device_side(
    config: ResolvedConfig, whole_model: ModelConfig, *, report: Report, communication: Communication = ALONE
) -> DeviceBuild:
    """Loads the weights, binds kernels, sizes and maps the KV cache, warms up, and starts the forward thread.

    Where several ranks share the model, each builds its own part, and all come to the same facts: whoever is slower is
    waited for. ``report(phase, done, total, detail)`` follows the phases "load", "compile" and "warm up". Raises
    CheckpointError for a checkpoint that cannot be used, MemoryPlanError where memory does not do, and the kernel
    package's errors where a kernel was insisted on that cannot run.
    """
    load_platforms()  # a vendor's package may bring the kind of device
    placement = Placement.of(config.device, communication.rank)
    select_device(config.device, communication.rank)
    threads = config.threads or default_threads(communication.world)
    torch.set_num_threads(threads)
    load_plugins()
    agree_on_kernels(communication)
    family = architecture(whole_model.architecture)
    rank, world = communication.rank, communication.world
    if config.parallel.ep > 1:
        whole_model = whole_model.by_expert()
    specs = family.weights(whole_model, rank=rank, world=world)
    weights = _load(config, placement, whole_model, specs, report)
    weight_bytes = weights.nbytes  # of which the model takes what its kernels hold in other forms
    model_config = rank_dimensions(whole_model, rank=rank, world=world)
    dtype = kv_dtype(config, model_config)
    layout = ArenaLayout.of(family.cache_groups(model_config, granularity=config.kv.granularity), dtype)
    size_now = partial(
        cache_size,
        config,
        model_config,
        layout,
        placement=placement,
        weight_bytes=weight_bytes,
        communication=communication,
    )
    dispatch = dispatch_graphs(config.scheduler, config.device)
    around = None if dispatch is None else dispatch.around
    kernels = KernelBinder(
        config.kernels,
        activations=config.activations,
        device=config.device,
        captured=config.device != "cpu" and config.scheduler.graphs != "off",
        around=around,
    )
    report("compile", 0, 1, "binding kernels")
    with binding_objective(config.enforce), recording_selections() as selections:
        make_model = partial(_make_model, config, model_config, family, weights, layout, kernels, communication)
        # On the host the tables of positions end where the cache does. A device says what is left of it once the model
        # is there: kernels hold some weights in a form of their own, of another size.
        size = size_now() if placement.is_host else None
        model = make_model(longest_request(config, model_config) if size is None else size.max_model_len)
        size = size or size_now()
        parts = _assemble(config, placement, model_config, model, layout, size, kernels, communication, dispatch)
    kernels.refuse_unused_activations(config.model.path or "random weights")
    log_start_report(selections)
    report("compile", 1, 1, ", ".join(sorted(set(kernels.chosen.values()))))
    host, storage = _tiers(config, placement, layout, kernels, communication)
    # A step that raised leaves the other ranks in the middle of theirs: whatever this one exchanged next they would
    # take for something else.
    thread = ForwardThread(overlaps=not placement.is_host, goes_on=world == 1)
    try:
        # OpenMP keeps its team size for each thread that starts one, a device's runtime the device.
        thread.run(lambda: torch.set_num_threads(threads))
        thread.run(placement.enter)
        runner = Runner(parts, CacheOperations(placement, parts.arena, host, storage, communication))
        is_sound = warm_up(
            lambda plan: thread.run(lambda: runner.execute(cast("Plan", plan), (), 0.0)),
            chunk=min(config.scheduler.chunk, size.max_model_len, WARM_UP_TOKENS),
            max_seqs=config.scheduler.max_seqs,
            num_groups=len(layout.groups),
            report=lambda done, total, detail: report("warm up", done, total, detail),
        )
        if not is_sound:
            refuse_unsound_weights(
                open_source(config.model, whole_model),
                specs,
                q_and_k_permuted=whole_model.q_and_k_permuted,
                where=config.model.path or "random weights",
                report=lambda done, total, detail: report("warm up", done, total, detail),
            )
        capture_all(
            parts.decode,
            parts.prefill,
            lambda plan: thread.run(lambda: runner.execute(cast("Plan", plan), (), 0.0)),
            num_groups=len(layout.groups),
            report=lambda done, total, detail: report("capture", done, total, detail),
        )
    except BaseException:
        thread.shutdown()
        if storage is not None:
            storage.shutdown()
        raise
    facts = DeviceSpecs(
        groups=layout.facts,
        prefix_granularity=config.kv.granularity,
        num_parents=size.num_parents,
        kv_tokens=size.kv_tokens,
        arena_bytes=parts.arena.nbytes,
        host_parents=0 if host is None else host.num_parents,
        host_bytes=0 if host is None else host.nbytes,
        storage=storage is not None,
        weight_bytes=weight_bytes,
        workspace_bytes=model.workspace_bytes,
        untouched_bytes=_sum_of_known(pool.untouched_bytes for pool in (parts.arena, host) if pool is not None),
        vocab_size=model_config.vocab_size,
        max_model_len=size.max_model_len,
        max_num_seqs=config.scheduler.max_seqs,
        device=config.device,
        kernels=dict(kernels.chosen),
        kernel_doubts=doubts(selections),
    )
    return DeviceBuild(specs=facts, handle=LocalDeviceHandle(thread, runner, storage))


def _sum_of_known(values: Iterable[int | None]) -> int | None:
    """The sum; None where one of them is not known."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if len(known) == len(found) else None


def _load(
    config: ResolvedConfig, placement: Placement, model: ModelConfig, specs: Sequence[WeightSpec], report: Report
) -> LoadedWeights:
    report("load", 0, 1, config.model.path or "random weights")
    if config.kv.dtype == "float8_e4m3" and config.model.kind == "folder":
        refuse_scales_above_one(Path(config.model.path))
    return load_weights(
        open_source(config.model, model),
        specs,
        memory=WHERE_READ if placement.is_host else DeviceWeights(placement),
        q_and_k_permuted=model.q_and_k_permuted,
        ignored=(*model.ignored_weights, *((r"lm_head\.weight",) if model.tie_word_embeddings else ())),
        report=lambda done, total, detail: report("load", done, total, detail),
    )


def _tiers(
    config: ResolvedConfig,
    placement: Placement,
    layout: ArenaLayout,
    kernels: KernelBinder,
    communication: Communication,
) -> tuple[HostArena | None, StorageTier | None]:
    """Makes the host pool and the storage behind it, where they are asked for; all kernels are bound by now."""
    parents = host_parents(config, layout)
    host = HostArena(placement, layout, parents) if parents else None
    if host is None or not config.kv.storage_dir:
        return host, None
    blocks = {facts.group_id: facts.bytes_per_block for facts in layout.facts}
    identity = fingerprint(
        config.model,
        layout,
        prefix_granularity=config.kv.granularity,
        kernels=dict(kernels.chosen),
        ranks=(communication.rank, communication.world),
    )
    backend = DirectoryStorage(Path(config.kv.storage_dir), identity, blocks, storage_limit(config))
    return host, StorageTier(backend, host, [facts.group_id for facts in layout.facts])


def _make_model(
    config: ResolvedConfig,
    model_config: ModelConfig,
    family: Architecture,
    weights: LoadedWeights,
    layout: ArenaLayout,
    kernels: KernelBinder,
    communication: Communication,
    max_len: int,
) -> Model:
    """The model with its kernels bound, for requests of ``max_len`` tokens; it takes the matrices of ``weights``."""
    settings = config.scheduler
    return family.Model(
        model_config,
        weights,
        kernels,
        kv_dtype=layout.dtype,
        max_tokens=settings.chunk + settings.max_seqs,
        max_logit_rows=_logit_rows(settings),
        max_positions=max_len + settings.overlap,
        communication=communication,
    )


def _logit_rows(settings: SchedulerSettings) -> int:
    return max(settings.max_seqs, PROMPT_LOGPROB_SLICE)


def _assemble(
    config: ResolvedConfig,
    placement: Placement,
    model_config: ModelConfig,
    model: Model,
    layout: ArenaLayout,
    size: CacheSize,
    kernels: KernelBinder,
    communication: Communication,
    dispatch: DispatchGraphs | None,
) -> RunnerParts:
    """Makes arena, tables, attention and sampler, each bound to the others and the model."""
    settings = config.scheduler
    pool_rows = settings.max_seqs + 1  # Row 0 is the null row.
    max_tokens = settings.chunk + settings.max_seqs
    arena = CacheArena(placement, layout, size.num_parents)
    if os.environ.get(POISON_VARIABLE, "0") not in ("", "0"):
        arena.poison()
    model.bind_cache(_layer_caches(layout.groups, arena))
    tables = [
        BlockTables(
            placement,
            group_id=facts.group_id,
            num_rows=pool_rows,
            num_slots=size.table_slots,
            num_blocks=arena.num_blocks(index),
        )
        for index, facts in enumerate(layout.facts)
    ]
    granularities = [facts.block_granularity for facts in layout.facts]  # 0 of a state: it has no slots for tokens
    attention = _attention(layout.groups, model, arena, kernels, settings.max_seqs, size.table_slots)
    graphs = choose_graphs(
        settings, config.device, world=communication.world, dispatch=dispatch, kernels=kernels.of_the_forward
    )
    captured = CaptureSizes.of(settings, graphs, longest=size.max_model_len)
    check = _replay_check(arena, attention, exact=placement.is_host) if checks_replays() else None

    def forward(batch: ForwardBatch) -> torch.Tensor:
        return model.forward(batch)  # found at each call, so that a test can plant a slip in it

    return RunnerParts(
        placement=placement,
        model=model,
        decode=CapturedDecode(forward, graphs, sizes=captured.decodes, check=check),
        prefill=CapturedPrefill(forward, graphs, sizes=captured.prefills, check=check),
        arena=arena,
        tables=tables,
        inputs=StepInputs(
            placement,
            tables,
            granularities,
            max_rows=settings.max_seqs,
            max_tokens=max_tokens,
            vocab_size=model_config.vocab_size,
        ),
        attention=attention,
        sampler=make_sampler(
            placement,
            make_backend("registry" if placement.is_host else "candidates", kernels),
            communication,
            num_rows=pool_rows,
            max_batch=settings.max_seqs,
            vocab_size=model_config.vocab_size,
        ),
        max_logit_rows=_logit_rows(settings),
    )


def _replay_check(arena: CacheArena, attention: Sequence[AttentionBackend], *, exact: bool) -> ReplayCheck:
    """Knows the states of every group that has some."""
    kinds = [facts.kind for facts in arena.layout.facts]
    return ReplayCheck(
        [
            StateBlocks(arena.blocks(group), cast(KeepsStates, attention[group]))
            for group, kind in enumerate(kinds)
            if kind == "state"
        ],
        exact=exact,
    )


def _layer_caches(groups: Sequence[CacheGroupSpec], arena: CacheArena) -> list[tuple[LayerCache, ...]]:
    """For each layer of the model, its part of each of its groups."""
    return [
        tuple(
            LayerCache(group=index, place=groups[index].layers.index(layer), fields=arena.fields(index, layer))
            for index in owners
        )
        for layer, owners in enumerate(groups_of_layers(groups))
    ]


def _attention(
    groups: Sequence[CacheGroupSpec],
    model: Model,
    arena: CacheArena,
    kernels: KernelBinder,
    max_rows: int,
    table_slots: int,
) -> tuple[AttentionBackend, ...]:
    """One backend a cache group, over its layers' caches."""
    return tuple(
        backend_class(spec.backend)(
            kernels,
            group=group,
            spec=spec,
            caches=[arena.fields(index, layer) for layer in group.layers],
            max_rows=max_rows,
            table_slots=table_slots,
        )
        for index, (group, spec) in enumerate(zip(groups, model.attention_specs(), strict=True))
    )
