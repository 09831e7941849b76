"""Which steps can be recorded: those whose kernels all name one recorder that is there."""

from collections.abc import Callable
from typing import Any

import pytest
from kernel_toys import SIGNATURE

from tokenspeed_kernel.binding import Bound, bind, binding_captured
from tokenspeed_kernel.platform import PlatformInfo, override_platform
from tokenspeed_kernel.recording import PLANS_ON_HOST, recorder_of, register_recorder
from tokenspeed_kernel.registry import Band, KernelRegistry, KernelSpec, RegistrationError, use_registry
from tokenspeed_kernel.selection import OverrideError


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


def test_where_graphs_hold_the_calls_no_kernel_plans_on_the_host(
    registry: KernelRegistry, toy_spec: Callable[..., KernelSpec], make_platform: Callable[..., PlatformInfo]
) -> None:
    def copy(x: Any, out: Any) -> None:
        out.copy_(x)

    planning = toy_spec("planning", band=Band.SPECIALISED, tags=frozenset({PLANS_ON_HOST}))
    for spec in (planning, toy_spec("plain")):
        registry.register(spec, copy, "test")

    def chosen(override: str | None = None) -> Bound:
        return bind("toy", "copy", SIGNATURE, {"width": 64}, override=override)

    with use_registry(registry), override_platform(make_platform()):
        assert chosen().spec.name == "planning"
        with binding_captured(False):
            assert chosen().spec.name == "planning"
        with binding_captured(True):
            assert chosen().spec.name == "plain"
            assert "planning: dropped at graphs: plans each forward on the host" in chosen().selection.explain()
            with pytest.raises(OverrideError, match=r"scheduler\.graphs: off admits it"):
                chosen("planning")
