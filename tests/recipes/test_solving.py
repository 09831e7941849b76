"""Properties of plans: more never fits less, less never frees less, and solve's answer is the last that fits."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenspeed.recipes.catalogue import load_hardware
from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.machine import Machine, described_machine
from tokenspeed.recipes.plan import ModelFacts, Plan, make_plan, model_facts
from tokenspeed.recipes.resolve import Resolution, resolve
from tokenspeed.recipes.schema import Parallel
from tokenspeed.recipes.selection import DoesNotFit
from tokenspeed.recipes.solve import Solvable, satisfied, solve, with_value

CASES = [
    ("kimi-k2.5", "h200", "h200-int4"),
    ("kimi-k2.5", "mi355x", "mi355x-mxfp4"),
    ("deepseek-v3.2", "b200", "b200-fp8"),
    ("gpt-oss-120b", "h100", "h100-mxfp4"),
    ("qwen3-8b", "rtx-5090", "rtx-4090"),
    ("qwen3-8b", "cpu-server", "cpu"),
    ("smollm2-135m", "cpu", "cpu"),
]


@cache
def machine_of(hardware: str) -> Machine:
    return described_machine(load_hardware(hardware))


@cache
def resolution(case: tuple[str, str, str]) -> tuple[Resolution, Machine, ModelFacts]:
    name, hardware, profile = case
    machine = machine_of(hardware)
    found = resolve(name, machine, profile=profile)
    return found, machine, model_facts(found)


def planned(case: tuple[str, str, str], *, parallel: Parallel | None = None, **scheduler: int) -> Plan:
    found, machine, facts = resolution(case)
    changes = {"scheduler": found.keys.scheduler.model_copy(update=scheduler)}
    keys = found.keys.model_copy(update={**changes, **({"parallel": parallel} if parallel else {})})
    return make_plan(replace(found, keys=keys), machine, facts)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
@pytest.mark.parametrize("key", ["max_len", "max_seqs"])
def test_the_answer_fits_and_one_more_does_not(case: tuple[str, str, str], key: Solvable) -> None:
    found, machine, _ = resolution(case)
    start = with_value(found, "max_len", 4096)
    answer, plan = solve(start, machine, key)
    assert satisfied(plan, key)
    assert getattr(plan.resolution.keys.scheduler, key) == answer
    if not (key == "max_len" and answer == plan.facts.context):
        assert not satisfied(make_plan(with_value(start, key, answer + 1), machine), key)


def test_what_nothing_solves_says_why() -> None:
    start, machine, _ = resolution(("kimi-k2.5", "h100", "h200-int4"))
    with pytest.raises(DoesNotFit, match="short before any KV cache"):
        solve(start, machine, "max_len")


@given(
    case=st.sampled_from(CASES),
    shorter=st.integers(1, 8192),
    more=st.integers(0, 8192),
    seqs=st.integers(1, 64),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_longer_request_never_takes_less(case: tuple[str, str, str], shorter: int, more: int, seqs: int) -> None:
    short, long = (planned(case, max_len=length, max_seqs=seqs) for length in (shorter, min(shorter + more, 8192)))
    assert short.pool is not None
    assert long.pool is not None
    assert short.pool.per_request <= long.pool.per_request
    assert short.needed_bytes <= long.needed_bytes
    # What fits at the longer length fits at the shorter one.
    assert long.problems or not short.problems


@given(case=st.sampled_from(CASES), seqs=st.integers(1, 500), more=st.integers(0, 500), chunk=st.integers(16, 8192))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_more_requests_or_tokens_a_step_never_free_memory(
    case: tuple[str, str, str], seqs: int, more: int, chunk: int
) -> None:
    few = planned(case, max_len=1024, max_seqs=seqs, chunk=chunk)
    many = planned(case, max_len=1024, max_seqs=seqs + more, chunk=chunk)
    larger = planned(case, max_len=1024, max_seqs=seqs, chunk=chunk + more)
    assert few.fixed_bytes <= many.fixed_bytes
    assert few.fixed_bytes <= larger.fixed_bytes


@given(name=st.sampled_from(["kimi-k2.5", "deepseek-v3.2", "gpt-oss-120b", "qwen3-8b"]), doublings=st.integers(0, 3))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_more_devices_never_hold_less(name: str, doublings: int) -> None:
    case = next(case for case in CASES if case[0] == name)

    def over(ranks: int) -> Plan | None:
        try:
            return planned(case, parallel=Parallel(tp=ranks), max_len=4096)
        except RecipeError:  # this model cannot be divided so
            return None

    fewer, more = over(1 << doublings), over(2 << doublings)
    if fewer is None or more is None:
        return
    weights = [next(term.bytes for term in plan.terms if term.name == "weights") for plan in (fewer, more)]
    assert weights[1] <= weights[0]
    if fewer.pool is not None and more.pool is not None and doublings > 0:
        assert more.pool.requests >= fewer.pool.requests
