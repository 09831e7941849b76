"""Binding: an operation is selected once, at build, and called through a plain callable ever after."""

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tokenspeed_kernel.registry import Band, KernelFunction, KernelSpec, active_registry
from tokenspeed_kernel.selection import Selection, select
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import TraitValue

logger = logging.getLogger("tokenspeed_kernel")

_objective: ContextVar[str] = ContextVar("tokenspeed_kernel_objective", default="latency")


@contextmanager
def binding_objective(objective: str) -> Iterator[None]:
    """Within the block, bindings are chosen for ``objective`` (a key of selection.OBJECTIVES); the default is
    latency."""
    token = _objective.set(objective)
    try:
        yield
    finally:
        _objective.reset(token)


@dataclass(frozen=True)
class Bound:
    """A kernel ready to be called.

    Attributes:
        fn: the kernel; what a hot path takes and calls.
        spec: what it is.
        selection: why it is.
    """

    fn: KernelFunction
    spec: KernelSpec
    selection: Selection

    def __call__(self, *arguments: Any) -> None:
        self.fn(*arguments)


def bind(
    family: str,
    mode: str,
    signature: FormatSignature,
    traits: Mapping[str, TraitValue],
    *,
    override: str | None,
    bound: Mapping[str, Any] | None = None,
) -> Bound:
    """Selects family.mode and, where the operation binds values (``Operation.bound``), makes the kernel from them.

    Raises what ``select`` raises, and whatever the kernel's factory raises for values it cannot take.
    """
    selection = select(family, mode, signature, traits, override=override, objective=_objective.get())
    if selection.spec.band is Band.REFERENCE and selection.override is None:
        _note_reference(selection.operation)
    values = dict(bound or {})
    operation = active_registry().operation(family, mode)
    if set(values) != set(operation.bound):
        raise TypeError(f"{operation.name} binds {list(operation.bound)}, got {sorted(values)}")
    if not operation.bound:
        return Bound(selection.fn, selection.spec, selection)
    return Bound(make_kernel(selection.spec, selection.fn, values), selection.spec, selection)


def make_kernel(spec: KernelSpec, factory: KernelFunction, values: Mapping[str, Any]) -> KernelFunction:
    """The kernel that ``factory`` makes of the bound values, the weight pre-processed where the spec says so."""
    prepared = dict(values)
    if spec.weight_preprocessor is not None:
        prepared["weight"] = spec.weight_preprocessor(prepared["weight"])
    kernel: KernelFunction = factory(**prepared)
    return kernel


_reference_lock = threading.Lock()
_reference_selections: Counter[str] = Counter()


def _note_reference(operation: str) -> None:
    with _reference_lock:
        first = not _reference_selections[operation]
        _reference_selections[operation] += 1
    if first:
        logger.warning(
            "%s runs on its PyTorch reference: no other kernel fits (tokenspeed-kernel explain %s says why)",
            operation,
            operation,
        )


def reference_selections() -> dict[str, int]:
    """Operation to how often its reference was chosen, unasked, because nothing else could run; for the metrics."""
    with _reference_lock:
        return dict(_reference_selections)
