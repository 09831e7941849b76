"""A toy operation, and registries that tests may fill without touching the process's own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tokenspeed_kernel.platform import PlatformInfo, features_up_to
from tokenspeed_kernel.registry import Band, KernelRegistry, KernelSpec, Operation, global_registry
from tokenspeed_kernel.signature import FLOAT32, FormatSignature
from tokenspeed_kernel.traits import MultipleOf, OneOf, Range, TraitDeclaration

SIGNATURE = FormatSignature.of(input=FLOAT32)


@pytest.fixture
def registry() -> KernelRegistry:
    """A registry with one operation, toy.copy: fn(x, out); trait width, and a trait that came later."""
    registry = KernelRegistry()
    registry.declare(
        Operation(
            family="toy",
            mode="copy",
            roles=frozenset({"input"}),
            traits={
                "width": TraitDeclaration((OneOf, Range, MultipleOf), int, "elements of a row", 64),
                "sunk": TraitDeclaration((OneOf,), bool, "came later", False, default=False),
            },
            arguments="x, out",
        )
    )
    return registry


@pytest.fixture
def toy_spec() -> Callable[..., KernelSpec]:
    """Makes specs of toy.copy; keyword arguments replace fields."""

    def make(name: str, **changes: Any) -> KernelSpec:
        fields: dict[str, Any] = {
            "name": name,
            "family": "toy",
            "mode": "copy",
            "solution": name.split("_")[0],
            "signatures": frozenset({SIGNATURE}),
            "traits": {"width": Range(1)},
            "band": Band.PORTABLE,
        }
        return KernelSpec(**{**fields, **changes})

    return make


@pytest.fixture
def reference_registry() -> KernelRegistry:
    """A copy of the process's registry with this package's references only, whatever plugins are installed."""
    registry = KernelRegistry()
    own = global_registry()
    for operation in own.operations():
        registry.declare(operation)
    for kernel in own.kernels():
        if kernel.spec.band is Band.REFERENCE:
            registry.register(kernel.spec, kernel.fn, kernel.origin)
    return registry


@pytest.fixture
def make_platform() -> Callable[..., PlatformInfo]:
    """Makes platforms: ``make_platform("avx2")`` or with any field replaced."""

    def make(isa: str = "avx512", **changes: Any) -> PlatformInfo:
        fields: dict[str, Any] = {
            "vendor": "cpu",
            "machine": "x86_64",
            "isa": isa,
            "features": features_up_to(isa) if changes.get("vendor", "cpu") == "cpu" else frozenset(),
            "cores": 2,
            "memory_bytes": 8 << 30,
        }
        return PlatformInfo(**{**fields, **changes})

    return make


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors are slower on two threads, and the other core is somebody else's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
