"""What a resolution amounts to, in figures: what ``plan``, ``DRY=1`` and the start print. Nothing is loaded.

The full memory plan, term by term and for devices, is not in this version; what is not known is said to be unknown.
"""

import textwrap
from dataclasses import dataclass, field

from tokenspeed.recipes.features import describe_weights, weights_bytes
from tokenspeed.recipes.machine import Machine
from tokenspeed.recipes.memory import cpu_pool_bytes, effective_cache_type, group_bytes_per_token, groups_of_model
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed.recipes.resolve import Resolution, model_source, settings
from tokenspeed.recipes.resolved import GIB
from tokenspeed.recipes.schema import CacheGroup
from tokenspeed.recipes.selection import DoesNotFit


@dataclass(frozen=True)
class GroupPlan:
    """Bytes that one token leaves in a cache group on one rank."""

    group_id: str
    kind: str
    bytes_per_token: int


@dataclass(frozen=True)
class Plan:
    """Figures of one resolution.

    Attributes:
        cache_type: of the KV cache, "auto" resolved.
        groups: per cache group.
        context: the model's own.
        max_len: the longest request, 0 unknown.
        weight_bytes: 0 unknown.
        pool_bytes: of the KV cache; 0 where only the device can tell.
        problems: why it does not fit; empty when it does, or when that is not known.
        notes: what an operator should know.
    """

    resolution: Resolution
    machine: Machine
    cache_type: str
    groups: list[GroupPlan]
    context: int
    max_len: int
    weight_bytes: int
    pool_bytes: int
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def bytes_per_token(self) -> int:
        """Of all groups together."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def pool_tokens(self) -> int:
        """Tokens the KV cache holds; 0 unknown."""
        return self.pool_bytes // self.bytes_per_token

    def refuse_misfit(self) -> None:
        """Raises DoesNotFit with every reason."""
        if self.problems:
            raise DoesNotFit("\n".join(self.problems))


def make_plan(resolution: Resolution, machine: Machine) -> Plan:
    """Computes the figures; raises CheckpointError where weights that are here cannot be read."""
    keys = resolution.keys
    groups, context, stored = _model_facts(resolution)
    cache_type = effective_cache_type(keys.kv.dtype, stored)
    parts = [
        GroupPlan(group.id, group.kind, group_bytes_per_token(group, cache_type, keys.parallel.tp)) for group in groups
    ]
    per_token = sum(part.bytes_per_token for part in parts)
    weight_bytes = weights_bytes(resolution.weights) or resolution.located.bytes_on_disk
    max_len = min(keys.scheduler.max_len or context, context)
    on_cpu = not resolution.missing
    pool = 0
    if on_cpu or keys.kv.bytes:
        free = max(0, machine.free_bytes - weight_bytes - keys.kv.host_bytes) if machine.free_bytes else 0
        pool = cpu_pool_bytes(
            requested=keys.kv.bytes,
            wanted=keys.scheduler.max_seqs * max_len * per_token,
            free_bytes=free,
        )
    plan = Plan(resolution, machine, cache_type, parts, context, max_len, weight_bytes, pool)
    if on_cpu:
        _judge(plan)
    return plan


def _model_facts(resolution: Resolution) -> tuple[list[CacheGroup], int, str]:
    """Cache groups, context and stored type: from the files where they are here, else as the recipe states them."""
    source = model_source(resolution)
    if source is not None and not resolution.missing:
        config = read_model_config(source)
        return groups_of_model(config), config.context_length, "gguf" if source.kind == "gguf" else config.dtype
    assert resolution.loaded is not None, "a bare path is always present"
    recipe = resolution.loaded.recipe
    stored = getattr(resolution.weights, "format", "")
    # Quantised checkpoints of device profiles keep a bfloat16 cache unless the profile says otherwise.
    return recipe.cache_groups, recipe.context, stored if stored.startswith(("gguf", "float32")) else "bfloat16"


def _judge(plan: Plan) -> None:
    keys, machine = plan.resolution.keys, plan.machine
    granularity = keys.kv.granularity
    longest = plan.pool_tokens // granularity * granularity
    cache = keys.kv.bytes + keys.kv.host_bytes
    if machine.free_bytes and plan.weight_bytes + cache > machine.free_bytes:
        plan.problems.append(
            f"weights ({human_bytes(plan.weight_bytes)}) and KV cache ({human_bytes(cache)}) exceed the "
            f"{human_bytes(machine.free_bytes)} of memory that are free"
        )
    if keys.scheduler.max_len and longest < keys.scheduler.max_len:
        need = -(-keys.scheduler.max_len // granularity) * granularity * plan.bytes_per_token
        plan.problems.append(
            f"one request of {keys.scheduler.max_len} tokens needs {human_bytes(need)} of KV cache, it has "
            f"{human_bytes(plan.pool_bytes)}: --max-model-len {longest} fits, or --kv-cache-gb {need / GIB:.3f}"
        )
    elif longest < granularity:
        plan.problems.append(
            f"a KV cache of {human_bytes(plan.pool_bytes)} does not hold one block of {granularity} tokens "
            f"({human_bytes(granularity * plan.bytes_per_token)}); raise --kv-cache-gb"
        )
    elif longest < plan.max_len:
        plan.notes.append(
            f"the KV cache holds {longest} tokens, less than the context of {plan.context}: no request may be longer"
        )


def human_bytes(count: int) -> str:
    """Bytes for a person: two digits after the point and a binary unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def render_plan(plan: Plan) -> list[str]:
    """The plan as lines of text: what runs, why this profile, what it needs, and every value with its source."""
    resolution = plan.resolution
    where = resolution.located.path if resolution.located.present else "not on this machine yet; fetched at the start"
    if not resolution.located.present and resolution.located.path:
        where = f"{where} to {resolution.located.path}"
    lines = [
        f"model     {resolution.name}, served as {resolution.served_name}",
        f"machine   {plan.machine.summary}",
    ]
    if resolution.loaded is not None:
        loaded = resolution.loaded
        lines.append(
            f"recipe    {loaded.path} ({loaded.content_hash}), profile {resolution.profile}: {resolution.status}"
        )
    lines += [
        f"          {found.name} ({found.status}): {found.reason}" for found in resolution.candidates if found.reason
    ]
    lines.append(f"weights   {describe_weights(resolution.weights)}")
    if where:
        lines.append(f"          {where}")
    lines.append(f"          {human_bytes(plan.weight_bytes) if plan.weight_bytes else 'size not known'}")
    ranks = " a rank" if resolution.keys.parallel.tp > 1 else ""
    lines += [
        f"kv        {part.group_id} ({part.kind}): {part.bytes_per_token:,} B a token{ranks} in {plan.cache_type}"
        for part in plan.groups
    ]
    if plan.pool_bytes:
        pool = f"{human_bytes(plan.pool_bytes)}: {plan.pool_tokens:,} tokens"
        lines.append(f"          pool {pool}; longest request {plan.max_len:,}")
    else:
        needed = human_bytes(plan.max_len * plan.bytes_per_token)
        lines.append(f"          one request of {plan.max_len:,} tokens: {needed}{ranks}")
    if resolution.keys.kv.host_bytes:
        behind = f"host {human_bytes(resolution.keys.kv.host_bytes)}"
        if resolution.keys.kv.storage_dir:
            bound = resolution.keys.kv.storage_bytes
            size = human_bytes(bound) if bound else "a tenth of its file system"
            behind += f", behind it {resolution.keys.kv.storage_dir} ({size})"
        lines.append(f"          {behind}")
    if resolution.loaded is not None:
        formats = {name: value for name, value in resolution.loaded.recipe.formats.model_dump().items() if value}
        if formats:
            said = ", ".join(f"{name} {value}" for name, value in formats.items())
            lines.append(f"formats   {said} (recorded; this version parses neither tool calls nor reasoning)")
    lines += [f"note      {note}" for note in plan.notes]
    lines += [f"missing   {feature}" for feature in resolution.missing]
    lines += [f"no fit    {problem}" for problem in plan.problems]
    return lines


def render_settings(resolution: Resolution) -> list[str]:
    """Every key that something set, with its value and source; then those at their default, several to a line."""
    values = settings(resolution.keys)
    given = {key: value for key, value in values.items() if resolution.sources[key] != "default"}
    width = max((len(key) for key in given), default=0)
    lines = [f"  {key:<{width}}  {value!s:<12}  {resolution.sources[key]}" for key, value in given.items()]
    rest = [f"{key}={value}" for key, value in values.items() if key not in given and value not in (None, "")]
    return [*lines, *textwrap.wrap(", ".join(rest), 110, initial_indent="  defaults: ", subsequent_indent="    ")]


def render_all_settings(resolution: Resolution) -> list[str]:
    """Every key on a line of its own, with its value and where the value came from."""
    values = settings(resolution.keys)
    width = max(len(key) for key in values)
    return [
        f"  {key:<{width}}  {'-' if value in (None, '') else value!s:<12}  {resolution.sources[key]}"
        for key, value in values.items()
    ]
