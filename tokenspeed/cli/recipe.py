"""``recipe list · show · validate · plan · explain``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenspeed.cli.output import say, shout
from tokenspeed.cli.start import resolve_target
from tokenspeed.recipes.catalogue import find_recipe, load_hardware, load_recipe, recipe_names
from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.machine import Machine, described_machine, detect_machine
from tokenspeed.recipes.plan import make_plan, render_all_settings, render_plan, render_settings
from tokenspeed.recipes.selection import DoesNotFit, choose_profile


def list_recipes() -> int:
    """Prints every recipe with the profile this machine would take; a broken one with its first mistake."""
    machine = detect_machine()
    say(f"this machine: {machine.summary}")
    names = recipe_names()
    width = max(len(name) for name in names)
    for name in names:
        try:
            recipe = load_recipe(find_recipe(name)).recipe
            chosen, _ = choose_profile(recipe, machine, None)
            profile = recipe.profiles[chosen]
            say(f"  {name:<{width}}  {recipe.parameters:<16}  {chosen} ({profile.status}): {profile.note}")
        except RecipeError as error:
            say(f"  {name:<{width}}  broken: {error.problems[0]}")
        except DoesNotFit:
            say(f"  {name:<{width}}  {recipe.parameters:<16}  no profile fits: tokenspeed recipe plan {name}")
    return 0


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
    for name in names:
        try:
            loaded = load_recipe(recipe_path(name))
            say(f"{loaded.path}: right ({', '.join(loaded.recipe.profiles)})")
        except RecipeError as error:
            broken = True
            say(*error.problems)
    return 2 if broken else 0


def plan_target(
    target: str, profile: str | None, assignments: list[str], flags: Mapping[str, Any], hardware: str | None
) -> int:
    """Prints the plan; 3 where it does not fit."""
    machine = _machine(hardware)
    resolution = resolve_target(target, profile, assignments, flags, machine)
    plan = make_plan(resolution, machine)
    shout(*resolution.warnings)
    say(*render_plan(plan), "settings", *render_settings(resolution))
    plan.refuse_misfit()
    return 0


def explain_target(
    target: str, profile: str | None, assignments: list[str], flags: Mapping[str, Any], hardware: str | None
) -> int:
    """Prints every key with its value and source."""
    resolution = resolve_target(target, profile, assignments, flags, _machine(hardware))
    shout(*resolution.warnings)
    say(*render_all_settings(resolution))
    return 0


def recipe_path(name: str) -> Path:
    """A recipe's file, by name or by path; raises RecipeError."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    return find_recipe(name)


def _machine(hardware: str | None) -> Machine:
    return described_machine(load_hardware(hardware)) if hardware else detect_machine()
