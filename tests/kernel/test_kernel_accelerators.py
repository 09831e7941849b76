"""What PyTorch tells of a device becomes a platform: NVIDIA, AMD and Ascend by stand-ins of their runtimes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenspeed_kernel import accelerators, platform
from tokenspeed_kernel.accelerators import accelerator, find_accelerator
from tokenspeed_kernel.platform import DEVICE_VARIABLE, PlatformError, current_platform, host_platform, select_device
from tokenspeed_kernel.registry import CapabilityRequirement

H200 = {
    "name": "NVIDIA H200",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "total_memory": 150_000_000_000,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_block_optin": 227 << 10,
    "warp_size": 32,
}
MI355X = {
    "name": "AMD Instinct MI355X",
    "gcnArchName": "gfx950:sramecc+:xnack-",
    "major": 9,
    "minor": 5,
    "multi_processor_count": 256,
    "total_memory": 309_000_000_000,
    "shared_memory_per_block": 160 << 10,
    "warp_size": 64,
}
ASCEND = {"name": "Ascend910B3", "total_memory": 64 << 30, "cube_core_num": 20}


def runtime(*devices: dict[str, Any]) -> Any:
    """As much of torch.cuda or torch.npu as detection asks, with these devices."""
    return SimpleNamespace(
        is_available=lambda: bool(devices),
        current_device=lambda: 0,
        get_device_properties=lambda index: SimpleNamespace(**devices[index]),
    )


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)
    monkeypatch.setattr(platform, "_is_selected", False)
    monkeypatch.setattr(platform, "_selected", None)
    for kept in (accelerator, platform._found):
        kept.cache_clear()
    yield
    for kept in (accelerator, platform._found):
        kept.cache_clear()


def on_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", runtime(H200, {**H200, "major": 10}))
    monkeypatch.setattr(torch.version, "hip", None)


def test_no_device_is_a_normal_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", runtime())
    assert find_accelerator() is None
    assert current_platform().vendor == "cpu"
    with pytest.raises(RuntimeError, match="finds no device of kind 'cuda'"):
        accelerator("cuda", 0)


def test_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    on_nvidia(monkeypatch)
    monkeypatch.setattr(accelerators, "_driver", lambda _vendor: (580, 95, 5))
    found = current_platform()
    assert (found.vendor, found.isa, found.key, found.architecture) == ("nvidia", "sm_90", "nvidia-sm_90", (9, 0))
    assert (found.cores, found.wave_size, found.shared_memory_bytes) == (132, 32, 227 << 10)
    assert (found.memory_bytes, found.driver) == (150_000_000_000, (580, 95, 5))
    assert accelerator("cuda", 1).isa == "sm_100"
    assert CapabilityRequirement(vendors=frozenset({"nvidia"}), minimum_architecture=(8, 0)).refusal(found) is None
    assert CapabilityRequirement(vendors=frozenset({"cpu"})).refusal(found) is not None


def test_amd_is_cuda_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", runtime(MI355X))
    monkeypatch.setattr(torch.version, "hip", "7.2.4")
    found = current_platform()
    assert (found.vendor, found.isa, found.key) == ("amd", "gfx950", "amd-gfx950")
    assert (found.cores, found.wave_size, found.shared_memory_bytes) == (256, 64, 160 << 10)
    assert CapabilityRequirement(features=frozenset({"gfx950"})).refusal(found) is None


def test_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", runtime())
    monkeypatch.setattr(torch, "npu", runtime(ASCEND), raising=False)
    found = current_platform()
    assert (found.vendor, found.isa, found.key) == ("npu", "ascend910b3", "npu-ascend910b3")
    assert (found.cores, found.wave_size, found.architecture) == (20, 0, None)


def test_a_driver_is_read_where_it_says_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    assert accelerators._DRIVER_FILES["nvidia"][0] == "/proc/driver/nvidia/version"
    monkeypatch.setitem(accelerators._DRIVER_FILES, "nvidia", (str(file), accelerators._DRIVER_FILES["nvidia"][1]))
    monkeypatch.setitem(accelerators._DRIVER_FILES, "amd", (str(tmp_path / "none"), r"(.*)"))
    assert accelerators._driver("nvidia") == (580, 95, 5)
    assert accelerators._driver("amd") is None


def test_an_engine_chooses_and_the_environment_does_where_none_did(monkeypatch: pytest.MonkeyPatch) -> None:
    on_nvidia(monkeypatch)
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    assert current_platform().vendor == "cpu"
    assert select_device("cuda", 1).isa == "sm_100"
    assert current_platform().isa == "sm_100"
    assert host_platform().vendor == "cpu"
    assert select_device("cpu").vendor == "cpu"
    assert current_platform().vendor == "cpu"


@pytest.mark.parametrize(
    ("wanted", "words"),
    [("tpu", "a device of kind 'tpu' is unknown; use one of cpu, cuda, npu"), ("npu", "finds no device of kind 'npu'")],
)
def test_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, wanted: str, words: str) -> None:
    on_nvidia(monkeypatch)
    with pytest.raises(PlatformError, match=words):
        select_device(wanted)
    monkeypatch.setenv(DEVICE_VARIABLE, wanted)
    with pytest.raises(PlatformError, match=f"{DEVICE_VARIABLE}={wanted}: .*{words}"):
        current_platform()
