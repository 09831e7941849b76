"""Which profile a machine gets, and what is said about the others."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tokenspeed.recipes.catalogue import find_recipe, load_recipe
from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.machine import Accelerator, Machine
from tokenspeed.recipes.schema import Recipe
from tokenspeed.recipes.selection import Candidate, DoesNotFit, choose_profile

B200 = Accelerator(vendor="nvidia", arch="sm100", count=8, gb_per_device=180, description="B200")
ONE_H200 = Accelerator(vendor="nvidia", arch="sm90", count=1, gb_per_device=141, description="H200")

MakeMachine = Callable[..., Machine]


def recipe(name: str) -> Recipe:
    return load_recipe(find_recipe(name)).recipe


def reasons(candidates: list[Candidate]) -> dict[str, str]:
    return {found.name: found.reason for found in candidates}


def test_without_an_accelerator_the_cpu_profile_runs(make_machine: MakeMachine) -> None:
    chosen, candidates = choose_profile(recipe("smollm2-135m"), make_machine(), None)
    assert chosen == "cpu"
    assert reasons(candidates) == {"cpu": "", "smoke": "cpu comes first"}


def test_without_an_accelerator_kimi_falls_to_smoke_and_says_why(make_machine: MakeMachine) -> None:
    chosen, candidates = choose_profile(recipe("kimi-k2.5"), make_machine(), None)
    assert chosen == "smoke"
    told = reasons(candidates)
    assert told["b200-nvfp4"] == "needs 4 x nvidia (sm100 or sm103) with 180 GB each; there is no accelerator"
    assert all(told[name] for name in told if name != "smoke")


def test_smoke_is_not_a_silent_stand_in_where_there_are_devices(make_machine: MakeMachine) -> None:
    with pytest.raises(DoesNotFit) as caught:
        choose_profile(recipe("kimi-k2.5"), make_machine(ONE_H200), None)
    message = str(caught.value)
    assert (
        "h200-int4: needs 8 x nvidia (sm90) with 140 GB each; there are 1 x nvidia (sm90) with 141 GB each" in message
    )
    assert "smoke: random weights: chosen on request" in message
    assert "--profile smoke" in message


def test_a_profile_that_matches_the_devices_but_not_the_engine_can_be_planned(make_machine: MakeMachine) -> None:
    chosen, candidates = choose_profile(recipe("kimi-k2.5"), make_machine(B200), None)
    assert chosen == "b200-nvfp4"
    assert {found.name: found.status for found in candidates}["b200-nvfp4"] == "unsupported"


def test_an_explicit_profile_wins_and_a_wrong_one_names_the_nearest(make_machine: MakeMachine) -> None:
    chosen, candidates = choose_profile(recipe("smollm2-135m"), make_machine(), "smoke")
    assert chosen == "smoke"
    assert reasons(candidates)["cpu"] == "smoke was asked for"
    with pytest.raises(RecipeError, match='no profile "smok"; did you mean "smoke"'):
        choose_profile(recipe("smollm2-135m"), make_machine(), "smok")


def test_weights_larger_than_memory_are_passed_over(make_machine: MakeMachine) -> None:
    chosen, candidates = choose_profile(recipe("qwen3-0.6b"), make_machine(free_gib=1.0), None)
    assert chosen == "smoke"
    assert reasons(candidates)["cpu"] == "the weights take 1.4 GiB, 1.0 GiB of memory are free"


@pytest.mark.parametrize(("status", "winner"), [("functional", "other"), ("unsupported", "cpu")])
def test_a_better_status_comes_first(recipes: Path, make_machine: MakeMachine, status: str, winner: str) -> None:
    path = recipes / "small.yaml"
    text = path.read_text().replace("status: functional", "status: untested", 1)
    path.write_text(text.replace("  smoke:", f"  other:\n    when: {{vendor: cpu}}\n    status: {status}\n  smoke:"))
    chosen, candidates = choose_profile(load_recipe(path).recipe, make_machine(), None)
    assert chosen == winner
    expected = "the recipe calls it unsupported" if status == "unsupported" else ""
    assert reasons(candidates)["other"] == expected
