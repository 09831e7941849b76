"""Which steps can be recorded: those whose kernels all name one recorder that is there."""

from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed_kernel.recording import recorder_of, register_recorder
from tokenspeed_kernel.registry import KernelRegistry, KernelSpec, RegistrationError, use_registry


def record(body: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    return body(), lambda: None


def test_one_recorder_for_all_kernels(registry: KernelRegistry, toy_spec: Callable[..., KernelSpec]) -> None:
    with use_registry(registry):
        register_recorder("tape", record)
        assert recorder_of([toy_spec("a", recorder="tape"), toy_spec("b", recorder="tape")]) is record
        assert registry.copy().recorder("tape") is record


@pytest.mark.parametrize(
    ("recorders", "reason"),
    [
        ({}, "there is no kernel to record"),
        ({"a": "tape", "b": ""}, "b cannot be recorded"),
        ({"a": "tape", "b": "film"}, "b is recorded by film and a is recorded by tape"),
        ({"a": "film"}, "its kernels name the recorder 'film', which no package registered"),
    ],
)
def test_why_not(
    registry: KernelRegistry, toy_spec: Callable[..., KernelSpec], recorders: dict[str, str], reason: str
) -> None:
    with use_registry(registry):
        register_recorder("tape", record)
        assert recorder_of([toy_spec(name, recorder=recorder) for name, recorder in recorders.items()]) == reason


def test_a_name_is_one_recorders(registry: KernelRegistry) -> None:
    with use_registry(registry):
        register_recorder("tape", record)
        register_recorder("tape", record)
        with pytest.raises(RegistrationError, match="recorder name 'tape' is taken"):
            register_recorder("tape", lambda body: (body(), lambda: None))
