"""From a resolution to a configuration that an engine can start with: fit checked, weights fetched."""

from collections.abc import Mapping
from typing import Any

from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.flags import FLAGS
from tokenspeed.recipes.machine import Machine, detect_machine
from tokenspeed.recipes.overrides import flag_values
from tokenspeed.recipes.plan import make_plan
from tokenspeed.recipes.resolve import Resolution, resolve
from tokenspeed.recipes.resolved import ResolvedConfig
from tokenspeed.recipes.validation import nearest
from tokenspeed.recipes.weights import Progress, fetch


def prepare(resolution: Resolution, machine: Machine, progress: Progress) -> ResolvedConfig:
    """Fetches what is missing and returns the configuration to run.

    Raises UnsupportedError, DoesNotFit, FetchError, or CheckpointError for weights that are here and cannot be read.
    """
    resolution.refuse_missing()
    make_plan(resolution, machine).refuse_misfit()
    config = resolution.config(fetch(resolution.weights, progress))
    if not resolution.located.present:
        # What only the files can tell is checked once they are here.
        resolution = resolution.located_again()
        make_plan(resolution, machine).refuse_misfit()
    return config


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
