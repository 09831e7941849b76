"""What a resolution amounts to, in figures: what ``plan``, ``DRY=1`` and the start print. Nothing is loaded."""

from dataclasses import dataclass, field, replace

from tokenspeed.recipes.byte_counts import human_bytes
from tokenspeed.recipes.capacity import (
    NO_LIMIT,
    CacheShape,
    PoolSize,
    cache_shape,
    group_bytes,
    parents_for,
    size_pool,
    wanted_bytes,
)
from tokenspeed.recipes.catalogue import load_hardware
from tokenspeed.recipes.checkpoint_size import read_checkpoint
from tokenspeed.recipes.dimensions import CacheGroup, Dimensions, dimensions_of, groups_of
from tokenspeed.recipes.divisibility import indivisible
from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.features import CPU_GROWTH, weights_bytes
from tokenspeed.recipes.machine import Accelerator, Machine
from tokenspeed.recipes.memory import (
    DEFAULT_CONTEXT_BYTES,
    LIBRARIES_BYTES,
    PROCESSES_BYTES,
    Term,
    cpu_pool_bytes,
    cpu_workspace_term,
    device_terms,
    effective_cache_type,
    on_one_rank,
    weights_term,
)
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed.recipes.parameters import count_parameters
from tokenspeed.recipes.resolve import Resolution, model_source
from tokenspeed.recipes.resolved import DEVICE_FRACTION, GIB
from tokenspeed.recipes.selection import DoesNotFit

PLANNED = "the plan"
"""The source of a value that nobody set and the plan worked out."""

RANDOM_TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class GroupPlan:
    """Bytes that one token leaves in a cache group on one rank (a state group: bytes of a request's state)."""

    group: CacheGroup
    bytes: int
    dtype: str


