"""The line that shows progress: amounts, rate and time left, on a terminal and in a log."""

import io
import sys

import pytest

from tokenspeed.cli import output
from tokenspeed.cli.output import ProgressLine, Rate, human_seconds

MIB = 1 << 20


class Terminal(io.StringIO):
    """Standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the test sets."""
    now = [100.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    return now


def test_rate_and_time_left_count_what_came_since_the_start(clock: list[float]) -> None:
    rate = Rate()
    rate.add(0.0, 900 * MIB)  # from an earlier try
    assert rate.words(100 * MIB) == ""
    rate.add(2.0, 904 * MIB)
    assert rate.words(96 * MIB) == ", 2.00 MiB/s, 48 s left"
    assert rate.words(0) == ", 2.00 MiB/s"
    for second in range(3, 60):
        rate.add(float(second), 904 * MIB + second * 10 * MIB)
    assert rate.words(0) == ", 10.00 MiB/s"  # of the last moments
    rate.add(61.0, 0)  # a file comes anew
    assert rate.words(MIB) == ""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (3900, "1 h 05 min")],
)
def test_durations_for_a_person(seconds: float, words: str) -> None:
    assert human_seconds(seconds) == words


def test_a_log_gets_a_line_every_five_seconds(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ProgressLine()
    for second in range(12):
        clock[0] = 100.0 + second
        line("download x", second * MIB, 12 * MIB)
    line("download x", 12 * MIB, 12 * MIB)
    line.finish()
    assert capsys.readouterr().err.splitlines() == [
        "download x  0 B of 12.00 MiB",
        "download x  5.00 MiB of 12.00 MiB, 1.00 MiB/s, 7 s left",
        "download x  10.00 MiB of 12.00 MiB, 1.00 MiB/s, 2 s left",
        "download x  12.00 MiB of 12.00 MiB, 1.10 MiB/s",
    ]


def test_a_terminal_keeps_one_line_that_fits(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    line = ProgressLine()
    line("download x", 0, 4 * MIB)
    clock[0] += 1.0
    line("download x (HTTP 503; again in 2 s)", 2 * MIB, 4 * MIB)  # a remark, not another thing
    line("ask the hub", 0, 0)
    line.finish()
    first, second, third = terminal.getvalue().replace("\n", "|").split("\r")[1:]
    assert first == "download x  0 B of 4.00 MiB\x1b[K"
    whole = "download x (HTTP 503; again in 2 s)  2.00 MiB of 4.00 MiB, 2.00 MiB/s, 1 s left"
    assert second == f"…{whole[-38:]}\x1b[K|"
    assert third == "ask the hub\x1b[K|"
