"""Which profile a machine runs, and why not the others."""

from dataclasses import dataclass

from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.features import family_of, missing_features, weights_bytes
from tokenspeed.recipes.machine import Accelerator, Machine
from tokenspeed.recipes.resolved import GIB
from tokenspeed.recipes.schema import Profile, Recipe, When
from tokenspeed.recipes.validation import nearest

SMOKE = "smoke"
_RANKS = {"verified": 0, "functional": 1, "untested": 2, "unsupported": 3}
_CPU_RANK = 10
_SMOKE_RANK = 20


class DoesNotFit(ValueError):
    """No profile, or not the one asked for, fits this machine; the message has the figures."""


@dataclass(frozen=True)
class Candidate:
    """One profile of the recipe; ``reason`` says why it was passed over, "" for the chosen one."""

    name: str
    status: str
    reason: str


def choose_profile(recipe: Recipe, machine: Machine, wanted: str | None) -> tuple[str, list[Candidate]]:
    """Returns the profile's name and what became of each.

    An explicit profile is taken as it is. Else, of those this machine and this engine can run: verified, functional,
    untested, profiles for devices before those for the CPU, and smoke last and only where there is no accelerator.
    Where the engine can run none, the one that matches the machine's devices is taken, for a plan. Raises RecipeError
    for an unknown profile, DoesNotFit where none is left.
    """
    if wanted is not None and wanted not in recipe.profiles:
        raise RecipeError(f'recipe {recipe.name} has no profile "{wanted}"{nearest(wanted, recipe.profiles)}')
    reasons = {name: _obstacle(recipe, name, profile, machine) for name, profile in recipe.profiles.items()}
    if wanted is not None:
        chosen = wanted
    else:
        able = [name for name, reason in reasons.items() if not reason]
        if not able:
            # What matches the machine but not the engine can be planned; run refuses it by name.
            able = [name for name, profile in recipe.profiles.items() if _matches_device(profile, machine)]
        if not able:
            lines = [f"  {name}: {reason}" for name, reason in reasons.items()]
            hint = f"a random model runs anywhere: PROFILE={SMOKE}, or tokenspeed run {recipe.name} --profile {SMOKE}"
            raise DoesNotFit(
                "\n".join([f"no profile of {recipe.name} fits this machine ({machine.summary})", *lines, hint])
            )
        chosen = min(able, key=lambda name: _rank(name, recipe.profiles[name]))
    return chosen, [
        Candidate(
            name, status_of(recipe, profile), "" if name == chosen else reasons[name] or _outranked(chosen, wanted)
        )
        for name, profile in recipe.profiles.items()
    ]


def status_of(recipe: Recipe, profile: Profile) -> str:
    """The profile's status; "unsupported" whenever it asks for what the engine does not have."""
    return "unsupported" if _missing(recipe, profile) else profile.status


def _missing(recipe: Recipe, profile: Profile) -> list[str]:
    weights = profile.weights or recipe.weights
    return missing_features(family_of(recipe, profile), weights, profile.when.vendor, profile)


def _obstacle(recipe: Recipe, name: str, profile: Profile, machine: Machine) -> str:
    wrong_machine = mismatch(profile.when, machine)
    missing = _missing(recipe, profile)
    if wrong_machine:
        return wrong_machine
    if missing:
        return "unsupported: " + "; ".join(missing)
    if profile.status == "unsupported":
        return "the recipe calls it unsupported"
    needed = weights_bytes(profile.weights or recipe.weights)
    if profile.when.vendor == "cpu" and needed > machine.free_bytes > 0:
        return f"the weights take {needed / GIB:.1f} GiB, {machine.free_bytes / GIB:.1f} GiB of memory are free"
    if name == SMOKE and machine.accelerators:
        return "random weights: chosen on request, or where there is no accelerator"
    return ""


def mismatch(when: When, machine: Machine) -> str:
    """Why the machine is not the one a profile is made for; "" where it is."""
    if when.vendor == "cpu":
        return ""
    wish = f"{when.min_devices} x {when.vendor}"
    if when.arch:
        wish += f" ({' or '.join(when.arch)})"
    if when.min_gb_per_device:
        wish += f" with {when.min_gb_per_device} GB each"
    if not machine.accelerators:
        return f"needs {wish}; there is no accelerator"
    if any(_fits(when, found) for found in machine.accelerators):
        return ""
    have = ", ".join(
        f"{found.count} x {found.vendor} ({found.arch or 'unknown'}) with {found.gb_per_device or 'unknown'} GB each"
        for found in machine.accelerators
    )
    return f"needs {wish}; there are {have}"


def _fits(when: When, found: Accelerator) -> bool:
    return (
        found.vendor == when.vendor
        and (not when.arch or not found.arch or found.arch in when.arch)
        and found.count >= when.min_devices
        # A driver that does not tell the size is believed: the load will tell.
        and (not found.gb_per_device or found.gb_per_device >= when.min_gb_per_device)
    )


def _matches_device(profile: Profile, machine: Machine) -> bool:
    return profile.when.vendor != "cpu" and not mismatch(profile.when, machine)


def _rank(name: str, profile: Profile) -> int:
    if name == SMOKE:
        return _SMOKE_RANK
    return _RANKS[profile.status] + (_CPU_RANK if profile.when.vendor == "cpu" else 0)


def _outranked(chosen: str, wanted: str | None) -> str:
    return f"{chosen} was asked for" if wanted else f"{chosen} comes first"
