"""Sinks: whoever puts a line never waits, and what is missing is counted and said."""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenspeed.telemetry.log_sinks import DescriptorTarget, Drops, RotatedFile, Sink, Tail, Target


class Gate:
    """A target that stands still until it is let go, and can be told to fail."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.written: list[bytes] = []
        self.failure: OSError | None = None

    def write(self, data: bytes) -> None:
        self.entered.set()
        assert self.open.wait(30)
        if self.failure is not None:
            raise self.failure
        self.written.append(data)

    def close(self) -> None:
        pass

    @property
    def text(self) -> bytes:
        return b"".join(self.written)


@contextlib.contextmanager
def sink_to(
    target: Target, queue_bytes: int = 1000, troubles: list[OSError] | None = None
) -> Iterator[tuple[Sink, Drops]]:
    drops = Drops()
    sink = Sink(
        target,
        process="api",
        drops=drops,
        notice=lambda count: b"%d missing\n" % count,
        on_trouble=troubles.append if troubles is not None else None,
        queue_bytes=queue_bytes,
    )
    yield sink, drops
    sink.close(10)


def test_lines_come_out_in_their_order() -> None:
    gate = Gate()
    gate.open.set()
    with sink_to(gate) as (sink, drops):
        for number in range(100):
            sink.put(b"%d\n" % number)
            if number % 10 == 9:
                assert sink.flush(10)
    assert gate.text == b"".join(b"%d\n" % number for number in range(100))
    assert drops.counts() == {}


def test_what_a_blocked_reader_misses_is_counted_and_said_at_its_place() -> None:
    gate = Gate()
    with sink_to(gate) as (sink, drops):
        sink.put(b"first\n")
        assert gate.entered.wait(10)
        for number in range(30):  # of 100 bytes each: ten fit
            sink.put(b"%099d\n" % number)
        assert drops.counts() == {"api": 20}
        assert not sink.flush(0)
        gate.open.set()
        assert sink.flush(10)
        sink.put(b"last\n")
        assert sink.flush(10)
    kept = b"".join(b"%099d\n" % number for number in range(10))
    assert gate.text == b"first\n" + kept + b"20 missing\n" + b"last\n"


def test_a_hundred_megabytes_through_a_pipe_nobody_reads() -> None:
    """Known failure 38: every put returns, and memory stays bounded."""
    reading, writing = os.pipe()
    line = b"x" * 4095 + b"\n"
    with sink_to(DescriptorTarget(writing), queue_bytes=1 << 20) as (sink, drops):
        count = 100_000_000 // len(line)
        for _ in range(count):
            sink.put(line)
        lost = drops.counts()["api"]
        assert count - lost <= (2 << 20) // len(line) + 16 + 1  # two queues' worth, and what the pipe took
        received = bytearray()
        reader = threading.Thread(target=_read_all, args=(reading, received))
        reader.start()
        assert sink.flush(20)
    reader.join(20)
    lines = bytes(received).splitlines()
    said = [int(text.split()[0]) for text in lines if text.endswith(b" missing")]
    assert len(lines) - len(said) == count - lost
    assert sum(said) == lost and lines[-1].endswith(b" missing")


def _read_all(descriptor: int, into: bytearray) -> None:
    while data := os.read(descriptor, 1 << 16):
        into += data
    os.close(descriptor)


def test_a_pipe_that_somebody_made_non_blocking_loses_nothing() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with sink_to(DescriptorTarget(writing), queue_bytes=1 << 20) as (sink, drops):
        for number in range(300):  # more than a pipe holds
            sink.put(b"%01023d\n" % number)
        received = bytearray()
        reader = threading.Thread(target=_read_all, args=(reading, received))
        reader.start()
    reader.join(20)
    assert [int(line) for line in received.split()] == list(range(300))
    assert drops.counts() == {}


def test_the_end_does_not_wait_for_a_blocked_reader() -> None:
    gate = Gate()
    drops = Drops()
    sink = Sink(gate, process="api", drops=drops, notice=lambda count: b"")
    sink.put(b"x\n")
    assert gate.entered.wait(10)
    sink.close(0.0)
    assert gate.written == []
    gate.open.set()


def test_a_full_disk_is_told_once_and_survived() -> None:
    gate, troubles = Gate(), []
    gate.failure = OSError(errno.ENOSPC, "No space left on device")
    gate.open.set()
    with sink_to(gate, troubles=troubles) as (sink, drops):
        for number in range(3):
            sink.put(b"%d\n" % number)
            assert sink.flush(10)
        assert drops.counts() == {"api": 3}
        assert [error.errno for error in troubles] == [errno.ENOSPC]
        gate.failure = None
        sink.put(b"3\n")
        assert sink.flush(10)
    assert gate.text == b"3\n3 missing\n"


def test_dev_full_is_a_full_disk() -> None:
    troubles: list[OSError] = []
    with sink_to(DescriptorTarget(os.open("/dev/full", os.O_WRONLY)), troubles=troubles) as (sink, drops):
        sink.put(b"lost\n")
        assert sink.flush(10)
        assert drops.counts() == {"api": 1}
    assert [error.errno for error in troubles] == [errno.ENOSPC]


def test_a_reader_that_is_gone_is_survived() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with sink_to(DescriptorTarget(writing)) as (sink, drops):
        sink.put(b"lost\n")
        assert sink.flush(10)
    assert drops.counts() == {"api": 1}


def test_a_file_rotates_by_size_and_keeps_so_many(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    file = RotatedFile(path, max_bytes=100, files=3)
    for number in range(50):
        file.write(b"%09d\n" % number)
    file.close()
    assert sorted(found.name for found in tmp_path.iterdir()) == ["server.log", "server.log.1", "server.log.2"]
    assert all(found.stat().st_size == 100 for found in tmp_path.iterdir())
    lines = [int(line) for name in (".2", ".1", "") for line in Path(f"{path}{name}").read_text().split()]
    assert lines == list(range(20, 50))


def test_one_file_alone_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    file = RotatedFile(path, max_bytes=100, files=1)
    for number in range(25):
        file.write(b"%09d\n" % number)
    assert [found.name for found in tmp_path.iterdir()] == ["server.log"]
    assert path.read_text().split()[0] == "000000020"


def test_a_file_goes_on_where_the_last_run_ended_and_comes_back_when_removed(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("before\n")
    file = RotatedFile(path, max_bytes=1000, files=2)
    file.write(b"after\n")
    assert path.read_text() == "before\nafter\n"
    path.unlink()
    file.write(b"anew\n")
    assert path.read_text() == "anew\n"


def test_a_name_that_went_to_another_file_is_not_rotated(tmp_path: Path) -> None:
    """A server that is being replaced writes on into its own file, whatever now has the name."""
    path = tmp_path / "8000.log"
    file = RotatedFile(path, max_bytes=100, files=3)
    path.rename(tmp_path / "8000.previous.log")
    path.write_text("the successor's\n")
    for _ in range(30):
        file.write(b"123456789\n")
    assert path.read_text() == "the successor's\n"
    assert (tmp_path / "8000.previous.log").stat().st_size == 300
    assert len(list(tmp_path.iterdir())) == 2


def test_a_write_that_was_cut_starts_a_line_of_its_own_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    target = DescriptorTarget(os.open(path, os.O_WRONLY | os.O_CREAT))
    write, calls = os.write, []

    def short(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:3])

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(OSError, match="No space"):
        target.write(b"abcdef\n")
    monkeypatch.setattr(os, "write", write)
    target.write(b"whole\n")
    assert path.read_text() == "abc\nwhole\n"


def test_a_sink_may_be_entered_again_by_a_finaliser() -> None:
    """The collector can run a finaliser that logs while a put holds the lock."""
    gate = Gate()
    gate.open.set()
    with sink_to(gate) as (sink, _):
        with sink._condition:
            sink.put(b"inner\n")
        assert sink.flush(10)
    assert gate.text == b"inner\n"


def test_a_tail_keeps_the_end() -> None:
    tail = Tail(max_bytes=50)
    for number in range(100):
        tail.add(b"%09d\n" % number)
    assert tail.text().split() == [f"{number:09d}" for number in range(95, 100)]
