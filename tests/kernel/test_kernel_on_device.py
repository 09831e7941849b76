"""Cases on a device: memory goes there whole and comes back whole. The device here is the CPU, by way of copies."""

from dataclasses import replace

import pytest
import torch

from tokenspeed_kernel.numerics import on_device, verify
from tokenspeed_kernel.numerics.on_device import bridged, device_of, values_on
from tokenspeed_kernel.numerics.verify import verify_kernel
from tokenspeed_kernel.numerics.weights import random_weight
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.registry import global_registry

CPU = torch.device("cpu")


@pytest.mark.parametrize(("vendor", "kind"), [("nvidia", "cuda"), ("amd", "cuda"), ("cpu", "cpu")])
def test_where_a_vendors_tensors_lie(monkeypatch, vendor, kind):
    platform = replace(current_platform(), vendor=vendor)
    monkeypatch.setattr(on_device, "runtime_of", lambda kind: None)
    assert device_of(platform) == CPU
    monkeypatch.setattr(on_device, "runtime_of", lambda kind: torch)
    assert device_of(platform).type == kind


def test_views_keep_strides_and_what_they_share():
    whole = torch.arange(24.0).view(4, 6)
    seen = {}

    def kernel(x, halves, count, out):
        seen.update(strides=x.stride(), shared=x.untyped_storage().data_ptr() == halves[0].untyped_storage().data_ptr())
        assert x.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
        out.copy_(x * count)
        halves[1].fill_(-1.0)

    out = torch.full((4, 2), torch.nan)
    bridged(kernel, CPU)(whole[:, 1:3], (whole[:2, 4], whole[2:, 4]), 3, out)
    assert seen == {"strides": (6, 1), "shared": True}
    assert out.tolist() == [[3.0, 6.0], [21.0, 24.0], [39.0, 42.0], [57.0, 60.0]]
    assert whole[:, 4].tolist() == [4.0, 10.0, -1.0, -1.0]


def test_what_is_bound_goes_along():
    weight = random_weight("nvfp4", 2, 64, torch.Generator().manual_seed(0)).weight
    meta = torch.device("meta")
    moved = values_on(meta, {"weight": weight, "bias": None, "heads": 3, "more": [torch.ones(2)]})
    assert moved["weight"].plane.device == meta and moved["weight"].source == weight.source
    assert moved["bias"] is None and moved["heads"] == 3 and moved["more"][0].device == meta


class _Copied:
    """A device that is not "cpu" by name, and is one."""

    type = "copied"


@pytest.mark.parametrize("name", ["reference_norm_rms", "reference_gemm_linear_fp4", "reference_embedding_lookup"])
def test_kernels_are_verified_by_way_of_the_device_with_guards_and_all(monkeypatch, name):
    calls = []

    def counting(fn, device):
        calls.append(device)
        return bridged(fn, CPU)

    monkeypatch.setattr(verify, "device_of", lambda platform: _Copied())
    monkeypatch.setattr(verify, "values_on", lambda device, values: values_on(CPU, values))
    monkeypatch.setattr(verify, "bridged", counting)
    kernel = global_registry().kernel(name)
    assert verify_kernel(kernel, global_registry()).passed and calls

    def beyond(*arguments):
        out = arguments[-1]
        torch.empty(0, dtype=out.dtype).set_(out.untyped_storage(), 0, (1,), (1,)).zero_()

    made = beyond if not kernel.spec.operation.startswith(("gemm", "embedding")) else lambda *_, **__: beyond
    report = verify_kernel(replace(kernel, fn=made), global_registry())
    assert any("wrote before the tensor out" in line for failure in report.failures for line in failure.details)
    assert on_device.bridged is bridged
