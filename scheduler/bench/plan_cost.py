"""What one plan() costs, against what should not matter: how many wait, how long contexts are, how full the pool is.

A scheduler whose plan grows with the queue or with the context is slowest exactly when the engine is busiest. Each
table varies one thing, plays the engine (one result out, every row samples) and prints the CPU time of plan() and of
the advance() that lands its result, with the ratio of the medians to the table's first line.

    python scheduler/bench/plan_cost.py [--rounds 300] [--repeats 3] [--json]
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from tokenspeed_scheduler import CacheGroup, Event, Finish, ForwardResult, Plan, Scheduler, SchedulerConfig

GRANULARITY = 64
UNBOUNDED = 1 << 21


@dataclass(frozen=True)
class Line:
    """One line of a table: the varied value, microseconds a call (medians, and the 99th percentile), mean rows.

    A step is plan() and the advance() beside it.
    """

    value: int
    plan_us: float
    plan_p99_us: float
    advance_us: float
    step_us: float
    step_p99_us: float
    rows: float


def make_scheduler(*, blocks: int, seqs: int, budget: int = 8192) -> Scheduler:
    """A fused scheduler with one full-history group and overlap 1."""
    group = CacheGroup(group_id="full", kind="full_history", block_granularity=GRANULARITY)
    return Scheduler(
        SchedulerConfig(
            groups=[group],
            num_parents=blocks,
            prefix_granularity=GRANULARITY,
            max_num_seqs=seqs,
            max_scheduled_tokens=budget,
            max_model_len=UNBOUNDED,
            overlap_depth=1,
        )
    )


def random_prompt(random: np.random.Generator, length: int) -> NDArray[np.int32]:
    return random.integers(0, 50_000, length, dtype=np.int32)


class Loop:
    """The engine's side: lands the result of a plan when the next one is out, and tells time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.out: Plan | None = None
        self.left: dict[int, int] = {}
        self.plan_us: list[float] = []
        self.advance_us: list[float] = []
        self.rows: list[int] = []

    def submit(self, handle: int, prompt: NDArray[np.int32], new: int, *, declared: bool = True) -> None:
        self.scheduler.submit(handle, prompt, max_new_tokens=new, declared=declared)
        self.left[handle] = new

    def round(self) -> Plan:
        started = time.thread_time_ns()
        plan = self.scheduler.plan()
        planned = time.thread_time_ns()
        events = self._events(self.out) if self.out is not None else []
        landing = time.thread_time_ns()
        self.scheduler.advance(events)
        self.advance_us.append((time.thread_time_ns() - landing) / 1e3)
        self.plan_us.append((planned - started) / 1e3)
        self.rows.append(plan.num_rows)
        self.out = plan if plan.num_rows else None
        return plan

    def until_prefilled(self, handles: set[int]) -> None:
        """Makes rounds until every one of ``handles`` has sampled, and forgets the times so far."""
        missing = set(handles)
        while missing:
            plan = self.round()
            missing -= set(plan.handle[plan.samples == 1].tolist())
        self.plan_us, self.advance_us, self.rows = [], [], []

    def line(self, value: int) -> Line:
        steps = [plan + advance for plan, advance in zip(self.plan_us, self.advance_us, strict=True)]
        return Line(
            value=value,
            plan_us=statistics.median(self.plan_us),
            plan_p99_us=sorted(self.plan_us)[len(self.plan_us) * 99 // 100],
            advance_us=statistics.median(self.advance_us),
            step_us=statistics.median(steps),
            step_p99_us=sorted(steps)[len(steps) * 99 // 100],
            rows=statistics.fmean(self.rows),
        )

    def _events(self, plan: Plan) -> list[Event]:
        samples = plan.samples == 1
        events: list[Event] = [ForwardResult(plan.forward_id, np.where(samples, 7, -1).astype(np.int32))]
        for handle in plan.handle[samples].tolist():
            self.left[handle] -= 1
            if self.left[handle] == 0:
                events.append(Finish(handle))
        return events


def measure(loop: Loop, rounds: int, value: int) -> Line:
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            loop.round()
    finally:
        gc.enable()
    return loop.line(value)


def waiting_for_blocks(waiting: int, rounds: int) -> Line:
    """32 decoders hold a full pool; ``waiting`` prompts of 1000 tokens wait for blocks."""
    random = np.random.default_rng(0)
    residents, length, new = 32, 1000, 1024
    blocks = residents * -(-(length + new) // GRANULARITY)
    loop = Loop(make_scheduler(blocks=blocks, seqs=256))
    for handle in range(residents):
        loop.submit(handle, random_prompt(random, length), new)
    loop.until_prefilled(set(range(residents)))
    for handle in range(waiting):
        loop.submit(residents + handle, random_prompt(random, length), 100)
    return measure(loop, rounds, waiting)


def waiting_for_a_row(waiting: int, rounds: int) -> Line:
    """32 decoders take every row; ``waiting`` prompts of 1000 tokens wait for one, in a roomy pool."""
    random = np.random.default_rng(0)
    residents, length = 32, 1000
    loop = Loop(make_scheduler(blocks=4096, seqs=residents))
    for handle in range(residents):
        loop.submit(handle, random_prompt(random, length), 4000, declared=False)
    loop.until_prefilled(set(range(residents)))
    for handle in range(waiting):
        loop.submit(residents + handle, random_prompt(random, length), 100)
    return measure(loop, rounds, waiting)


def under_pressure(waiting: int, rounds: int) -> Line:
    """64 rows of undeclared length in a pool for half of them: retraction and re-admission beside ``waiting``."""
    random = np.random.default_rng(0)
    length, new = 500, 4 * rounds
    loop = Loop(make_scheduler(blocks=32 * -(-(length + 200) // GRANULARITY), seqs=64))
    for handle in range(64 + waiting):
        loop.submit(handle, random_prompt(random, length), new, declared=False)
    loop.until_prefilled(set(range(8)))
    return measure(loop, rounds, waiting)


def context(length: int, rounds: int) -> Line:
    """32 decoders whose contexts are ``length`` tokens long."""
    random = np.random.default_rng(0)
    residents, new = 32, 4000
    blocks = residents * (-(-(length + new) // GRANULARITY) + 1)
    loop = Loop(make_scheduler(blocks=blocks, seqs=residents))
    for handle in range(residents):
        loop.submit(handle, random_prompt(random, length), new)
    loop.until_prefilled(set(range(residents)))
    return measure(loop, rounds, length)


def cached_pages(pages: int, rounds: int) -> Line:
    """32 decoders beside ``pages`` cached blocks of requests that ended."""
    random = np.random.default_rng(0)
    residents, length, new = 32, 1000, 4000
    own = residents * (-(-(length + new) // GRANULARITY) + 1)
    loop = Loop(make_scheduler(blocks=own + pages + 64, seqs=residents))
    for handle in range(pages // 16):
        loop.submit(handle, random_prompt(random, 16 * GRANULARITY), 1)
    loop.until_prefilled(set(range(pages // 16)))
    first = pages // 16
    for handle in range(first, first + residents):
        loop.submit(handle, random_prompt(random, length), new)
    loop.until_prefilled(set(range(first, first + residents)))
    return measure(loop, rounds, pages)


def rows(count: int, rounds: int) -> Line:
    """``count`` decoders: the one thing that may cost, and only in proportion."""
    random = np.random.default_rng(0)
    loop = Loop(make_scheduler(blocks=count * 40, seqs=count))
    for handle in range(count):
        loop.submit(handle, random_prompt(random, 200), 2000)
    loop.until_prefilled(set(range(count)))
    return measure(loop, rounds, count)


TABLES: dict[str, tuple[Callable[[int, int], Line], list[int]]] = {
    "waiting for blocks": (waiting_for_blocks, [0, 10, 100, 1000, 10_000]),
    "waiting for a row": (waiting_for_a_row, [0, 10, 100, 1000, 10_000]),
    "waiting under retraction": (under_pressure, [0, 100, 1000, 10_000]),
    "context length": (context, [128, 1024, 8192, 32_768]),
    "cached pages": (cached_pages, [0, 1024, 16_384, 65_536]),
    "decode rows": (rows, [1, 8, 64, 256]),
}


def best(measured: list[Line]) -> Line:
    """The repeat with the fastest plan: the others were disturbed."""
    return min(measured, key=lambda line: line.plan_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300, help="rounds that are timed for one line")
    parser.add_argument("--repeats", type=int, default=3, help="fresh schedulers for one line; the best counts")
    parser.add_argument("--only", choices=sorted(TABLES), help="one table")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    results: dict[str, list[Line]] = {}
    for name, (build, values) in TABLES.items():
        if arguments.only in (None, name):
            results[name] = [
                best([build(value, arguments.rounds) for _ in range(arguments.repeats)]) for value in values
            ]
    if arguments.json:
        print(json.dumps({name: [asdict(line) for line in lines] for name, lines in results.items()}))
        return
    for name, lines in results.items():
        print(f"{name:>24} {'plan µs':>10} {'ratio':>7} {'p99 µs':>8} {'advance µs':>11} {'ratio':>7} {'rows':>7}")
        for line in lines:
            plan_ratio, advance_ratio = line.plan_us / lines[0].plan_us, line.advance_us / lines[0].advance_us
            print(
                f"{line.value:>24} {line.plan_us:>10.1f} {plan_ratio:>7.2f} {line.plan_p99_us:>8.1f}"
                f" {line.advance_us:>11.1f} {advance_ratio:>7.2f} {line.rows:>7.1f}"
            )
        print()


if __name__ == "__main__":
    main()
