"""Overrides: who wins, and that none lifts a check."""

import pytest

from tokenspeed_kernel.oracle import SelectionOracle
from tokenspeed_kernel.overrides import environment_name, kernel_override, set_recipe_overrides
from tokenspeed_kernel.registry import Band, CapabilityRequirement, use_registry
from tokenspeed_kernel.selection import OverrideError, select
from tokenspeed_kernel.signature import FLOAT32, FormatSignature
from tokenspeed_kernel.traits import Range

SIGNATURE = FormatSignature.of(input=FLOAT32)
VARIABLE = "TOKENSPEED_KERNEL_OVERRIDE_TOY_COPY"


@pytest.fixture
def choose(registry, toy_spec, make_platform):
    for spec in (
        toy_spec("best_copy", band=Band.PLUGIN),
        toy_spec("wide_copy", solution="wide", band=Band.SPECIALISED, traits={"width": Range(128)}),
        toy_spec("amd_copy", solution="amd", capability=CapabilityRequirement(vendors=frozenset({"amd"}))),
        toy_spec("plain_a", solution="plain"),
        toy_spec("plain_b", solution="plain", band=Band.PERFORMANT),
    ):
        registry.register(spec, lambda x, out: None, "test")

    def choose(override=None):
        return select(
            "toy",
            "copy",
            SIGNATURE,
            {"width": 64},
            platform=make_platform(),
            override=override,
            registry=registry,
            oracle=SelectionOracle(),
        )

    return choose


@pytest.fixture
def recipe(registry):
    def set_to(targets):
        with use_registry(registry):
            set_recipe_overrides(targets)

    yield set_to
    set_to({})


def test_argument_beats_context_beats_environment_beats_recipe(choose, recipe, monkeypatch):
    assert choose().spec.name == "best_copy"
    recipe({"toy.copy": "plain_a"})
    assert (choose().spec.name, choose().override.source) == ("plain_a", "recipe")
    monkeypatch.setenv(VARIABLE, "plain_b")
    assert (choose().spec.name, choose().override.source) == ("plain_b", f"environment {VARIABLE}")
    with kernel_override("toy", "copy", "plain_a"):
        assert (choose().spec.name, choose().override.source) == ("plain_a", "context manager")
        with kernel_override("toy", "copy", "best"):
            assert choose().spec.name == "best_copy"
        assert choose().spec.name == "plain_a"
        assert (choose("plain_b").spec.name, choose("plain_b").override.source) == ("plain_b", "argument")
    assert choose().spec.name == "plain_b"


def test_a_solution_picks_the_best_of_its_kernels(choose):
    selection = choose("plain")
    assert [c.spec.name for c in selection.ranked] == ["plain_b", "plain_a"]
    assert {c.spec.name: c.dropped_at for c in selection.dropped}["best_copy"] == "override"
    assert "override   plain (argument)" in selection.explain()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("wide_copy", "wide_copy: dropped at traits: width is 64; it must be at least 128"),
        ("wide", "wide_copy: dropped at traits: width is 64"),
        ("amd", "amd_copy: dropped at platform: runs on amd; this is cpu"),
        ("nowhere", "names no kernel and no solution of toy.copy; there are"),
    ],
)
def test_an_override_that_cannot_run_is_an_error_with_the_reason(choose, monkeypatch, target, reason):
    with pytest.raises(OverrideError, match=reason):
        choose(target)
    monkeypatch.setenv(VARIABLE, target)
    with pytest.raises(OverrideError, match=rf"\(environment {VARIABLE}\)"):
        choose()


def test_a_recipe_that_names_no_operation_is_refused(recipe):
    with pytest.raises(ValueError, match=r"names a kernel for 'toy.cpoy'; the operations are \['toy.copy'\]"):
        recipe({"toy.cpoy": "plain"})


def test_the_environment_name_is_upper_case():
    assert environment_name("attention", "gqa_prologue") == "TOKENSPEED_KERNEL_OVERRIDE_ATTENTION_GQA_PROLOGUE"


def test_a_variable_that_names_no_operation_is_an_error_not_silence(registry, choose, monkeypatch):
    monkeypatch.setenv(VARIABLE.replace("COPY", "CPOY"), "plain_a")
    assert choose().spec.name == "best_copy"  # another registry than the process's: not its environment
    with (
        use_registry(registry),
        pytest.raises(OverrideError, match=r"environment \S+_TOY_CPOY overrides no operation; .* \['toy.copy'\]"),
    ):
        select("toy", "copy", SIGNATURE, {"width": 64})
