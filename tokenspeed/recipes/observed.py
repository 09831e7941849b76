"""What a start was predicted to take and what it took, side by side; kept for the next plan of the same profile."""

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tokenspeed.recipes.byte_counts import human_bytes
from tokenspeed.recipes.cache_folder import cache_directory
from tokenspeed.recipes.resolved import ResolvedConfig

TOTAL = "sum"


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One start of one profile on this machine.

    Attributes:
        name: of the recipe or path; profile "" for a path.
        recipe_hash: of the recipe's content then.
        when: UTC, to the second.
        predicted, observed: term to bytes on the rank. "sum" is, observed, what the engine process grew by from its
            imports to its first token, with the part of the reserved caches that nothing was written to yet.
        settings, sources: the configuration it ran with, key by key.
    """

    name: str
    profile: str
    recipe_hash: str
    when: str
    predicted: dict[str, int]
    observed: dict[str, int]
    settings: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)


def observe(config: ResolvedConfig, memory: dict[str, int]) -> Observation | None:
    """Pairs the plan's terms with the engine's own account of them; None where there was no plan."""
    if not config.predicted:
        return None
    shared = {name: size for name, size in config.predicted.items() if name in memory}
    return Observation(
        name=config.name,
        profile=config.profile,
        recipe_hash=config.recipe_hash,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        predicted={**shared, **({TOTAL: sum(shared.values())} if TOTAL in memory else {})},
        observed=memory,
        settings=config.settings,
        sources=config.sources,
    )


def keep(observation: Observation) -> Path | None:
    """Stores it in place of the profile's last one; None where the cache cannot be written, which harms nothing."""
    path = _path(observation.name, observation.profile)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(observation), indent=2) + "\n")
    except OSError:
        return None
    return path


def last_observation(name: str, profile: str) -> Observation | None:
    """The last start of this profile on this machine, or None."""
    try:
        return Observation(**json.loads(_path(name, profile).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def render_observation(observation: Observation) -> list[str]:
    """A table of the terms, predicted and observed."""
    lines = [f"  memory{'':<15}{'predicted':>12}{'observed':>12}"]
    for name, predicted in observation.predicted.items():
        seen = observation.observed[name]
        sign = f"{seen / predicted - 1:+.1%}" if predicted and seen != predicted else ""
        lines.append(f"    {name:<17}{human_bytes(predicted):>12}{human_bytes(seen):>12}  {sign}".rstrip())
    return lines


def _path(name: str, profile: str) -> Path:
    return cache_directory() / "observed" / f"{name}-{profile or 'path'}.json"
