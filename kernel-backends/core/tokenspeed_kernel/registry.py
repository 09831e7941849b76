"""What operations there are, and which kernels do them.

An operation is declared once (``declare_operation``): its roles, its traits, whether its kernels are made per
weight. A kernel joins by ``@register_kernel(KernelSpec(...))``, the one way in, for this package and for strangers
alike. Whatever does not fit the operation's declaration fails there, by name.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias, TypeVar

from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.traits import TraitBound, Vocabulary, check_bounds
from tokenspeed_kernel.vendor_platforms import VendorPlatform

KernelFunction: TypeAlias = Callable[..., Any]
_F = TypeVar("_F", bound=KernelFunction)

REFERENCE_SOLUTION = "reference"


class RegistrationError(ValueError):
    """A kernel or operation that cannot be registered."""


class Band(IntEnum):
    """How much a kernel is made for the machine it runs on; the last word but one when several fit."""

    REFERENCE = 0
    PORTABLE = 1
    PERFORMANT = 2
    SPECIALISED = 3
    PLUGIN = 4


@dataclass(frozen=True, kw_only=True)
class CapabilityRequirement:
    """What a kernel needs of the platform. An empty field asks for nothing.

    Attributes:
        vendors: vendors it runs on; empty: any.
        features: features the platform must have, such as "avx2".
        minimum_architecture, maximum_architecture: inclusive (major, minor) ends, for accelerators.
        minimum_driver: the oldest driver, for accelerators.
    """

    vendors: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    minimum_architecture: tuple[int, int] | None = None
    maximum_architecture: tuple[int, int] | None = None
    minimum_driver: tuple[int, ...] | None = None

    def refusal(self, platform: PlatformInfo) -> str | None:
        """Why ``platform`` does not do, or None where it does."""
        if self.vendors and platform.vendor not in self.vendors:
            return f"runs on {', '.join(sorted(self.vendors))}; this is {platform.vendor}"
        missing = sorted(self.features - platform.features)
        if missing:
            return f"needs {', '.join(missing)}; this {platform.vendor} has {platform.isa}"
        for limit, below in ((self.minimum_architecture, True), (self.maximum_architecture, False)):
            if limit is None:
                continue
            found = platform.architecture
            if found is None or (found < limit if below else found > limit):
                return f"needs architecture {'from' if below else 'up to'} {limit}; this is {found}"
        if self.minimum_driver is not None and (platform.driver is None or platform.driver < self.minimum_driver):
            return f"needs driver {self.minimum_driver} or newer; this is {platform.driver}"
        return None


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation that kernels can be registered for.

    Attributes:
        family, mode: its name, written "family.mode".
        roles: the roles every signature of it has.
        traits: its vocabulary.
        bound: names of what is fixed when a kernel is bound. Empty: the registered callable is the kernel itself. Else
            it is a factory that takes these and returns the kernel.
        arguments: the kernel's call, for listings.
    """

    family: str
    mode: str
    roles: frozenset[str]
    traits: Vocabulary = field(default_factory=dict)
    bound: tuple[str, ...] = ()
    arguments: str

    @property
    def name(self) -> str:
        return f"{self.family}.{self.mode}"


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """What a kernel is and where it may run. Checked against its operation when it is registered.

    Attributes:
        name: unique among all kernels.
        family, mode: the operation.
        solution: what it is made with, such as "reference" or "cpu_native"; an override may name it.
        capability: what it needs of the platform.
        signatures: the format combinations it takes.
        traits: bounds on the operation's traits.
        band: see Band.
        workspace: traits to bytes of scratch memory one call needs; None: none.
        weight_preprocessor: applied to the weight, once, before the factory of a bound kernel sees it.
        tags: promises, such as "deterministic" (same input, same bits) or "row_invariant" (a row's bits do not
        depend on the other rows, nor on how the rows are cut into calls); or a warning, such as "compiled_only" (never
        run on the hardware it is for), "reads_whole_pages" (see numerics/verify.py) and "plans_on_host" (see
        recording.py).
        recorder: the recorder that can note its calls, "" where none can; see recording.py.
        version: changes when the kernel's numbers may change; verification records name it.
    """

    name: str
    family: str
    mode: str
    solution: str
    capability: CapabilityRequirement = CapabilityRequirement()
    signatures: frozenset[FormatSignature]
    traits: Mapping[str, TraitBound] = field(default_factory=dict)
    band: Band
    workspace: Callable[[Mapping[str, Any]], int] | None = None
    weight_preprocessor: Callable[[Any], Any] | None = None
    tags: frozenset[str] = frozenset()
    recorder: str = ""
    version: str = "1"

    @property
    def operation(self) -> str:
        return f"{self.family}.{self.mode}"

    def __post_init__(self) -> None:
        for label, value in (("name", self.name), ("solution", self.solution)):
            if not value or value != value.strip() or any(character.isspace() for character in value):
                raise RegistrationError(f"kernel {label} {value!r}: use a non-empty word without spaces")
        if not isinstance(self.signatures, frozenset) or not self.signatures:
            raise RegistrationError(f"kernel {self.name!r}: signatures must be a non-empty frozenset")
        if not isinstance(self.band, Band):
            raise RegistrationError(f"kernel {self.name!r}: band is {self.band!r}; use a member of Band")
        if (self.band is Band.REFERENCE) != (self.solution == REFERENCE_SOLUTION):
            raise RegistrationError(
                f"kernel {self.name!r}: band REFERENCE and solution {REFERENCE_SOLUTION!r} go together, "
                f"got {self.band.name} and {self.solution!r}"
            )

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class RegisteredKernel:
    """A spec with its callable and the distribution (or module) it came from."""

    spec: KernelSpec
    fn: KernelFunction
    origin: str


