"""What changes between two configurations: keys, terms of memory, and what the KV cache has room for."""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenspeed.recipes.byte_counts import human_bytes
from tokenspeed.recipes.document import Value
from tokenspeed.recipes.plan import Plan
from tokenspeed.recipes.resolve import settings

Setting = tuple[Value, str]
"""A value and where it came from."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison.

    Attributes:
        name: what it is, for the heading.
        settings: dotted key to value and source.
        terms: term of the memory plan to bytes on a rank.
        requests: requests of the longest length that run at once, 0 where that is not known.
        problems: why it does not fit.
    """

    name: str
    settings: Mapping[str, Setting]
    terms: Mapping[str, int]
    requests: int = 0
    problems: tuple[str, ...] = ()


def side_of(plan: Plan, name: str) -> Side:
    """A plan as one side."""
    resolution = plan.resolution
    values = settings(resolution.keys)
    pool = {"KV cache": plan.pool.bytes} if plan.pool else {}
    return Side(
        name=name,
        settings={key: (value, resolution.sources.get(key, "default")) for key, value in values.items()},
        terms={**{term.name: term.bytes for term in plan.terms}, **pool},
        requests=plan.pool.requests if plan.pool else 0,
        problems=tuple(plan.problems),
    )


def render_difference(old: Side, new: Side) -> list[str]:
    """Both sides, key by key and term by term, where they differ."""
    keys = _changed_keys(old, new)
    lines = [f"from  {old.name}", f"to    {new.name}"]
    if not keys and old.terms == new.terms:
        return [*lines, "no difference"]
    width = max((len(key) for key, _, _, _ in keys), default=0)
    lines += [f"  {key:<{width}}  {was} -> {now}  {source}" for key, was, now, source in keys]
    lines.append("memory of a rank")
    # The old side may be a start's own account, which has no terms for what was only estimated.
    shared = [name for name in new.terms if name in old.terms]
    for name in shared:
        lines.append(_term_line(name, old.terms[name], new.terms[name]))
    lines.append(_term_line("sum", *(sum(side.terms[name] for name in shared) for side in (old, new))))
    if old.requests != new.requests and old.requests and new.requests:
        lines.append(f"  room for {old.requests:,} -> {new.requests:,} requests of the longest length at once")
    return [*lines, *(f"no fit  {problem}" for problem in new.problems)]


def _changed_keys(old: Side, new: Side) -> list[tuple[str, str, str, str]]:
    changed = []
    for key in dict.fromkeys([*old.settings, *new.settings]):
        was, _ = old.settings.get(key, (None, ""))
        now, source = new.settings.get(key, (None, "gone"))
        if _text(was) != _text(now):
            changed.append((key, _text(was), _text(now), source))
    return changed


def _text(value: Value) -> str:
    return "-" if value in (None, "") else str(value)


def _term_line(name: str, was: int, now: int) -> str:
    if was == now:
        return f"  {name:<17}{human_bytes(now):>12}"
    sign = "+" if now > was else "-"
    return f"  {name:<17}{human_bytes(was):>12} -> {human_bytes(now):>12}  {sign}{human_bytes(abs(now - was))}"