@dataclass(frozen=True)
class ModelFacts:
    """A model as the plan counts it: from its files where they are here, else as the recipe states it.

    Attributes:
        groups, dimensions: what is cached and computed; no dimensions where the recipe has none.
        context: tokens the model was made for.
        stored: the type of the checkpoint's weights.
        format: how its matrices are stored: the type, or a quantised format.
        weight_bytes: of all ranks together; 0 unknown.
    """

    groups: list[CacheGroup]
    dimensions: Dimensions | None
    context: int
    stored: str
    format: str
    weight_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Figures of one resolution, per rank.

    Attributes:
        facts: the model.
        cache_type: of the KV cache, "auto" resolved.
        groups: per cache group.
        max_len: the longest request that is planned for.
        terms: everything but the KV cache.
        memory_bytes: what a rank may take in all; 0 unknown.
        pool: of the KV cache; None where only the device can tell.
        devices: how many devices or, on the CPU, 1.
        problems: why it does not fit; empty when it does, or when that is not known.
        notes: what an operator should know.
    """

    resolution: Resolution
    machine: Machine
    facts: ModelFacts
    cache_type: str
    groups: list[GroupPlan]
    max_len: int
    terms: list[Term]
    memory_bytes: int
    shape: CacheShape
    pool: PoolSize | None
    devices: int
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def bytes_per_token(self) -> int:
        """Of all history groups together."""
        return sum(part.bytes for part in self.groups if part.group.kind != "state")

    @property
    def fixed_bytes(self) -> int:
        """Everything but the KV cache."""
        return sum(term.bytes for term in self.terms)

    @property
    def pool_bytes(self) -> int:
        """Of the KV cache; 0 where it is not known."""
        return self.pool.bytes if self.pool else 0

    @property
    def needed_bytes(self) -> int:
        """With a KV cache for one request of ``max_len``: the least that a rank must have."""
        settings, granularity = self.resolution.keys.scheduler, self.resolution.keys.kv.granularity
        each = parents_for(settings, self.shape.facts, self.max_len + settings.overlap, granularity=granularity)
        return self.fixed_bytes + (each + 1) * self.shape.parent_bytes

    def refuse_misfit(self) -> None:
        """Raises DoesNotFit with every reason."""
        if self.problems:
            raise DoesNotFit("\n".join(self.problems))


def make_plan(resolution: Resolution, machine: Machine, facts: ModelFacts | None = None) -> Plan:
    """Computes the figures; ``facts`` where the caller has read them already.

    Raises CheckpointError where weights that are here cannot be read, RecipeError where the model cannot be divided
    among so many ranks on any machine.
    """
    facts = facts or model_facts(resolution)
    keys = resolution.keys
    _refuse_indivisible(resolution, facts)
    cache_type = effective_cache_type(keys.kv.dtype, facts.stored)
    kv_heads = facts.dimensions.kv_heads if facts.dimensions is not None else 0
    shape = cache_shape(
        facts.groups,
        cache_type,
        granularity=keys.kv.granularity,
        tensor_parallel=keys.parallel.tp,
        kv_heads=kv_heads,
    )
    max_len = min(keys.scheduler.max_len or facts.context, facts.context)
    on_cpu = _on_cpu(resolution)
    plan = Plan(
        resolution=resolution,
        machine=machine,
        facts=facts,
        cache_type=cache_type,
        groups=[_group_plan(group, cache_type, keys.parallel.tp, kv_heads) for group in facts.groups],
        max_len=max_len,
        terms=[] if on_cpu else _device_terms(resolution, facts, machine),
        memory_bytes=machine.free_bytes // keys.parallel.tp if on_cpu else _device_memory(resolution, machine),
        shape=shape,
        pool=None,
        devices=keys.parallel.tp * keys.parallel.dp * keys.parallel.pp,
    )
    if not on_cpu:
        _judge_devices(plan)
    budget = _cpu_budget(plan) if on_cpu else _device_budget(plan)
    pool = _pool(plan, budget) if budget is not None else None
    if on_cpu:
        # The rotary table is as long as a request can be, so the pool comes first.
        plan = replace(plan, terms=_cpu_terms(resolution, facts, pool.max_len if pool else max_len))
    if pool is None or budget is None:
        return plan
    plan = replace(plan, pool=pool)
    _judge(plan, budget)
    return plan


def _group_plan(group: CacheGroup, cache_type: str, tensor_parallel: int, kv_heads: int) -> GroupPlan:
    each = group_bytes(group, cache_type, tensor_parallel, kv_heads)
    return GroupPlan(group, -(-each // group.stride), group.kept_as(cache_type))


def _pool(plan: Plan, budget: int) -> PoolSize:
    keys, shape = plan.resolution.keys, plan.shape
    limit = (NO_LIMIT // max(group.children_per_parent for group in shape.facts) - 1) * shape.parent_bytes
    return size_pool(
        keys.scheduler,
        shape,
        granularity=keys.kv.granularity,
        wanted_len=plan.max_len,
        budget=min(budget, limit),
    )


def model_facts(resolution: Resolution) -> ModelFacts:
    """What the plan knows of the model: from the files where they are here, else as the recipe states it."""
    source = model_source(resolution)
    if source is not None and _readable(resolution):
        if source.kind == "random":
            config = read_model_config(source)
            count = count_parameters(dimensions_of(config)).total
            weight_bytes = count * RANDOM_TYPE_BYTES.get(config.dtype, 4)
        else:
            config, weight_bytes = read_checkpoint(source, planes=resolution.vendor in ("nvidia", "amd"))
        stored = "gguf" if source.kind == "gguf" else config.dtype
        written = stored if config.quantization is None else "quantised"
        return ModelFacts(
            groups_of(config), dimensions_of(config), config.context_length, stored, written, weight_bytes
        )
    assert resolution.loaded is not None, "a bare path is always present"
    recipe = resolution.loaded.recipe
    stored = getattr(resolution.weights, "format", "")
    weight_bytes = weights_bytes(resolution.weights) or resolution.located.bytes_on_disk
    if _on_cpu(resolution):
        weight_bytes = int(weight_bytes * CPU_GROWTH.get(stored, 1.0))
    return ModelFacts(recipe.cache_groups, recipe.dimensions, recipe.context, stored, stored, weight_bytes)


def _readable(resolution: Resolution) -> bool:
    """Whether the engine has the family: others' files are counted as the recipe states them."""
    return not any(feature.startswith("model family") for feature in resolution.missing)


def _on_cpu(resolution: Resolution) -> bool:
    return resolution.vendor == "cpu"


def _refuse_indivisible(resolution: Resolution, facts: ModelFacts) -> None:
    if facts.dimensions is None:
        return
    problems = indivisible(facts.dimensions, resolution.keys.parallel)
    if problems:
        raise RecipeError(
            *(
                f"{resolution.sources.get(problem.split(' ', 1)[0], 'recipe')}: {resolution.name}: {problem}"
                for problem in problems
            )
        )


def _cpu_terms(resolution: Resolution, facts: ModelFacts, longest: int) -> list[Term]:
    keys, model = resolution.keys, facts.dimensions
    terms = [weights_term(facts.weight_bytes, model, keys.parallel, facts.stored)]
    if model is not None and _readable(resolution):
        terms.append(
            cpu_workspace_term(
                on_one_rank(model, keys.parallel),
                stored=facts.stored,
                chunk=keys.scheduler.chunk,
                max_seqs=keys.scheduler.max_seqs,
                positions=longest + keys.scheduler.overlap,
                ranks=keys.parallel.tp,
            )
        )
    else:
        terms += device_terms(model, keys.parallel, keys.scheduler)
    if keys.kv.host_bytes:
        terms.append(Term(name="host pool", bytes=keys.kv.host_bytes, certainty="counted", detail="kv.host_bytes"))
    terms.append(Term(name="libraries", bytes=LIBRARIES_BYTES, certainty="estimated", detail="at the first steps"))
    terms.append(Term(name="processes", bytes=PROCESSES_BYTES, certainty="estimated", detail="API and engine"))
    return terms


