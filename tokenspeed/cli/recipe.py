"""``recipe list · show · validate · plan · explain · diff · schema``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenspeed.cli.output import say, shout
from tokenspeed.cli.start import resolve_target
from tokenspeed.recipes.byte_counts import human_bytes
from tokenspeed.recipes.catalogue import find_recipe, load_hardware, load_recipe, recipe_names
from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.machine import Machine, described_machine, detect_machine
from tokenspeed.recipes.model_config import CheckpointError
from tokenspeed.recipes.plan import PLANNED, Plan, make_plan
from tokenspeed.recipes.plan_text import render_all_settings, render_plan, render_settings
from tokenspeed.recipes.resolve import Resolution, resolve_loaded, settings
from tokenspeed.recipes.selection import DoesNotFit
from tokenspeed.telemetry.redaction import Redactor, known_secrets, secret_values


def list_recipes(*, fits: bool, hardware: str | None) -> int:
    """Prints every recipe with the profile the machine would take and what that needs; broken ones with their first
    mistake. ``fits`` leaves out what does not fit, and smoke profiles."""
    machine = machine_of(hardware)
    say(f"{'machine' if hardware else 'this machine'}: {machine.summary}")
    names = recipe_names()
    width = max(len(name) for name in names)
    for name in names:
        line, runs = _listed(name, machine)
        if runs or not fits:
            say(f"  {name:<{width}}  {line}")
    return 0


def _listed(name: str, machine: Machine) -> tuple[str, bool]:
    """The recipe's line, and whether it fits with its real weights."""
    try:
        loaded = load_recipe(find_recipe(name))
        resolution = resolve_loaded(loaded, machine)
        plan = make_plan(resolution, machine)
    except RecipeError as error:
        return f"broken: {error.problems[0]}", False
    except DoesNotFit:
        return f"no profile fits: tokenspeed recipe plan {name}", False
    except CheckpointError as error:
        return str(error), False
    profile = loaded.recipe.profiles[resolution.profile]
    needs = f"needs {human_bytes(plan.needed_bytes)}" + (f" on each of {plan.devices}" if plan.devices > 1 else "")
    verdict = f"does not fit, {needs}" if plan.problems else needs
    line = f"{loaded.recipe.parameters:<16}  {resolution.profile} ({resolution.status}), {verdict}: {profile.note}"
    return line, not plan.problems and resolution.profile != "smoke"


def show_recipe(name: str) -> int:
    """Prints a recipe's content after extends, as YAML."""
    import yaml

    loaded = load_recipe(recipe_path(name))
    say(f"# {loaded.path} ({loaded.content_hash})")
    say(yaml.safe_dump(loaded.document.data, sort_keys=False, allow_unicode=True, width=120).rstrip())
    return 0


def validate_recipes(names: list[str]) -> int:
    """Checks recipes; 2 where one has a mistake."""
    broken = False
    for name in names or recipe_names():
        try:
            loaded = load_recipe(recipe_path(name))
            say(f"{loaded.path}: right ({', '.join(loaded.recipe.profiles)})")
        except RecipeError as error:
            broken = True
            say(*error.problems)
    return 2 if broken else 0


def plan_target(
    target: str,
    profile: str | None,
    assignments: list[str],
    flags: Mapping[str, Any],
    hardware: str | None,
    *,
    solve_for: str | None = None,
) -> int:
    """Prints the plan, with the largest value of ``solve_for`` that fits where one is named; 3 where it does not."""
    from tokenspeed.recipes.observed import last_observation, render_observation

    machine = machine_of(hardware)
    resolution = resolve_target(target, profile, assignments, flags, machine)
    if solve_for is not None:
        return _solve(resolution, machine, solve_for)
    plan = make_plan(resolution, machine)
    shout(*resolution.warnings)
    _say_redacted(resolution, *render_plan(plan), "settings", *render_settings(resolution))
    seen = None if hardware else last_observation(resolution.name, resolution.profile)
    if seen is not None:
        say(f"last start of this profile, {seen.when}", *render_observation(seen))
    plan.refuse_misfit()
    return 0


def _solve(resolution: Resolution, machine: Machine, key: str) -> int:
    from tokenspeed.recipes.solve import solve

    if key not in ("max_len", "max_seqs"):
        raise RecipeError(f"--solve {key}: it can solve for max_len (one request) or max_seqs (of max_len, at once)")
    answer, plan = solve(resolution, machine, "max_len" if key == "max_len" else "max_seqs")
    say(*render_plan(plan), f"solved    scheduler.{key} = {answer}: the largest that fits")
    return 0


def explain_target(
    target: str, profile: str | None, assignments: list[str], flags: Mapping[str, Any], hardware: str | None
) -> int:
    """Prints every key with its value and source."""
    resolution = resolve_target(target, profile, assignments, flags, machine_of(hardware))
    shout(*resolution.warnings)
    _say_redacted(resolution, *render_all_settings(resolution))
    return 0


def diff_targets(
    old: str,
    new: str | None,
    profile: str | None,
    assignments: list[str],
    flags: Mapping[str, Any],
    hardware: str | None,
) -> int:
    """Prints what changes from ``old`` to ``new``; 3 where that does not fit.

    Without ``new``: to ``old`` with what the command line sets, or, where it sets nothing, from the last start of
    ``old`` to what it says now.
    """
    from tokenspeed.recipes.difference import Side, render_difference, side_of
    from tokenspeed.recipes.observed import last_observation

    machine = machine_of(hardware)
    edited = make_plan(resolve_target(new or old, profile, assignments, flags, machine), machine)
    changed = bool(assignments) or any(value is not None for value in flags.values())
    if new is not None or changed:
        before = side_of(_plan_of(old, profile, machine), old)
    else:
        resolution = edited.resolution
        seen = last_observation(resolution.name, resolution.profile)
        if seen is None:
            raise RecipeError(
                f"{old} was not started here yet, so there is nothing to compare with; "
                "name a second recipe, or a change: --set scheduler.max_seqs=8"
            )
        now = settings(resolution.keys)
        was = {key: (value, seen.sources.get(key, "")) for key, value in seen.settings.items()}
        # What the plan filled in is its answer, not a setting: the terms of memory show it.
        filled_in = {key: (now[key], "") for key, (_, source) in was.items() if source == PLANNED and not now[key]}
        before = Side(name=f"{old} as it started on {seen.when}", settings={**was, **filled_in}, terms=seen.predicted)
    after = side_of(edited, f"{new or old}{' with what was set' if changed else ''}")
    _say_redacted(edited.resolution, *render_difference(before, after))
    edited.refuse_misfit()
    return 0


def _say_redacted(resolution: Resolution, *lines: str) -> None:
    """Prints what is often pasted into a report: secrets among the variables are blanked."""
    say(*map(Redactor(known_secrets() | secret_values(resolution.keys.env)), lines))


def _plan_of(target: str, profile: str | None, machine: Machine) -> Plan:
    return make_plan(resolve_target(target, profile, [], {}, machine), machine)


def print_schema() -> int:
    """Prints the JSON Schema of recipes, which editors check and complete with."""
    from tokenspeed.recipes.json_schema import recipe_schema

    say(json.dumps(recipe_schema(), indent=2))
    return 0


def recipe_path(name: str) -> Path:
    """A recipe's file, by name or by path; raises RecipeError."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    return find_recipe(name)


def machine_of(hardware: str | None) -> Machine:
    """The machine of a hardware file, or the one at hand."""
    return described_machine(load_hardware(hardware)) if hardware else detect_machine()
