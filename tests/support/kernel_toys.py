"""Kernels of the toy operation that take as long as they say, by a clock that only they move."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tokenspeed_kernel.oracle import SelectionOracle, VerificationRecord
from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.signature import FLOAT32, FormatSignature
from tokenspeed_kernel.workloads import Work, Workload

SIGNATURE = FormatSignature.of(input=FLOAT32)


class ToyClock:
    """Stands in for the module ``time``: time passes when a toy kernel runs and at no other moment."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def kernel(self, seconds: float, calls: list[str] | None = None, name: str = "") -> Callable[..., None]:
        """A kernel of toy.copy that takes ``seconds``, and adds ``name`` to ``calls``."""

        def copy(x: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(x)
            self.now += seconds
            if calls is not None:
                calls.append(name)

        return copy


def toy_workload(
    _signature: FormatSignature, traits: Mapping[str, Any], _phase: str, _bound: Mapping[str, Any] | None
) -> Workload:
    """One row of ``width`` elements."""
    width = int(traits["width"])
    return Workload(f"[1, {width}]", (torch.ones(1, width), torch.empty(1, width)), work=Work(8 * width, width))


def verified(oracle: SelectionOracle, platform: PlatformInfo, *names: str, version: str = "1") -> SelectionOracle:
    """The oracle, with a good record of these kernels."""
    for name in names:
        oracle.add_verification(VerificationRecord(name, version, platform.key, True, 0.1, 10))
    return oracle


@contextmanager
def serving(guard: Any) -> Iterator[None]:
    """Within the block, the guard's process serves."""
    guard.begin()
    try:
        yield
    finally:
        guard.end()
