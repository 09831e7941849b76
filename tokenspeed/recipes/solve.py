"""The largest value of one setting that still fits: ``recipe plan NAME --solve max_len`` or ``max_seqs``."""

from bisect import bisect_right
from dataclasses import replace
from typing import Literal

from tokenspeed.recipes.machine import Machine
from tokenspeed.recipes.plan import Plan, make_plan, model_facts
from tokenspeed.recipes.resolve import Resolution
from tokenspeed.recipes.selection import DoesNotFit

Solvable = Literal["max_len", "max_seqs"]

MOST_SEQS = 65_536
"""Requests; beyond what any engine runs together."""


def solve(resolution: Resolution, machine: Machine, key: Solvable) -> tuple[int, Plan]:
    """The largest value of scheduler.``key``, all else equal, and the plan with it.

    For max_len: one request of that length fits. For max_seqs: so many requests of max_len fit at the same time.
    Raises DoesNotFit where not even 1 does, and what make_plan raises.
    """
    facts = model_facts(resolution)

    def plan_with(value: int) -> Plan:
        return make_plan(with_value(resolution, key, value), machine, facts)

    most = facts.context if key == "max_len" else MOST_SEQS

    def fails(value: int) -> bool:
        return not satisfied(plan_with(value), key)

    answer = bisect_right(range(1, most + 1), False, key=fails)
    if answer == 0:
        plan = plan_with(1)
        plan.refuse_misfit()
        raise DoesNotFit(
            f"no value of scheduler.{key} fits: "
            + ("what the KV cache may take is not known for this machine" if plan.pool is None else "not even 1")
        )
    return answer, plan_with(answer)


def satisfied(plan: Plan, key: Solvable) -> bool:
    """Whether the plan's own value of ``key`` fits."""
    if plan.problems or plan.pool is None:
        return False
    if key == "max_len":
        return plan.pool.requests >= 1
    return plan.pool.requests >= plan.resolution.keys.scheduler.max_seqs


def with_value(resolution: Resolution, key: Solvable, value: int) -> Resolution:
    """The same resolution with another value of scheduler.``key``."""
    scheduler = resolution.keys.scheduler.model_copy(update={key: value})
    sources = {**resolution.sources, f"scheduler.{key}": "--solve"}
    return replace(resolution, keys=resolution.keys.model_copy(update={"scheduler": scheduler}), sources=sources)
