"""From a resolution to a configuration that an engine can start with: fit checked, weights fetched."""

from collections.abc import Mapping
from typing import Any

from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.flags import FLAGS
from tokenspeed.recipes.machine import Machine, detect_machine
from tokenspeed.recipes.overrides import flag_values
from tokenspeed.recipes.plan import PLANNED, Plan, make_plan
from tokenspeed.recipes.resolve import Resolution, resolve
from tokenspeed.recipes.resolved import ResolvedConfig
from tokenspeed.recipes.validation import nearest
from tokenspeed.recipes.weights import Progress, fetch


def prepare(resolution: Resolution, machine: Machine, progress: Progress) -> ResolvedConfig:
    """Fetches what is missing and returns the configuration to run.

    Raises UnsupportedError, DoesNotFit, FetchError, or CheckpointError for weights that are here and cannot be read.
    """
    resolution.refuse_missing()
    plan = make_plan(resolution, machine)
    plan.refuse_misfit()
    config = resolution.config(fetch(resolution.weights, progress))
    if not resolution.located.present:
        # What only the files can tell is checked once they are here.
        plan = make_plan(resolution.located_again(), machine)
        plan.refuse_misfit()
    return planned(config, plan)


def planned(config: ResolvedConfig, plan: Plan) -> ResolvedConfig:
    """The configuration with the plan's KV cache and terms: what is printed is what the engine takes."""
    if plan.pool is None:
        return config
    predicted = {term.name: term.bytes for term in plan.terms if term.name != "processes"}
    predicted["KV cache"] = plan.pool.bytes
    if config.kv.bytes:
        return config.model_copy(update={"predicted": predicted})
    return config.model_copy(
        update={
            "kv": config.kv.model_copy(update={"bytes": plan.pool.bytes}),
            "predicted": predicted,
            "sources": {**config.sources, "kv.bytes": PLANNED},
            "settings": {**config.settings, "kv.bytes": plan.pool.bytes},
        }
    )


def resolve_model(target: str, settings: Mapping[str, Any], *, profile: str | None = None) -> ResolvedConfig:
    """Resolves and prepares ``target`` with ``settings`` named like the flags of ``serve`` (``max_num_seqs=8``).

    Downloads without showing progress. Raises RecipeError for an unknown setting, and what ``prepare`` raises.
    """
    known = {flag.parameter for flag in FLAGS}
    for name in settings:
        if name not in known:
            raise RecipeError(f'unknown setting "{name}"{nearest(name, known)}')
    machine = detect_machine()
    resolution = resolve(target, machine, profile=profile, overrides=flag_values(settings))
    return prepare(resolution, machine, lambda *_: None)