def _device_terms(resolution: Resolution, facts: ModelFacts, machine: Machine) -> list[Term]:
    keys = resolution.keys
    terms = [weights_term(facts.weight_bytes, facts.dimensions, keys.parallel, facts.stored)]
    if keys.speculative is not None and keys.speculative.draft_bytes:
        draft = keys.speculative.draft_bytes // keys.parallel.tp
        terms.append(Term(name="draft weights", bytes=draft, certainty="estimated", detail=keys.speculative.draft))
    terms += device_terms(facts.dimensions, keys.parallel, keys.scheduler)
    context = load_hardware(machine.described_by).context_mib << 20 if machine.described_by else 0
    terms.append(Term(name="runtime", bytes=context or DEFAULT_CONTEXT_BYTES, certainty="estimated"))
    return terms


def _accelerator(resolution: Resolution, machine: Machine) -> Accelerator | None:
    assert resolution.loaded is not None
    vendor = resolution.loaded.recipe.profiles[resolution.profile].when.vendor
    return next((found for found in machine.accelerators if found.vendor == vendor), None)


def _device_memory(resolution: Resolution, machine: Machine) -> int:
    """What a rank may take of its device, 0 where that is not known."""
    found = _accelerator(resolution, machine)
    if found is None or not found.gb_per_device:
        return 0
    size = load_hardware(machine.described_by).device_bytes if machine.described_by else found.gb_per_device * GIB
    return int(size * (resolution.keys.kv.fraction or DEVICE_FRACTION))


def _cpu_budget(plan: Plan) -> int | None:
    """What a rank may take; those of one machine share its memory."""
    keys, facts = plan.resolution.keys, plan.facts
    if not plan.machine.free_bytes and not keys.kv.bytes:
        return None
    weights = weights_term(facts.weight_bytes, facts.dimensions, keys.parallel, facts.stored).bytes
    return cpu_pool_bytes(
        requested=keys.kv.bytes,
        wanted=wanted_bytes(keys.scheduler, plan.shape, granularity=keys.kv.granularity, wanted_len=plan.max_len),
        free_bytes=plan.memory_bytes - weights - keys.kv.host_bytes,
    )


def _device_budget(plan: Plan) -> int | None:
    if plan.resolution.keys.kv.bytes:
        return plan.resolution.keys.kv.bytes
    return max(0, plan.memory_bytes - plan.fixed_bytes) if plan.memory_bytes else None


def _judge_devices(plan: Plan) -> None:
    """Ranks are a device each. Of a machine without any, the missing features say enough."""
    found = _accelerator(plan.resolution, plan.machine)
    there = found.count * plan.resolution.keys.parallel.nodes if found is not None else plan.devices
    if plan.devices > there:
        plan.problems.append(f"{plan.devices} ranks (tp x dp x pp) need a device each, there are {there}")


def _judge(plan: Plan, budget: int) -> None:
    keys, pool, memory = plan.resolution.keys, plan.pool, plan.memory_bytes
    assert pool is not None
    where = "a device" if not _on_cpu(plan.resolution) else "memory"
    if memory and plan.fixed_bytes > memory:
        plan.problems.append(
            f"weights and buffers take {human_bytes(plan.fixed_bytes)} of {where}, the engine may take "
            f"{human_bytes(memory)}: {human_bytes(plan.fixed_bytes - memory)} short before any KV cache"
        )
    elif memory and plan.fixed_bytes + budget > memory:
        plan.problems.append(
            f"weights and buffers ({human_bytes(plan.fixed_bytes)}) and KV cache ({human_bytes(budget)}) exceed the "
            f"{human_bytes(memory)} of {where} that are free"
        )
    elif pool.holds < 1:
        least = 2 * plan.shape.parent_bytes
        plan.problems.append(
            f"a KV cache of {human_bytes(budget)} does not hold one request ({len(plan.groups)} cache groups in blocks "
            f"of {keys.kv.granularity} tokens, at least {human_bytes(least)}); raise --kv-cache-gb"
        )
    elif keys.scheduler.max_len and pool.parents < pool.per_request:
        need = (pool.per_request + 1) * plan.shape.parent_bytes
        plan.problems.append(
            f"one request of {keys.scheduler.max_len} tokens needs {human_bytes(need)} of KV cache, it has "
            f"{human_bytes(budget)}: --max-model-len {pool.holds - keys.scheduler.overlap} fits, or "
            f"--kv-cache-gb {ceil_gib(need)}"
        )
    elif pool.parents < pool.per_request:
        plan.notes.append(
            f"the KV cache holds {pool.holds} tokens, less than the context of {plan.facts.context}: no request may be "
            "longer"
        )


def ceil_gib(count: int) -> str:
    """GiB with three digits, rounded up: what is written is enough."""
    return f"{-(-count * 1000 // GIB) / 1000:.3f}"
