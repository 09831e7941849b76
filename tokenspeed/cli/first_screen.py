"""Without accelerators, for a model that is made for them: what it needs, and how near known boxes come to it."""

from tokenspeed.recipes.boxes import nearest_boxes, render_boxes
from tokenspeed.recipes.machine import Machine, described_machine
from tokenspeed.recipes.plan import make_plan
from tokenspeed.recipes.plan_text import render_plan
from tokenspeed.recipes.resolve import Resolution, resolve_loaded
from tokenspeed.recipes.selection import SMOKE


def without_accelerators(resolution: Resolution, machine: Machine) -> list[str]:
    """The plan of the best profile for devices on the box that suits it, and a table of all boxes; else nothing."""
    loaded = resolution.loaded
    if loaded is None or resolution.profile != SMOKE or machine.accelerators:
        return []
    profiles = loaded.recipe.profiles
    if not any(profile.when.vendor != "cpu" for profile in profiles.values()) or any(
        profile.when.vendor == "cpu" for name, profile in profiles.items() if name != SMOKE
    ):
        return []  # it has no profile for devices, or one for CPUs that was passed over for another reason
    boxes = [box for box in nearest_boxes(loaded) if box.profile]
    best = boxes[0]
    box = described_machine(best.hardware)
    plan = make_plan(resolve_loaded(loaded, box, profile=best.profile), box)
    return [
        f"WHAT {loaded.recipe.name} NEEDS: profile {best.profile} on {best.hardware.description}",
        *(f"  {line}" for line in render_plan(plan)),
        "",
        "HOW NEAR EACH KNOWN BOX COMES: bytes needed of bytes there, on each device",
        *render_boxes(boxes),
        "",
        f"HERE: no accelerator, so the smoke profile runs, as {resolution.served_name}",
    ]
