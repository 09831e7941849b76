"""How near each known box comes to running a model: the first thing to show where none is at hand."""

from dataclasses import dataclass
from typing import Literal

from tokenspeed.recipes.byte_counts import human_bytes
from tokenspeed.recipes.catalogue import LoadedRecipe, hardware_names, load_hardware
from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.machine import Machine, described_machine
from tokenspeed.recipes.plan import Plan, make_plan
from tokenspeed.recipes.resolve import resolve_loaded
from tokenspeed.recipes.schema import Hardware, Profile
from tokenspeed.recipes.selection import SMOKE, mismatch

Verdict = Literal["fits", "short", "no profile"]


@dataclass(frozen=True, kw_only=True)
class Box:
    """One known machine and the profile that comes nearest to it.

    Attributes:
        profile: "" where the recipe has none for this vendor.
        needed, has: bytes on one device: the least that the profile needs, and what the engine may take.
        requests: of the profile's max_len that run at once; 0 where it does not fit.
        reason: why not, or what to know.
    """

    hardware: Hardware
    verdict: Verdict
    profile: str = ""
    needed: int = 0
    has: int = 0
    requests: int = 0
    reason: str = ""


def nearest_boxes(loaded: LoadedRecipe) -> list[Box]:
    """One entry for each hardware file with devices, those that fit first, then by how little is missing."""
    boxes = [_box(loaded, load_hardware(name)) for name in hardware_names()]
    order = {"fits": 0, "short": 1, "no profile": 2}
    devices = [box for box in boxes if box.hardware.vendor != "cpu"]
    return sorted(devices, key=lambda box: (order[box.verdict], box.needed / box.has if box.has else 0.0))


def _box(loaded: LoadedRecipe, hardware: Hardware) -> Box:
    machine = described_machine(hardware)
    attempts = [
        _attempt(loaded, hardware, machine, name, profile)
        for name, profile in loaded.recipe.profiles.items()
        if name != SMOKE and profile.when.vendor == hardware.vendor
    ]
    if not attempts:
        reason = f"the recipe has no profile for {hardware.vendor}"
        return Box(hardware=hardware, verdict="no profile", reason=reason)
    return min(attempts, key=lambda box: (box.verdict != "fits", box.needed / box.has if box.has else 0.0))


def _attempt(loaded: LoadedRecipe, hardware: Hardware, machine: Machine, name: str, profile: Profile) -> Box:
    try:
        plan = make_plan(resolve_loaded(loaded, machine, profile=name), machine)
    except RecipeError as error:
        return Box(hardware=hardware, verdict="short", profile=name, reason=error.problems[0])
    obstacle = _obstacle(plan, profile, machine, hardware)
    requests = plan.pool.requests * profile.parallel.dp if plan.pool is not None else 0
    return Box(
        hardware=hardware,
        verdict="short" if obstacle else "fits",
        profile=name,
        needed=plan.needed_bytes,
        has=plan.memory_bytes,
        requests=0 if obstacle else requests,
        reason=obstacle,
    )


def _obstacle(plan: Plan, profile: Profile, machine: Machine, hardware: Hardware) -> str:
    if plan.devices > hardware.devices * profile.parallel.nodes:
        return f"needs {plan.devices} devices, it has {hardware.devices}"
    if plan.needed_bytes > plan.memory_bytes:
        return f"{human_bytes(plan.needed_bytes - plan.memory_bytes)} short on each device"
    if profile.when.arch and hardware.arch not in profile.when.arch:
        return f"it would fit; the profile is made for {' or '.join(profile.when.arch)}"
    return mismatch(profile.when, machine)


def render_boxes(boxes: list[Box]) -> list[str]:
    """A table: box, profile, what a device needs and may take, and the verdict."""
    width = max((len(box.hardware.description) for box in boxes), default=0)
    profile_width = max((len(box.profile) for box in boxes), default=0)
    lines = []
    for box in boxes:
        figures = f"{human_bytes(box.needed):>12} of {human_bytes(box.has):>12}" if box.needed else " " * 28
        verdict = box.reason or f"fits: {box.requests:,} request{'s' if box.requests != 1 else ''} at once"
        lines.append(
            f"  {box.hardware.description:<{width}}  {box.profile:<{profile_width}}  {figures}  {verdict}".rstrip()
        )
    return lines