def make_kernel(spec: KernelSpec, factory: KernelFunction, values: Mapping[str, Any]) -> KernelFunction:
    """The kernel that ``factory`` makes of the bound values, the weight pre-processed where the spec says so."""
    prepared = dict(values)
    if spec.weight_preprocessor is not None:
        prepared["weight"] = spec.weight_preprocessor(prepared["weight"])
    kernel: KernelFunction = factory(**prepared)
    return kernel


class KernelRegistry:
    """Operations and kernels by name. Safe to read from several threads; writes take a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: dict[str, Operation] = {}
        self._kernels: dict[str, RegisteredKernel] = {}
        self._recorders: dict[str, KernelFunction] = {}
        self._platforms: dict[str, VendorPlatform] = {}

    def declare(self, operation: Operation) -> None:
        """Adds an operation. Declaring an equal one again does nothing; a different one of the same name is an
        error."""
        with self._lock:
            known = self._operations.setdefault(operation.name, operation)
        if known != operation:
            raise RegistrationError(f"operation {operation.name!r} is declared already, and differently")

    def register(self, spec: KernelSpec, fn: KernelFunction, origin: str) -> None:
        """Adds a kernel. Raises RegistrationError (or TraitError) where it does not fit its operation or its name is
        taken.
        """
        operation = self.operation(spec.family, spec.mode)
        for signature in spec.signatures:
            if signature.roles != operation.roles:
                raise RegistrationError(
                    f"kernel {spec.name!r}: signature ({signature}) has roles {sorted(signature.roles)}; "
                    f"{operation.name} has {sorted(operation.roles)}"
                )
        try:
            check_bounds(operation.name, spec.traits, operation.traits)
        except ValueError as error:
            raise RegistrationError(f"kernel {spec.name!r}: {error}") from error
        if spec.weight_preprocessor is not None and "weight" not in operation.bound:
            raise RegistrationError(f"kernel {spec.name!r}: {operation.name} binds no weight to pre-process")
        with self._lock:
            taken = self._kernels.get(spec.name)
            if taken is not None:
                raise RegistrationError(f"kernel name {spec.name!r} is taken by one from {taken.origin}; use another")
            self._kernels[spec.name] = RegisteredKernel(spec, fn, origin)

    def add_recorder(self, name: str, recorder: KernelFunction) -> None:
        """Adds the recorder ``name``; raises RegistrationError where another has it. See recording.py."""
        with self._lock:
            if self._recorders.setdefault(name, recorder) is not recorder:
                raise RegistrationError(f"recorder name {name!r} is taken; use another")

    def recorder(self, name: str) -> KernelFunction | None:
        """The recorder ``name``, None where there is none."""
        return self._recorders.get(name)

    def add_platform(self, platform: VendorPlatform) -> None:
        """Adds a vendor's hardware; raises RegistrationError where its name is taken. See vendor_platforms.py."""
        with self._lock:
            if self._platforms.setdefault(platform.vendor, platform) is not platform:
                raise RegistrationError(f"platform name {platform.vendor!r} is taken; use another")

    def drop_platform(self, vendor: str) -> None:
        """Forgets a vendor's hardware, where it was added."""
        with self._lock:
            self._platforms.pop(vendor, None)

    def platforms(self) -> list[VendorPlatform]:
        """The hardware of vendors that this package does not know, by name."""
        return [self._platforms[name] for name in sorted(self._platforms)]

    def copy(self) -> "KernelRegistry":
        """A registry of its own with the same operations and kernels."""
        twin = KernelRegistry()
        twin._operations.update(self._operations)
        twin._kernels.update(self._kernels)
        twin._recorders.update(self._recorders)
        twin._platforms.update(self._platforms)
        return twin

    def adopt(self, grown: "KernelRegistry") -> None:
        """Takes over what was added to ``grown``, which began as a copy of this registry."""
        with self._lock:
            self._operations.update(grown._operations)
            self._kernels.update(grown._kernels)
            self._recorders.update(grown._recorders)
            self._platforms.update(grown._platforms)

    def operation(self, family: str, mode: str) -> Operation:
        """The operation; raises RegistrationError, naming those there are."""
        found = self._operations.get(f"{family}.{mode}")
        if found is None:
            raise RegistrationError(f"no operation {family}.{mode}; declared are {sorted(self._operations)}")
        return found

    def operations(self) -> list[Operation]:
        """All operations, by name."""
        return [self._operations[name] for name in sorted(self._operations)]

    def kernels(self, family: str | None = None, mode: str | None = None) -> list[RegisteredKernel]:
        """The kernels (of one operation), by name: the order of registration shows nowhere."""
        found = [self._kernels[name] for name in sorted(self._kernels)]
        return [k for k in found if family in (None, k.spec.family) and mode in (None, k.spec.mode)]

    def kernel(self, name: str) -> RegisteredKernel:
        """The kernel called ``name``; raises KeyError, naming those there are."""
        found = self._kernels.get(name)
        if found is None:
            raise KeyError(f"no kernel {name!r}; registered are {sorted(self._kernels)}")
        return found

    def reference(self, family: str, mode: str) -> RegisteredKernel:
        """The operation's PyTorch reference; raises RegistrationError where there is none."""
        for kernel in self.kernels(family, mode):
            if kernel.spec.band is Band.REFERENCE:
                return kernel
        raise RegistrationError(f"{family}.{mode} has no reference kernel; register one in band REFERENCE")


