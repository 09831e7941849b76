"""Compares kernels with float64 on generated cases, and checks what their tags promise.

The reference of an operation is held to the same bounds as every other kernel of it, so a kernel and its reference
lie within twice the bound of each other.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from tokenspeed_kernel.binding import make_kernel
from tokenspeed_kernel.numerics.cases import (
    AnyOf,
    Buffers,
    Case,
    Close,
    Expectation,
    Outputs,
    cases_for,
    same_bits,
)
from tokenspeed_kernel.numerics.on_device import bridged, device_of, values_on
from tokenspeed_kernel.oracle import VerificationRecord
from tokenspeed_kernel.platform import PlatformInfo, current_platform
from tokenspeed_kernel.registry import Band, KernelFunction, KernelRegistry, RegisteredKernel
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import complete_request, refusal

WORST_SHOWN = 5

FULL_SEEDS = 3
"""How many seeds a full run takes."""

WHOLE_PAGES = "reads_whole_pages"
"""Tag of a kernel that reads every position of the pages it is given and multiplies what nobody sees by a weight of 0.
What was never written must be finite for it: its cases have these in place of NaN."""

UNWRITTEN = 30000.0
"""What such a kernel finds where nobody wrote."""


@dataclass(frozen=True)
class Failure:
    """What was wrong in one case; ``details`` are lines for a person: what was wrong, and the worst elements."""

    case: str
    signature: FormatSignature
    details: tuple[str, ...]


@dataclass
class Report:
    """The outcome for one kernel.

    Attributes:
        kernel: its name.
        operation: "family.mode".
        skipped: why it cannot run here, or None.
        cases: how many cases ran.
        unfit: how many cases its traits do not admit.
        error: the worst error as a share of its bound.
        failures: what was wrong.
    """

    kernel: str
    operation: str
    skipped: str | None = None
    cases: int = 0
    unfit: int = 0
    error: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether it ran at least one case and every case was right."""
        return self.skipped is None and self.cases > 0 and not self.failures

    def record(self, kernel: RegisteredKernel, platform: PlatformInfo) -> VerificationRecord:
        """The report as what selection keeps."""
        return VerificationRecord(self.kernel, kernel.spec.version, platform.key, self.passed, self.error, self.cases)


def _element_lines(
    output: torch.Tensor, value: torch.Tensor, limit: torch.Tensor | None, bad: torch.Tensor
) -> list[str]:
    """The worst elements, one a line; ``bad`` holds how bad each element is, at most 1 where it is right."""
    worst = torch.topk(bad.flatten(), min(WORST_SHOWN, int((bad > 1.0).sum()))).indices
    lines = []
    for index in worst.tolist():
        place = [int(i) for i in torch.unravel_index(torch.tensor(index), bad.shape)]
        line = f"at {place}: got {output.flatten()[index].item()!r}, expected {value.flatten()[index].item()!r}"
        lines.append(line if limit is None else f"{line}, bound {limit.flatten()[index].item():.3g}")
    return lines


def _badness(output: torch.Tensor, expectation: Expectation) -> torch.Tensor:
    """How bad each element is: error over bound, or for exact expectations 0 and infinity. Above 1 is wrong."""
    if isinstance(expectation, Close):
        return _excess(output.double(), expectation)
    if isinstance(expectation, AnyOf):
        right = (output.unsqueeze(1) == expectation.values).any(dim=1)
    else:
        right = output == expectation.value
        if output.dtype.is_floating_point:
            right |= torch.isnan(output) & torch.isnan(expectation.value)
    return torch.where(right, 0.0, torch.inf)


def compare(output: torch.Tensor, expectation: Expectation) -> tuple[float, list[str]]:
    """The worst error as a share of its bound (0 or infinity where exact), and lines about what is wrong, if any."""
    value = expectation.values[:, 0] if isinstance(expectation, AnyOf) else expectation.value
    if output.shape != value.shape:
        return torch.inf, [f"shape {list(output.shape)}, expected {list(value.shape)}"]
    bad = _badness(output, expectation)
    error = float(bad.max()) if bad.numel() else 0.0
    if error <= 1.0:
        return error, []
    limit = expectation.bound.expand(value.shape) if isinstance(expectation, Close) else None
    count = int((bad > 1.0).sum())
    return error, [f"{count} of {bad.numel()} elements wrong", *_element_lines(output, value, limit, bad)]


def _excess(output: torch.Tensor, expectation: Close) -> torch.Tensor:
    """Error over bound; 0 where nothing differs, infinity where NaN or infinity disagree."""
    difference = (output - expectation.value).abs()
    ratio = difference / expectation.bound.expand(difference.shape)
    agree = (output == expectation.value) | (torch.isnan(output) & torch.isnan(expectation.value))
    return torch.where(agree, 0.0, torch.where(torch.isnan(ratio), torch.inf, ratio))


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(case: Case, fn: KernelFunction) -> tuple[Outputs, list[str]]:
    buffers = Buffers()
    outputs = case.call(fn, buffers)
    return outputs, buffers.violations()


def _unequal(one: Outputs, other: Outputs) -> list[str]:
    return [name for name in one if not same_bits(one[name], other[name])]


