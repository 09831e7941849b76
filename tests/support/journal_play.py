"""A small workload through a scheduler, and a journal of it changed by hand."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tokenspeed.launch.scheduling import compose_scheduler
from tokenspeed.recipes.resolved import SchedulerSettings
from tokenspeed.telemetry.journal import Advanced, JournalReader, JournalWriter, Record
from tokenspeed_scheduler import (
    Abort,
    CacheGroup,
    Event,
    Finish,
    ForwardResult,
    RequestRefused,
    Scheduler,
    SchedulerConfig,
)


def world(**changes: object) -> SchedulerConfig:
    """A pool so small that requests wait and are retracted."""
    group = CacheGroup(group_id="full", kind="full_history", block_granularity=4)
    settings = {"num_parents": 10, "max_num_seqs": 4, "max_scheduled_tokens": 16, "overlap_depth": 1, **changes}
    return SchedulerConfig(groups=[group], prefix_granularity=4, max_model_len=40, **settings)


def record(path: Path, implementation: str = "native") -> int:
    """Plays six requests with ``path`` as the journal and returns the number of rounds."""
    settings = SchedulerSettings(implementation=implementation, journal=str(path))
    return play(compose_scheduler(settings, world()))


def play(scheduler: Scheduler) -> int:
    """One request is refused, one aborted, one batch of events invalid, one result comes twice."""
    for handle in range(1, 7):
        prompt = np.arange(handle, handle + 5 + 2 * handle, dtype=np.int32)
        scheduler.submit(handle, prompt, max_new_tokens=16, declared=handle % 2 == 0, namespace=b"tenant")
    try:
        scheduler.submit(9, np.arange(39, dtype=np.int32), max_new_tokens=5)
    except RequestRefused:
        pass
    else:
        raise AssertionError("45 tokens fit into 40")
    left = dict.fromkeys(range(1, 7), 16)
    flights: list[tuple[int, list[int], list[int]]] = []
    rounds = 0
    while scheduler.has_work():
        plan = scheduler.plan()
        rounds += 1
        if plan.num_rows:
            flights.append((plan.forward_id, plan.handle.tolist(), plan.samples.tolist()))
        while len(flights) > (1 if plan.num_rows else 0):
            scheduler.advance(_landed(*flights.pop(0), left=left, abort=5 if rounds == 12 else 0))
        if rounds == 3:
            _break_a_batch(scheduler, flights[0])
    return rounds


def _landed(
    forward_id: int, handles: list[int], samples: list[int], *, left: dict[int, int], abort: int
) -> list[Event]:
    tokens = np.array([100 + handle if drawn else -1 for handle, drawn in zip(handles, samples, strict=True)], np.int32)
    events: list[Event] = [ForwardResult(forward_id, tokens), ForwardResult(forward_id, tokens)]
    for handle, drawn in zip(handles, samples, strict=True):
        left[handle] -= drawn
        if left[handle] == 0:
            events.append(Finish(handle))
    return [*events, Abort(abort)] if abort else events


def _break_a_batch(scheduler: Scheduler, flight: tuple[int, list[int], list[int]]) -> None:
    try:
        scheduler.advance([ForwardResult(flight[0], np.zeros(len(flight[1]) + 1, dtype=np.int32))])
    except ValueError:
        return
    raise AssertionError("a result with a row too many was taken")


def rewrite(path: Path, change: Callable[[list[Record]], list[Record]]) -> Path:
    """Writes a journal beside ``path`` whose records are changed; returns its path."""
    reader = JournalReader(path)
    writer = JournalWriter(path.with_name("changed"), reader.begin)
    for entry in change(list(reader)):
        writer.append(entry)
    writer.close()
    return writer.path


def with_other_tokens(entry: Advanced) -> Advanced:
    """The same results, but for every token that was drawn."""
    events = []
    for name, arguments in entry.events:
        if name == "ForwardResult":
            tokens = np.frombuffer(arguments[1], dtype=np.int32)
            arguments = [arguments[0], np.where(tokens < 0, tokens, tokens + 1).tobytes(), arguments[2]]
        events.append((name, arguments))
    return Advanced(events)
