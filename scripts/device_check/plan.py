"""Which parts there are, what time each gets, and how a part is run."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from scripts.device_check.isolation import run_family_isolated, run_isolated
from scripts.device_check.numerics import PREFIX, families_here
from scripts.device_check.results import NotHere, PartResult
from scripts.device_check.target import Target

NUMERICS = "numerics"


@dataclass(frozen=True)
class Part:
    """A part besides the numerics.

    Attributes:
        name: of it, as --part says it.
        least: seconds without which it is not begun; most: when it is ended.
        run: does it, in the present process: target, ceilings, seconds it may take.
    """

    name: str
    least: float
    most: float
    run: Callable[[Target, dict[str, float], float], PartResult]


def _bandwidth(target: Target, _ceilings: dict[str, float], _seconds: float) -> PartResult:
    from scripts.device_check import bandwidth

    return bandwidth.run(target)


def _graphs(target: Target, _ceilings: dict[str, float], _seconds: float) -> PartResult:
    from scripts.device_check import graphs

    return graphs.run(target)


def _served(target: Target, _ceilings: dict[str, float], _seconds: float) -> PartResult:
    from scripts.device_check import served

    return served.run(target)


def _large_model(target: Target, ceilings: dict[str, float], seconds: float) -> PartResult:
    from scripts.device_check import large_model

    return large_model.run(target, ceilings, seconds)


PARTS = (
    Part("bandwidth", 15, 60, _bandwidth),
    Part("graphs", 20, 90, _graphs),
    Part("served model", 20, 90, _served),
    Part("large model", 60, 240, _large_model),
)
"""In their order. The numerics come first, and may take NUMERICS_SHARE of all where others wait."""

NUMERICS_SHARE = 0.4

NAMES = (NUMERICS, *(part.name for part in PARTS))


def run_here(part: Part, target: Target, ceilings: dict[str, float], seconds: float) -> PartResult:
    """Runs a part in this process; what it raises becomes its reason."""
    begin = time.monotonic()
    try:
        result = part.run(target, ceilings, seconds)
    except NotHere as missing:
        result = PartResult(part.name, "not here", str(missing))
    except Exception as error:  # a part that raises is a finding about the device, and the others go on
        result = PartResult(part.name, "failed", f"{type(error).__name__}: {error}")
    result.seconds = time.monotonic() - begin
    return result


@dataclass(frozen=True)
class Plan:
    """What is to be run, and within what time.

    Attributes:
        target: the device.
        names: of the parts, from NAMES.
        seconds: for all.
        jobs: families whose numerics run at the same time.
    """

    target: Target
    names: Sequence[str]
    seconds: float
    jobs: int

    def run(self, report: Callable[[str], None]) -> Iterator[PartResult]:
        """The parts one after the other, each in its process; ``report`` is told what begins."""
        begin = time.monotonic()
        ceilings: dict[str, float] = {}
        if NUMERICS in self.names:
            yield from self._numerics(report)
        for part in PARTS:
            if part.name not in self.names:
                continue
            left = self.seconds - (time.monotonic() - begin)
            if left < part.least:
                yield PartResult(part.name, "left out", f"{max(left, 0):.0f} s were left, it takes {part.least:.0f} s")
                continue
            report(part.name)
            started = time.monotonic()
            shown = ",".join(f"{name}={value}" for name, value in ceilings.items())
            arguments = [*self._arguments, "--ceilings", shown]
            result = run_isolated(part.name, arguments, min(part.most, left), self._environment)
            result.seconds = time.monotonic() - started
            ceilings |= result.ceilings
            yield result

    def _numerics(self, report: Callable[[str], None]) -> Iterator[PartResult]:
        """Families side by side: compiling takes most of their time, and a device takes work of several."""
        limit = self.seconds * (NUMERICS_SHARE if len(self.names) > 1 else 1.0)
        ends_at = time.monotonic() + limit

        def one(family: str) -> PartResult:
            begin = time.monotonic()
            left = ends_at - begin
            if left <= 0:
                return PartResult(PREFIX + family, "left out", "the numerics had no time left")
            result = run_family_isolated(family, self._arguments, left, self._environment)
            result.seconds = time.monotonic() - begin
            return result

        with ThreadPoolExecutor(self.jobs) as pool:
            families = families_here()
            report(f"{NUMERICS} of {', '.join(families)}")
            yield from pool.map(one, families)

    @property
    def _arguments(self) -> list[str]:
        return ["--platform", self.target.kind, "--sizes", self.target.sizes]

    @property
    def _environment(self) -> dict[str, str]:
        return {"TOKENSPEED_KERNEL_DEVICE": self.target.kind}
