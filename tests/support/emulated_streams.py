"""Streams, events and copies of the emulated device (emulated_device.py), each as late as the order allows."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


class HostWaits(RuntimeError):
    """Something that makes the host wait for the device, where it must not."""


class ChangedUnderway(RuntimeError):
    """Host memory that was written again before the copy of it was waited for."""


@dataclass(eq=False)
class Copy:
    """One copy between host and device on its way, number ``place`` of its stream; ``issued`` is what its source held
    then, ``moved`` what it takes once the stream comes to it, as late as the order allows. ``is_own``: its source is
    what the stream itself brings to the host before."""

    source: torch.Tensor
    target: torch.Tensor
    to_host: bool
    stream: "Stream"
    place: int
    issued: torch.Tensor
    is_own: bool
    moved: torch.Tensor | None = None

    def run(self) -> None:
        """The stream comes to it. What it brings to the host is there when the host waits for it."""
        if not self.to_host:
            for copy in brought(self.source, self.stream):
                copy.end()
        self.moved = self.source.clone()
        if not self.to_host:
            self.target.copy_(self.moved)

    def end(self) -> None:
        """The host waited for it, or the stream itself reads what it brought."""
        assert self.moved is not None
        if self.to_host:
            self.target.copy_(self.moved)
        elif not self.is_own and not torch.equal(self.source, self.issued):
            raise ChangedUnderway(f"{self.source.nbytes} bytes changed on the host while they went to the device")


@dataclass(eq=False)
class Stream:
    """What was issued, in order: copies, and how far another stream has to have come."""

    issued: list[Any] = field(default_factory=list)
    done: int = 0

    def wait_stream(self, other: "Stream") -> None:
        self.issued.append((other, len(other.issued)))

    def advance(self, place: int) -> None:
        """Does what was issued up to there."""
        while self.done < place:
            item = self.issued[self.done]
            self.done += 1
            if isinstance(item, tuple):
                item[0].advance(item[1])
            else:
                item.run()


class Event:
    """``elapsed_time`` is of the device's clock, which kernels move; the host learns of it once it waited."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._is_timing, self._is_over = enable_timing, False

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or DEVICE.stream
        self.place = len(self.stream.issued)
        self.at, self._is_over = DEVICE.milliseconds, False

    def synchronize(self) -> None:
        DEVICE.waits += 1
        self.stream.advance(self.place)
        self._is_over = True
        DEVICE.end_copies()

    def elapsed_time(self, end: "Event") -> float:
        if not (self._is_timing and end._is_timing):
            raise RuntimeError("both events must be created with enable_timing=True")
        if not end._is_over:
            raise RuntimeError("the device has not come to the event")
        return end.at - self.at


class _OfThread(threading.local):
    """What is the present thread's own; the rest is shared by all."""

    def __init__(self) -> None:
        self.in_kernel = 0
        self.stream = MAIN


MAIN = Stream()


class _Machine:
    def __init__(self) -> None:
        self.local = _OfThread()
        self.is_watched = False
        self.milliseconds = 0.0  # that kernels computed
        self.waits = 0
        self.copies: list[tuple[str, int]] = []
        self.underway: list[Copy] = []
        self.pinned: dict[int, torch.Tensor] = {}

    @property
    def stream(self) -> Stream:
        return self.local.stream

    @contextmanager
    def kernel(self) -> Iterator[None]:
        """Within the block the host may wait: what references do inside is their own affair."""
        self.local.in_kernel += 1
        try:
            yield
        finally:
            self.local.in_kernel -= 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, on every thread, nothing but an event may make the host wait."""
        self.is_watched = True
        try:
            yield
        finally:
            self.is_watched = False

    def wait(self, what: object) -> None:
        if self.local.in_kernel:
            return  # a real kernel would not wait, so no copy may count on it
        if self.is_watched:
            raise HostWaits(f"{what} makes the host wait for the device")
        self.stream.advance(len(self.stream.issued))
        self.end_copies()

    def end_copies(self) -> None:
        """Those that their streams have come to."""
        ended = [copy for copy in self.underway if copy.stream.done >= copy.place]
        self.underway = [copy for copy in self.underway if copy not in ended]
        with torch.inference_mode():  # memory is written, whatever mode the thread that waits is in
            for copy in ended:
                copy.end()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned[tensor.untyped_storage().data_ptr()] = tensor  # kept: no other memory gets its address
        return tensor


def brought(source: torch.Tensor, stream: Stream) -> list[Copy]:
    """The copies of ``stream`` that bring what ``source`` holds to the host, and that the host did not wait for."""
    start, stop = source.data_ptr(), source.data_ptr() + source.nbytes
    return [
        copy
        for copy in DEVICE.underway
        if copy.to_host
        and copy.stream is stream
        and copy.target.data_ptr() < stop
        and start < copy.target.data_ptr() + copy.target.nbytes
    ]


DEVICE = _Machine()


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before, DEVICE.local.stream = DEVICE.local.stream, stream
    try:
        yield
    finally:
        DEVICE.local.stream = before
