"""The harness that a device would run, on every kernel of this package: the requirement admits the interpreter."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tokenspeed_kernel.numerics.verify import verify_kernel
from tokenspeed_kernel.plugins.loading import loaded_registry
from tokenspeed_kernel.signature import WEIGHT_FORMATS, FormatSignature

MOST_SIGNATURES = 16
FEW_FORMATS = ("float32", "bfloat16", "fp8_blocks", "gguf_q5_1", "gguf_q4_k", "gguf_mxfp4", "nvfp4")
"""One for each way in which planes are read; check_linear.py has them all."""


def few(signatures: frozenset[FormatSignature]) -> frozenset[FormatSignature]:
    """All of a few, and of many those whose weights have one of FEW_FORMATS, and of two weights the same."""
    if len(signatures) <= MOST_SIGNATURES:
        return signatures
    formats = [WEIGHT_FORMATS[name] for name in FEW_FORMATS]

    def taken(signature: FormatSignature) -> bool:
        weights = {form for role, form in signature if role in ("weight", "gate_up", "down")}
        return len(weights) == 1 and weights <= set(formats)

    return frozenset(filter(taken, signatures))


def kernels() -> Iterator[str]:
    for kernel in loaded_registry().kernels():
        if kernel.spec.solution.startswith("triton"):
            yield kernel.spec.name


@pytest.mark.long
@pytest.mark.parametrize("name", kernels())
def test_the_numerics_hold(name: str) -> None:
    registry = loaded_registry()
    kernel = registry.kernel(name)
    report = verify_kernel(replace(kernel, spec=replace(kernel.spec, signatures=few(kernel.spec.signatures))), registry)
    assert report.passed and report.cases, report.failures[:3]
