"""The plan as lines of text: what runs, why this profile, what it needs, and every value with its source."""

import os
import textwrap

from tokenspeed.recipes.activation_type import ACTIVATIONS_VARIABLE, auto_activations
from tokenspeed.recipes.byte_counts import human_bytes
from tokenspeed.recipes.features import describe_weights
from tokenspeed.recipes.plan import Plan
from tokenspeed.recipes.resolve import DEVICE_OF_VENDOR, Resolution, settings


def render_plan(plan: Plan) -> list[str]:
    """All of it."""
    lines = [*_identity(plan), *_weights(plan), *render_memory(plan), *_cache(plan), *_products(plan), *_formats(plan)]
    lines += [f"note      {note}" for note in plan.notes]
    lines += [f"missing   {feature}" for feature in plan.resolution.missing]
    lines += [f"no fit    {problem}" for problem in plan.problems]
    return lines


def render_memory(plan: Plan) -> list[str]:
    """The terms of one rank, the KV cache and the sum, with what there is."""
    ranks = f"of each of {plan.devices} ranks" if plan.devices > 1 else "of the one rank"
    rows: list[tuple[str, int, str, str]] = [
        (term.name, term.bytes, term.certainty, term.detail) for term in plan.terms
    ]
    if plan.pool is not None:
        rows.append(("KV cache", plan.pool.bytes, "counted", _room(plan)))
    else:
        least = plan.needed_bytes - plan.fixed_bytes
        rows.append(("KV cache", least, "counted", f"the least: one request of {plan.max_len:,} tokens"))
    total = sum(row[1] for row in rows)
    there = f"may take {human_bytes(plan.memory_bytes)}" if plan.memory_bytes else ""
    rows.append(("sum", total, "", there))
    lines = [f"memory    {ranks}"]
    for name, size, certainty, detail in rows:
        lines.append(f"            {name:<17}{human_bytes(size):>12}  {certainty:<11}{detail}".rstrip())
    return lines


def _room(plan: Plan) -> str:
    pool, replicas = plan.pool, plan.resolution.keys.parallel.dp
    assert pool is not None
    each = f" on each of {replicas} replicas" if replicas > 1 else ""
    if pool.requests:
        requests = f"room for {pool.requests:,} request{'s' if pool.requests > 1 else ''} of {pool.wanted_len:,} tokens"
        return f"{requests}{each}; alone one may have {pool.holds:,}"
    return f"no request of {pool.wanted_len:,} tokens fits; the longest has {pool.holds:,}"


def _identity(plan: Plan) -> list[str]:
    resolution = plan.resolution
    lines = [f"model     {resolution.name}, served as {resolution.served_name}", f"machine   {plan.machine.summary}"]
    if resolution.loaded is not None:
        loaded = resolution.loaded
        lines.append(
            f"recipe    {loaded.path} ({loaded.content_hash}), profile {resolution.profile}: {resolution.status}"
        )
    return lines + [
        f"          {found.name} ({found.status}): {found.reason}" for found in resolution.candidates if found.reason
    ]


def _weights(plan: Plan) -> list[str]:
    resolution = plan.resolution
    where = resolution.located.path if resolution.located.present else "not on this machine yet; fetched at the start"
    if not resolution.located.present and resolution.located.path:
        where = f"{where} to {resolution.located.path}"
    size = human_bytes(plan.facts.weight_bytes) if plan.facts.weight_bytes else "size not known"
    lines = [f"weights   {describe_weights(resolution.weights)}"]
    return [*lines, *([f"          {where}"] if where else []), f"          {size} in all"]


def _cache(plan: Plan) -> list[str]:
    """Bytes a token, group by group, and what stands behind the pool."""
    keys = plan.resolution.keys
    lines: list[str] = []
    ranks = " on each rank" if plan.devices > 1 else ""
    for part in plan.groups:
        group = part.group
        what = f"{part.bytes:,} B a {'request' if group.kind == 'state' else 'token'}{ranks} in {part.dtype}"
        if group.kind == "sliding_window":
            what += f", of the last {group.window:,}"
        if group.replicated and keys.parallel.tp > 1:
            what += ", whole on every rank"
        lines.append(f"{'kv' if not lines else '':<10}{group.id} ({group.kind}): {what}")
    if keys.kv.host_bytes:
        behind = f"host {human_bytes(keys.kv.host_bytes)}"
        if keys.kv.storage_dir:
            bound = keys.kv.storage_bytes
            size = human_bytes(bound) if bound else "a tenth of its file system"
            behind += f", behind it {keys.kv.storage_dir} ({size})"
        lines.append(f"          {behind}")
    return lines


def _products(plan: Plan) -> list[str]:
    """What goes into products: what "auto" stands for here, or what was asked for, and where that came from."""
    resolution, stored = plan.resolution, plan.facts.format or "float32"
    forced = os.environ.get(ACTIVATIONS_VARIABLE)
    asked = forced or resolution.keys.activations
    source = ACTIVATIONS_VARIABLE if forced else resolution.sources["activations"]
    if asked not in ("auto", "fp4"):
        return [f"products  of {asked} activations ({source})"]
    device = DEVICE_OF_VENDOR[resolution.vendor]
    where = "on the CPU" if device == "cpu" else "on a device"
    auto = f"{auto_activations(stored, device)} activations: auto for {stored} weights {where}"
    if asked == "fp4":
        return [f"products  of fp4 activations where weights have four bits ({source}), else of {auto}"]
    return [f"products  of {auto} ({source})"]


def _formats(plan: Plan) -> list[str]:
    formats = plan.resolution.keys.formats.model_dump()
    said = ", ".join(f"{name} {value}" for name, value in formats.items() if value)
    return [f"formats   {said}"] if said else []


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
