"""A verified section is inserted into a recipe's text: nothing else of the file changes."""

from pathlib import Path
from typing import Any

import pytest

from tokenspeed.recipes.catalogue import load_recipe
from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.verified_text import with_verified, write_verified

SECTION: dict[str, Any] = {
    "date": "2026-01-31",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "hardware": "4 cores",
    "workload": "a: b # c",
    "results": {"decode_tokens_per_s_1": 12.5},
    "accuracy": {"prose_logprob": {"value": -2.5, "baseline": -2.5, "threshold": -2.6}},
}


@pytest.mark.parametrize("profile", ["cpu", "smoke"])
def test_lines_are_added_and_none_is_changed(recipes: Path, profile: str) -> None:
    path = recipes / "small.yaml"
    path.write_text(
        path.read_text().replace("    scheduler: {chunk: 128}\n", "    scheduler:\n      chunk: 128  # why\n\n")
    )
    before = path.read_text().splitlines()
    write_verified(path, profile, SECTION)
    after = path.read_text().splitlines()
    assert [line for line in after if line in before] == before
    verified = load_recipe(path).recipe.profiles[profile].verified
    assert verified is not None
    assert verified.model_dump(exclude_defaults=True) == SECTION
    assert '      date: "2026-01-31"' in after


def test_a_section_that_is_there_is_replaced(recipes: Path) -> None:
    path = recipes / "small.yaml"
    before = path.read_text()
    write_verified(path, "cpu", {**SECTION, "hardware": "another", "driver": "1"})
    path.write_text(path.read_text().replace("  smoke:", "  # about the smoke profile\n  smoke:"))
    write_verified(path, "cpu", SECTION)
    once = with_verified(before, path, "cpu", SECTION)
    assert path.read_text() == once.replace("  smoke:", "  # about the smoke profile\n  smoke:")


def test_a_profile_in_braces_is_refused_by_line(recipes: Path) -> None:
    path = recipes / "small.yaml"
    lines = path.read_text().splitlines()
    start, end = lines.index("  cpu:"), lines.index("  smoke:")
    text = "\n".join([*lines[:start], "  cpu: {when: {vendor: cpu}}", *lines[end:]]) + "\n"
    with pytest.raises(RecipeError, match=rf"small.yaml:{start + 1}: profile cpu is written in braces"):
        with_verified(text, path, "cpu", SECTION)


def test_an_inherited_profile_is_written_where_it_stands(recipes: Path) -> None:
    path = recipes / "other.yaml"
    path.write_text("extends: small\nname: other\n")
    with pytest.raises(RecipeError, match="profile cpu is not written in this file"):
        write_verified(path, "cpu", SECTION)


def test_a_section_that_makes_no_right_recipe_changes_nothing(recipes: Path) -> None:
    path = recipes / "small.yaml"
    before = path.read_text()
    with pytest.raises(RecipeError, match="commit"):
        write_verified(path, "cpu", {**SECTION, "commit": "abc"})
    assert path.read_text() == before
