"""The serving guard, and what a start says of its kernels."""

import logging

import pytest
from kernel_toys import SIGNATURE, serving, verified

from tokenspeed_kernel import binding, selection, serving_guard
from tokenspeed_kernel.binding import bind, recording_selections
from tokenspeed_kernel.oracle import SelectionOracle
from tokenspeed_kernel.platform import override_platform
from tokenspeed_kernel.registry import Band, use_registry
from tokenspeed_kernel.selection import select
from tokenspeed_kernel.serving_guard import GUARD_VARIABLE, ServingGuard, ServingViolation, note_compilation
from tokenspeed_kernel.start_report import doubtful_lines, log_start_report, report_lines


@pytest.fixture
def guard(monkeypatch):
    """The process's guard, not serving; a fresh one."""
    monkeypatch.delenv(GUARD_VARIABLE, raising=False)
    fresh = ServingGuard()
    monkeypatch.setattr(serving_guard, "_guard", fresh)
    return fresh


@pytest.fixture
def here(registry, toy_spec, make_platform, monkeypatch, tmp_path, guard):
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path))
    with override_platform(make_platform()) as platform, use_registry(registry):
        oracle = verified(SelectionOracle(), platform, "checked")
        for module in (binding, selection):
            monkeypatch.setattr(module, "default_oracle", lambda: oracle)
        yield platform


def add(registry, toy_spec, name, band, **changes):
    solution = "reference" if band is Band.REFERENCE else name
    registry.register(toy_spec(name, band=band, solution=solution, **changes), lambda x, out: None, "test")


def toy_bind(**keywords):
    keywords.setdefault("override", None)
    return bind("toy", "copy", SIGNATURE, {"width": 64}, **keywords)


def test_before_serving_nothing_counts(registry, toy_spec, here, guard):
    add(registry, toy_spec, "checked", Band.PERFORMANT)
    toy_bind()
    select("toy", "copy", SIGNATURE, {"width": 64})
    note_compilation("checked")
    guard.begin()
    assert guard.violations() == {}


def test_while_serving_each_violation_is_counted_and_logged_once(registry, toy_spec, here, guard, caplog):
    add(registry, toy_spec, "checked", Band.PERFORMANT)
    with serving(guard):
        for _ in range(3):
            assert toy_bind().spec.name == "checked"  # late, but it works
        select("toy", "copy", SIGNATURE, {"width": 64})
        note_compilation("checked")
        with pytest.raises(ServingViolation, match=r"tune of toy\.copy while serving; do it before serving begins"):
            guard.check("tune", "toy.copy")
    assert guard.violations() == {
        "bind toy.copy": 3,
        "compile checked": 1,
        "select toy.copy": 1,
        "tune toy.copy": 1,
    }
    assert caplog.text.count("bind of toy.copy while serving") == 1
    toy_bind()
    assert guard.violations()["bind toy.copy"] == 3


@pytest.mark.parametrize("action", ["select", "bind", "compile"])
def test_the_strict_guard_refuses_everything(guard, monkeypatch, action):
    monkeypatch.setenv(GUARD_VARIABLE, "strict")
    guard.check(action, "toy.copy")
    with serving(guard), pytest.raises(ServingViolation, match=f"{action} of toy.copy while serving"):
        guard.check(action, "toy.copy")
    assert guard.violations() == {f"{action} toy.copy": 1}


def test_a_new_serving_begins_to_count_anew(guard):
    with serving(guard):
        guard.check("bind", "toy.copy")
    guard.begin()
    assert guard.violations() == {}


def test_the_report_says_who_was_chosen_and_by_what_score(registry, toy_spec, here, caplog):
    add(registry, toy_spec, "reference_toy", Band.REFERENCE)
    add(registry, toy_spec, "checked", Band.PERFORMANT)
    with recording_selections() as selections:
        toy_bind()
        toy_bind()
        toy_bind(override="reference")
    with caplog.at_level(logging.INFO, "tokenspeed_kernel"):
        log_start_report(selections)
    assert report_lines(selections) == [
        "toy.copy (input=float32): checked, the only one that can run",
        "toy.copy (input=float32): reference_toy, asked for by argument",
    ]
    assert doubtful_lines(selections) == ["toy.copy runs on reference_toy: the PyTorch reference, slow"]
    assert "kernel of toy.copy (input=float32): checked" in caplog.text
    assert "KERNEL TO DOUBT: toy.copy runs on reference_toy" in caplog.text
    assert "1 of the kernels above deserve doubt" in caplog.text


def test_the_report_tells_estimates_and_unverified_kernels(registry, toy_spec, here, caplog):
    add(registry, toy_spec, "checked", Band.PERFORMANT)
    add(registry, toy_spec, "unchecked", Band.PLUGIN)
    with recording_selections() as selections:
        toy_bind()
        toy_bind(override="unchecked")
    assert report_lines(selections) == [
        "toy.copy (input=float32): checked, estimate 0.60",
        "toy.copy (input=float32): unchecked, asked for by argument",
    ]
    log_start_report(selections[:1])
    assert "DOUBT" not in caplog.text
    log_start_report(selections)
    assert f"toy.copy runs on unchecked: its numerics were not verified on {here.key}" in caplog.text


def test_the_reference_as_last_resort_is_doubted_aloud(registry, toy_spec, here):
    add(registry, toy_spec, "reference_toy", Band.REFERENCE)
    with recording_selections() as selections:
        toy_bind()
    assert doubtful_lines(selections) == ["toy.copy runs on reference_toy: the PyTorch reference, nothing else fits"]
    with recording_selections() as none:
        pass
    assert none == []
