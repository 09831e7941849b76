"""``replay``: what a journal holds, and whether a fresh scheduler plans the same."""

import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tokenspeed.cli.dashboard import DASHBOARD_HINT
from tokenspeed.cli.output import say
from tokenspeed.telemetry.journal import (
    Advanced,
    JournalError,
    JournalReader,
    Planned,
    Raised,
    Record,
    Submitted,
    row_lines,
)

if TYPE_CHECKING:
    from tokenspeed.launch.replay import Divergence, Replay

ROUNDS_AROUND = 3
"""Rounds that ``--dump`` prints before and behind the one it is asked for."""


def replay_journal(file: str, dump: int | None, *, watch: bool = False, at: int = 1) -> int:
    """Prints rounds of a journal, or replays it: returns 0 where every plan was equal, 1 where one was not.

    ``watch`` shows it in the dashboard instead, from round ``at`` on.
    """
    if watch:
        if dump is not None:
            raise JournalError("--dump prints, --watch shows: give one of them")
        return _watch_journal(Path(file), at)
    if dump is not None:
        say(*dump_rounds(Path(file), dump))
        return 0
    _require_scheduler()
    from tokenspeed.launch.replay import replay

    started = time.perf_counter()
    result = replay(Path(file))
    say(*_summary(file, result, time.perf_counter() - started))
    return 1 if result.divergence else 0


def _watch_journal(path: Path, at: int) -> int:
    _require_scheduler()
    if find_spec("tokenspeed_tui") is None:
        raise JournalError(f"--watch is the dashboard's: {DASHBOARD_HINT}; --dump N prints rounds without it")
    from tokenspeed.cli.film import JournalFilm
    from tokenspeed_tui.watch import watch

    try:
        return watch(JournalFilm(path), at)
    except ValueError as error:
        raise JournalError(str(error)) from error


def _require_scheduler() -> None:
    if find_spec("tokenspeed_scheduler") is None:
        raise JournalError("replaying needs the package tokenspeed-appliance-scheduler (nothing else of the engine)")


def _summary(file: str, result: "Replay", seconds: float) -> Iterator[str]:
    made_with = ", ".join(f"{name} {version}" for name, version in sorted(result.begin.made_with.items()))
    yield f"journal   {file}: {result.begin.implementation} scheduler, made with {made_with}"
    yield (
        f"replayed  {result.rounds:,} rounds in {seconds:.1f} s: {result.requests:,} requests, "
        f"{result.refused:,} refused, {result.events:,} events"
    )
    if result.torn:
        yield f"torn      the last {result.torn} bytes were not finished and are left out: the writer crashed"
    if result.beyond:
        yield f"beyond    the journal ends inside a round; going on with it here raises {result.beyond}"
    if result.divergence is None:
        yield "equal     every plan has the digest that was recorded"
    else:
        yield from _divergence(result.divergence)


def _divergence(found: "Divergence") -> Iterator[str]:
    yield f"differs   in round {found.round}: {found.what}"
    for name, lines in (("recorded", found.recorded), ("replayed", found.replayed)):
        yield f"  {name}: {lines[0]}"
        yield from (f"    {line}" for line in lines[1:])
    yield f"look at what led there: tokenspeed replay FILE --dump {found.round}"


def dump_rounds(path: Path, around: int) -> Iterator[str]:
    """The rounds near ``around``, as recorded: what came in before each plan, and its rows."""
    reader = JournalReader(path)
    first, last, current = around - ROUNDS_AROUND, around + ROUNDS_AROUND, 1
    for record in reader:
        if first <= current <= last:
            yield from _lines(record, current)
        if isinstance(record, Planned) or (isinstance(record, Raised) and record.call == "plan"):
            current += 1
        if current > last:
            return
    yield f"the journal ends in round {current}" + (f", {reader.torn} torn bytes behind it" if reader.torn else "")


def _lines(record: Record, current: int) -> Iterator[str]:
    if isinstance(record, Submitted):
        declared = "declared" if record.declared else "undeclared"
        yield (
            f"round {current}: submit request {record.handle}: {len(record.prompt) // 4} prompt tokens, "
            f"{record.max_new_tokens} new ({declared}), priority {record.priority}"
        )
    elif isinstance(record, Advanced):
        for name, arguments in record.events:
            values = [f"{len(value)} bytes" if isinstance(value, bytes) else str(value) for value in arguments]
            yield f"round {current}: event {name}({', '.join(values)})"
    elif isinstance(record, Planned):
        head, *rows = row_lines(record.forward_id, record.rows)
        yield f"round {current}: plan {record.digest.hex()[:16]}, {head}"
        yield from (f"  {row}" for row in rows)
    elif isinstance(record, Raised):
        yield f"round {current}: {record.call} raised {record.error}: {record.text}"
