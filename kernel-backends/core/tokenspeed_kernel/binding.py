"""Binding: an operation is selected once, at build, and called through a plain callable ever after."""

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenspeed_kernel.records import default_oracle
from tokenspeed_kernel.registry import Band, KernelFunction, KernelSpec, active_registry
from tokenspeed_kernel.registry import make_kernel as make_kernel
from tokenspeed_kernel.selection import Selection, choose
from tokenspeed_kernel.serving_guard import process_guard
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import TraitValue
from tokenspeed_kernel.tuning import autotune

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


_captured: ContextVar[bool] = ContextVar("tokenspeed_kernel_captured", default=False)


@contextmanager
def binding_captured(captured: bool) -> Iterator[None]:
    """Within the block, where ``captured``, bindings are of kernels whose calls graphs can hold (see recording.py)."""
    token = _captured.set(captured)
    try:
        yield
    finally:
        _captured.reset(token)


def present_objective() -> str:
    """The objective that bindings are chosen for here."""
    return _objective.get()


_recorded: ContextVar[list[Selection] | None] = ContextVar("tokenspeed_kernel_selections", default=None)


@contextmanager
def recording_selections() -> Iterator[list[Selection]]:
    """Within the block, the selection of every binding is added to the list it yields (this thread or task only)."""
    selections: list[Selection] = []
    token = _recorded.set(selections)
    try:
        yield selections
    finally:
        _recorded.reset(token)


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

    The first binding of a shape bucket that several verified kernels can serve measures them first (see tuning.py).
    Raises what ``select`` raises, and whatever the kernel's factory raises for values it cannot take.
    """
    process_guard().check("bind", f"{family}.{mode}")
    selection = _tuned(family, mode, signature, traits, override, bound or {})
    recorded = _recorded.get()
    if recorded is not None:
        recorded.append(selection)
    if selection.spec.band is Band.REFERENCE and selection.override is None:
        _note_reference(selection.operation)
    values = dict(bound or {})
    operation = active_registry().operation(family, mode)
    if set(values) != set(operation.bound):
        raise TypeError(f"{operation.name} binds {list(operation.bound)}, got {sorted(values)}")
    if not operation.bound:
        return Bound(selection.fn, selection.spec, selection)
    return Bound(make_kernel(selection.spec, selection.fn, values), selection.spec, selection)


def _tuned(
    family: str,
    mode: str,
    signature: FormatSignature,
    traits: Mapping[str, TraitValue],
    override: str | None,
    bound: Mapping[str, Any],
) -> Selection:
    """The selection, once more where its finalists had to be measured first."""
    chosen = partial(
        choose,
        family,
        mode,
        signature,
        traits,
        override=override,
        objective=_objective.get(),
        captured=_captured.get(),
    )
    selection = chosen()
    if autotune(selection, oracle=default_oracle(), registry=active_registry(), bound=bound):
        selection = chosen()
    return selection


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