def _made(kernel: RegisteredKernel, case: Case, threads: int, device: torch.device) -> KernelFunction:
    """The kernel of a case, made and run on ``threads`` threads; a reference on one, like the truth. For a ``device``
    that is not the host's memory, it is made of tensors there and called with such."""
    if device.type != "cpu":
        values = values_on(device, case.bound)
        return bridged(make_kernel(kernel.spec, kernel.fn, values) if values else kernel.fn, device)
    if kernel.spec.band is Band.REFERENCE:
        return make_kernel(kernel.spec, kernel.fn, case.bound) if case.bound else kernel.fn
    with _torch_threads(threads):
        fn = make_kernel(kernel.spec, kernel.fn, case.bound) if case.bound else kernel.fn

    whole_pages = WHOLE_PAGES in kernel.spec.tags

    def run(*arguments: Any) -> None:
        with _torch_threads(threads):
            fn(*(map(_finite_pages, arguments) if whole_pages else arguments))

    return run


def _finite_pages(argument: Any) -> Any:
    """A cache (the arguments with four axes), with UNWRITTEN, or the largest number that it can hold, in place of NaN,
    and the strides it had."""
    if not isinstance(argument, torch.Tensor) or argument.dim() != 4:
        return argument
    last = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True))
    unwritten = min(UNWRITTEN, torch.finfo(argument.dtype).max)
    memory = torch.full((last + 1,), unwritten, dtype=argument.dtype)
    return memory.as_strided(argument.shape, argument.stride()).copy_(
        torch.nan_to_num(argument.double(), nan=unwritten, posinf=torch.inf, neginf=-torch.inf)
    )


def _check_case(
    kernel: RegisteredKernel, case: Case, expected: dict[str, Expectation], threads: int, device: torch.device
) -> tuple[float, list[str]]:
    """The worst error, and what is wrong, of one kernel in one case."""
    fn = _made(kernel, case, threads, device)
    outputs, problems = _run(case, fn)
    error = 0.0
    for name, expectation in expected.items():
        found, lines = compare(outputs[name], expectation)
        error = max(error, found)
        problems += [f"{name}: {line}" for line in lines]
    if "deterministic" in kernel.spec.tags:
        again, _ = _run(case, fn)
        problems += [f"{name}: tagged deterministic, but a second run differs" for name in _unequal(outputs, again)]
    if "row_invariant" in kernel.spec.tags and case.split is not None:
        buffers = Buffers()
        apart = case.split(fn, buffers)
        problems += buffers.violations()
        problems += [f"{name}: tagged row_invariant, but more calls differ" for name in _unequal(outputs, apart)]
    return error, problems


def verify_kernel(
    kernel: RegisteredKernel,
    registry: KernelRegistry,
    *,
    platform: PlatformInfo | None = None,
    seed: int = 0,
    full: bool = False,
) -> Report:
    """Runs every case of every signature of the kernel; where ``full``, the slow ones too, and all of them with the
    FULL_SEEDS seeds from ``seed`` on. Never raises for what the kernel does: an exception is a failure."""
    spec, platform = kernel.spec, platform or current_platform()
    report = Report(spec.name, spec.operation, spec.capability.refusal(platform))
    if report.skipped is not None:
        return report
    threads, device = torch.get_num_threads(), device_of(platform)
    vocabulary = registry.operation(spec.family, spec.mode).traits
    # Cases are small: PyTorch, which makes and judges them, is many times slower where its threads wait for each other.
    # The kernel itself gets all of them.
    with _torch_threads(1):
        for signature, number in product(sorted(spec.signatures, key=str), range(FULL_SEEDS if full else 1)):
            for case in cases_for(spec.operation, signature, seed + number, full):
                request = complete_request(spec.operation, case.traits, vocabulary)
                if refusal(spec.traits, request, vocabulary) is not None:
                    report.unfit += 1
                    continue
                report.cases += 1
                error, problems = _judge(kernel, case, threads, device)
                report.error = max(report.error, error)
                if problems:
                    report.failures.append(Failure(case.name, signature, tuple(problems)))
    return report


def _judge(kernel: RegisteredKernel, case: Case, threads: int, device: torch.device) -> tuple[float, list[str]]:
    """As _check_case, with what the kernel raises made a problem."""
    expected = case.expect()
    try:
        return _check_case(kernel, case, expected, threads, device)
    except Exception as raised:  # whatever a stranger's kernel raises is a finding, not the end of the run
        return torch.inf, [f"raised {type(raised).__name__}: {raised}"]


def verify_all(
    registry: KernelRegistry,
    names: Sequence[str] = (),
    operations: Sequence[str] = (),
    *,
    seed: int = 0,
    full: bool = False,
) -> list[Report]:
    """Reports of the kernels named, or of all kernels of the operations named, or of all; references first."""
    chosen = [
        kernel
        for kernel in registry.kernels()
        if (not names or kernel.spec.name in names) and (not operations or kernel.spec.operation in operations)
    ]
    chosen.sort(key=lambda kernel: (kernel.spec.operation, kernel.spec.band, kernel.spec.name))
    return [verify_kernel(kernel, registry, seed=seed, full=full) for kernel in chosen]
