"""The numeric cases of every kernel that runs on the device, an operation family a process."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.device_check.results import KernelOutcome, PartResult
from tokenspeed_kernel.numerics.verify import verify_kernel
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.plugins.loading import loaded_registry
from tokenspeed_kernel.registry import KernelRegistry, RegisteredKernel

PREFIX = "numerics of "


def kernels_here(family: str | None = None) -> list[RegisteredKernel]:
    """The kernels that can run on the present platform, references included."""
    platform = current_platform()
    return [k for k in loaded_registry().kernels(family) if k.spec.capability.refusal(platform) is None]


def families_here() -> list[str]:
    """The families that have any, sorted."""
    return sorted({kernel.spec.family for kernel in kernels_here()})


def outcome_of(kernel: RegisteredKernel, registry: KernelRegistry) -> KernelOutcome:
    """Runs the cases of one kernel."""
    report = verify_kernel(kernel, registry)
    status = "right" if report.passed else "wrong" if report.failures else "not verified"
    details = tuple(
        f"{failure.case} ({failure.signature}): {line}"
        for failure in report.failures[:3]
        for line in failure.details[:2]
    )
    record = asdict(report.record(kernel, current_platform())) if report.cases else None
    error = report.error if report.error < float("inf") else None
    return KernelOutcome(kernel.spec.name, report.operation, status, report.cases, error, details, record)


class Progress:
    """What a family's process has done so far, in a file that outlives it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, done: Sequence[KernelOutcome], running: str) -> None:
        """Writes what is done, and the kernel that runs now ("" for none)."""
        text = json.dumps({"done": [asdict(outcome) for outcome in done], "running": running})
        beside = self._path.with_suffix(".new")
        beside.write_text(text, encoding="utf-8")
        beside.replace(self._path)

    def read(self) -> tuple[list[KernelOutcome], str]:
        """What was noted last; nothing where there was nothing."""
        if not self._path.exists():
            return [], ""
        values: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        return [KernelOutcome(**{**one, "details": tuple(one["details"])}) for one in values["done"]], values["running"]


def run_family(
    family: str,
    *,
    passed_over: frozenset[str] = frozenset(),
    note: Callable[[Sequence[KernelOutcome], str], None] = lambda _done, _running: None,
) -> PartResult:
    """The numerics of a family's kernels but those named."""
    registry = loaded_registry()
    result = PartResult(PREFIX + family)
    for kernel in kernels_here(family):
        if kernel.spec.name in passed_over:
            continue
        note(result.kernels, kernel.spec.name)
        result.kernels.append(outcome_of(kernel, registry))
    note(result.kernels, "")
    return result.settle()
