"""Every recipe on every described machine: the whole plan as text, so that a change of a figure is seen and meant.

Run with TOKENSPEED_UPDATE_SNAPSHOTS=1 to write them anew, and read the difference before it is committed.
"""

import os
from pathlib import Path

import pytest

from tokenspeed.recipes.catalogue import configs_directory, hardware_names, load_hardware, load_recipe
from tokenspeed.recipes.machine import described_machine
from tokenspeed.recipes.plan import make_plan
from tokenspeed.recipes.plan_text import render_plan
from tokenspeed.recipes.resolve import resolve_loaded
from tokenspeed.recipes.selection import DoesNotFit

SNAPSHOTS = Path(__file__).parent / "snapshots"
SHIPPED = sorted((configs_directory() / "recipes").glob("*.yaml"))


def shown(path: Path) -> str:
    """The plans of a recipe on every machine, without what depends on this checkout or on its cache."""
    loaded = load_recipe(path)
    lines = []
    for hardware in hardware_names():
        machine = described_machine(load_hardware(hardware))
        lines.append(f"=== {hardware}")
        try:
            plan = make_plan(resolve_loaded(loaded, machine), machine)
        except DoesNotFit as error:
            lines += [line.rstrip() for line in str(error).splitlines()]
            continue
        lines += [
            line
            for line in render_plan(plan)
            if not line.startswith(("recipe ", "          /")) and "not on this machine" not in line
        ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_plans_of_a_recipe(path: Path, recipes: Path) -> None:
    snapshot = SNAPSHOTS / f"plans-{path.stem}.txt"
    text = shown(path)
    if os.environ.get("TOKENSPEED_UPDATE_SNAPSHOTS"):
        snapshot.parent.mkdir(exist_ok=True)
        snapshot.write_text(text)
    assert text == snapshot.read_text(), "the plans changed; TOKENSPEED_UPDATE_SNAPSHOTS=1 writes them anew"
