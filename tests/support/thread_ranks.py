"""Several ranks in one process: a thread each, which meet at a barrier. What they sum comes out in the order of ranks,
the same bits on each, as with the real thing."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from tokenspeed.device import builder
from tokenspeed.device.builder import DeviceBuild, build_device_side
from tokenspeed.device.handle import OperationOutcome, PeerGone, PendingStep, RowStart
from tokenspeed.recipes.model_config import ModelConfig, read_model_config
from tokenspeed.recipes.resolved import ResolvedConfig

_Result = TypeVar("_Result")
PATIENCE_S = 15.0


class _Meeting:
    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=PATIENCE_S)
        self.brought: list[torch.Tensor] = [torch.empty(0)] * world


class ThreadRank:
    """One rank's Communication."""

    def __init__(self, meeting: _Meeting, rank: int, world: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.world = world

    def all_reduce(self, x: torch.Tensor) -> None:
        self._exchange(x, lambda all_of_them: x.copy_(torch.stack(all_of_them).sum(0)))

    def minimum(self, x: torch.Tensor) -> None:
        self._exchange(x, lambda all_of_them: x.copy_(torch.stack(all_of_them).amin(0)))

    def all_gather(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        self._exchange(part, lambda all_of_them: whole.copy_(torch.stack(all_of_them)))

    def broadcast(self, x: torch.Tensor) -> None:
        self._exchange(x, lambda all_of_them: x.copy_(all_of_them[0]))

    def _wait(self) -> None:
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise PeerGone("a thread is gone") from error

    def die(self) -> None:
        """Whoever waits for this rank hears that it is gone."""
        self._meeting.barrier.abort()

    def _exchange(self, mine: torch.Tensor, take: Callable[[list[torch.Tensor]], object]) -> None:
        assert mine.is_contiguous()
        self._meeting.brought[self.rank] = mine.clone()
        self._wait()
        all_of_them = list(self._meeting.brought)
        assert len({(part.shape, part.dtype) for part in all_of_them}) == 1, "ranks exchange unlike things"
        self._wait()
        take(all_of_them)


def thread_ranks(world: int) -> list[ThreadRank]:
    meeting = _Meeting(world)
    return [ThreadRank(meeting, rank, world) for rank in range(world)]


def on_every_rank(work: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """Runs all at once, a thread each; raises what the first of them raised."""
    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result() for future in [pool.submit(each) for each in work]]


class EveryRank:
    """A DeviceHandle that hands each plan to all ranks and gives rank 0's results."""

    def __init__(self, builds: Sequence[DeviceBuild]) -> None:
        self._builds = builds

    def execute(self, plan: object, starts: Sequence[RowStart]) -> PendingStep:
        steps = [build.handle.execute(plan, starts) for build in self._builds]  # type: ignore[arg-type]
        for step in steps[1:]:
            step.result()
        return steps[0]

    def finished_operations(self) -> list[OperationOutcome]:
        return []

    def shutdown(self) -> None:
        for build in self._builds:
            build.handle.shutdown()


@contextlib.contextmanager
def kernels_agreed() -> Iterator[None]:
    """Ranks of one process choose alike; where they said so to each other, nothing could be tuned here any more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "agree_on_kernels", lambda communication: None)
        yield


def build_ranks(config: ResolvedConfig, world: int, *, by_expert: bool = False) -> DeviceBuild:
    """The device sides of ``world`` ranks behind one handle. Kernels are agreed on already: it is one process."""
    parallel = config.parallel.model_copy(update={"tp": world, "ep": world if by_expert else 1})
    config = config.model_copy(update={"parallel": parallel})
    model: ModelConfig = read_model_config(config.model)
    with kernels_agreed():
        builds = on_every_rank(
            [
                lambda rank=rank: build_device_side(  # type: ignore[misc]
                    config, model, report=lambda *_: None, communication=rank
                )
                for rank in thread_ranks(world)
            ]
        )
    return DeviceBuild(specs=builds[0].specs, handle=EveryRank(builds))
