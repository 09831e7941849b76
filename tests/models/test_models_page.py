"""docs/models.md says which architectures there are, under which class names, and what they cache."""

import re
from pathlib import Path

import pytest
from tiny_models import TINY, tiny_config

from tokenspeed.models import architecture
from tokenspeed.recipes.model_config import ARCHITECTURES, read_model_config
from tokenspeed.recipes.resolved import ModelSource

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
ROWS = {
    cells[0]: cells[1:]
    for line in PAGE.splitlines()
    if line.startswith("| ") and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 5
}
KINDS = {"full_history": "full", "sliding_window": "window", "state": "state"}


def test_the_page_names_every_architecture_and_class() -> None:
    ours: dict[str, set[str]] = {}
    for name, found in ARCHITECTURES.items():
        ours.setdefault(found, set()).add(name)
    named = {row: set(cells[0].split(", ")) for row, cells in ROWS.items() if row != "architecture"}
    assert named == ours


@pytest.mark.parametrize("family", TINY)
def test_the_page_names_the_kinds_of_cache_groups(family: str, tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    config = read_model_config(ModelSource(kind="folder", path=str(tmp_path)))
    kinds = {KINDS[group.kind] for group in architecture(config.architecture).cache_groups(config, granularity=128)}
    assert kinds <= set(re.findall(r"full|window|state", ROWS[config.architecture][2]))