_global_registry = KernelRegistry()
_active: ContextVar[KernelRegistry | None] = ContextVar("tokenspeed_kernel_registry", default=None)
_origin: ContextVar[str | None] = ContextVar("tokenspeed_kernel_origin", default=None)


def global_registry() -> KernelRegistry:
    """The process's registry: this package's references and whatever plugins added."""
    return _global_registry


def active_registry() -> KernelRegistry:
    """The registry that ``register_kernel`` writes and ``select`` reads: the process's, or the one of
    ``use_registry``."""
    return _active.get() or _global_registry


@contextmanager
def use_registry(registry: KernelRegistry) -> Iterator[KernelRegistry]:
    """Within the block, ``registry`` is the active one (this thread or task only); for tests and tools."""
    token = _active.set(registry)
    try:
        yield registry
    finally:
        _active.reset(token)


@contextmanager
def registering_from(origin: str) -> Iterator[None]:
    """Within the block, kernels are registered as coming from ``origin``, such as "some-package 1.2"."""
    token = _origin.set(origin)
    try:
        yield
    finally:
        _origin.reset(token)


def declare_operation(operation: Operation) -> Operation:
    """Declares ``operation`` in the active registry and returns it."""
    active_registry().declare(operation)
    return operation


def register_kernel(spec: KernelSpec) -> Callable[[_F], _F]:
    """A decorator that registers a kernel (or the factory of a bound one) under ``spec`` and returns it unchanged."""

    def register(fn: _F) -> _F:
        active_registry().register(spec, fn, _origin.get() or fn.__module__)
        return fn

    return register
