"""``recipe diff``: keys, memory and room that change, against another recipe, a change, or the last start."""

from pathlib import Path

import pytest

from tokenspeed.cli.recipe import diff_targets
from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.observed import Observation, keep, last_observation
from tokenspeed.recipes.selection import DoesNotFit


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_change_shows_its_effect_on_memory(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff_targets("small", None, "smoke", ["kv.bytes=8MiB scheduler.max_seqs=4"], {}, "cpu") == 0
    lines = shown(capsys)
    assert "  kv.bytes            0 -> 8388608  SET kv.bytes" in lines
    assert "  scheduler.max_seqs  16 -> 4  SET scheduler.max_seqs" in lines
    assert any(line.startswith("  workspace") and "->" in line and "-" in line.split("->")[1] for line in lines)
    assert any(line.startswith("  weights") and "->" not in line for line in lines)
    assert any("room for 16 -> 31 requests" in line for line in lines)


def test_two_recipes_are_compared(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited = recipes / "edited.yaml"
    edited.write_text("extends: small\nname: edited\nprofiles: {cpu: {scheduler: {chunk: 64}}}\n")
    diff_targets("small", "edited", "cpu", [], {}, "cpu")
    assert "  scheduler.chunk  128 -> 64  profile cpu (edited.yaml:3)" in shown(capsys)
    diff_targets("small", None, "cpu", ["env.OMP_NUM_THREADS=3"], {}, "cpu")
    assert any(line.split()[:4] == ["env.OMP_NUM_THREADS", "-", "->", "3"] for line in shown(capsys))
    diff_targets("small", "small", "cpu", [], {}, "cpu")
    assert shown(capsys)[-1] == "no difference"


def test_without_a_second_side_the_last_start_is_it(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecipeError, match="was not started here yet"):
        diff_targets("small", None, "smoke", [], {}, "cpu")
    keep(
        Observation(
            name="small",
            profile="smoke",
            recipe_hash="0",
            when="2026-01-02T03:04:05+00:00",
            predicted={"weights": 100, "KV cache": 5 << 20, "sum": (5 << 20) + 100},
            observed={"weights": 100, "KV cache": 5 << 20, "sum": (5 << 20) + 100},
            settings={"scheduler.max_seqs": 5},
            sources={"scheduler.max_seqs": "--max-num-seqs"},
        )
    )
    assert diff_targets("small", None, "smoke", [], {}, "cpu") == 0
    lines = shown(capsys)
    assert lines[0] == "from  small as it started on 2026-01-02T03:04:05+00:00"
    assert any(line.split() == ["scheduler.max_seqs", "5", "->", "16", "recipe", "(small.yaml:10)"] for line in lines)
    assert any(line.startswith("  KV cache") and "5.00 MiB ->" in line for line in lines)


def test_what_no_longer_fits_says_so_and_ends_with_3(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DoesNotFit):
        diff_targets("small", None, "smoke", ["kv.bytes=64GiB"], {}, "cpu")
    assert any(line.startswith("no fit  ") for line in shown(capsys))


def test_a_damaged_record_of_a_start_is_as_if_it_were_not_there(recipes: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache" / "observed" / "small-smoke.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"name": "small"}')
    assert last_observation("small", "smoke") is None
