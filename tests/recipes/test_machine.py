"""What is read from the operating system; free memory and cores have their tests beside the device's sizing."""

import os
from pathlib import Path

import pytest
from fake_programs import FakeRoot, only_programs, put_program

from tokenspeed.recipes import devices
from tokenspeed.recipes.devices import Accelerator, cuda_version
from tokenspeed.recipes.host import total_memory_bytes
from tokenspeed.recipes.machine import detect_machine

H200 = "NVIDIA H200, 143771, 9.0, 580.95.05"
NPU_SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     {name}            | OK            | 170.1       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3113 / 65536         |
+------------------------------------------------------------------------------------------------+
| 1     {name}            | OK            | 168.0       35                0    / 0             |
| 0     1                   | 0000:9F:00.0  | 0           0    / 0          2879 / 65536         |
+===========================+===============+====================================================+
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRoot:
    only_programs(tmp_path / "bin", monkeypatch)
    return FakeRoot(tmp_path / "root")


def program(root: FakeRoot, name: str, text: str) -> None:
    """A tool that prints ``text`` whatever it is asked."""
    put_program(root.path.parent / "bin", name, f"cat <<'END'\n{text}\nEND")


def test_a_cgroup_bounds_the_total(tmp_path: Path) -> None:
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    root.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: {8 << 20} kB\nMemAvailable: {6 << 20} kB\n")
    (proc / "self" / "cgroup").write_text("0::/\n")
    (root / "memory.max").write_text("max")
    assert total_memory_bytes(root, proc) == 8 << 30
    (root / "memory.max").write_text(str(2 << 30))
    assert total_memory_bytes(root, proc) == 2 << 30


def test_this_machine_is_described() -> None:
    machine = detect_machine()
    assert machine.cores >= 1
    assert 0 < machine.free_bytes <= machine.memory_bytes
    assert "GiB of memory free" in machine.summary


def test_a_machine_without_accelerators(root: FakeRoot) -> None:
    program(root, "nvidia-smi", H200)  # the tool alone, without a device, is no device
    machine = detect_machine(root.path)
    assert machine.accelerators == ()
    assert machine.isa == ("avx2", "avx512f")
    assert (machine.free_bytes, machine.memory_bytes) == (6 << 30, 8 << 30)


def test_nvidia_by_its_tool(root: FakeRoot) -> None:
    for index in range(2):
        root.write(f"dev/nvidia{index}")
    root.write("dev/nvidiactl")
    root.write("etc/cdi/nvidia.yaml", "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n  - name: all\n")
    program(root, "nvidia-smi", f"{H200}\n{H200}")
    machine = detect_machine(root.path)
    assert machine.accelerators == (
        Accelerator(
            vendor="nvidia",
            arch="sm90",
            count=2,
            gb_per_device=140,
            description="NVIDIA H200",
            driver="580.95.05",
        ),
    )
    assert machine.cdi_kinds == ("nvidia.com/gpu",)
    assert machine.device_files == ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl")


def test_a_device_that_shares_the_hosts_memory_has_none_of_its_own(root: FakeRoot) -> None:
    root.write("dev/nvidiactl")
    program(root, "nvidia-smi", "NVIDIA GB10, [N/A], 12.1, 580.95.05")
    (found,) = detect_machine(root.path).accelerators
    assert (found.arch, found.gb_per_device) == ("sm121", 0)


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'", "sleep 60"])
def test_a_silent_nvidia_driver_is_said_to_be_silent(
    root: FakeRoot, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "TOOL_TIMEOUT_S", 0.2)
    root.write("dev/nvidiactl")
    for index in range(4):
        root.write(f"dev/nvidia{index}")
    root.write(
        "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Tue Sep 23\n"
    )
    put_program(root.path.parent / "bin", "nvidia-smi", script)
    (found,) = detect_machine(root.path).accelerators
    assert (found.count, found.arch, found.driver) == (4, "", "580.95.05")
    assert "silent" in found.description


def test_cuda_as_the_driver_tells_it(root: FakeRoot) -> None:
    program(root, "nvidia-smi", "DRIVER version      : 580.95.05\nCUDA Version        : 13.0")
    assert cuda_version() == "13.0"


def test_amd_by_the_kernels_files(root: FakeRoot) -> None:
    nodes = "sys/class/kfd/kfd/topology/nodes"
    root.write(f"{nodes}/0/properties", "cpu_cores_count 64\ngfx_target_version 0\n")
    for index in (1, 2):
        minor = 127 + index
        root.write(f"{nodes}/{index}/properties", f"gfx_target_version 90500\ndrm_render_minor {minor}\n")
        root.write(f"{nodes}/{index}/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {288 << 30}\n")
        root.write(f"sys/class/drm/renderD{minor}/device/product_name", "AMD Instinct MI355X OAM\n")
        os.chmod(root.write(f"dev/dri/renderD{minor}"), 0o660)
    os.chmod(root.write("dev/kfd"), 0o660)
    root.write("sys/module/amdgpu/version", "6.14.14\n")
    root.write("opt/rocm/.info/version", "7.0.2-56\n")
    root.write("var/run/cdi/amd.json", '{\n  "cdiVersion": "0.6.0",\n  "kind": "amd.com/gpu",\n  "devices": []\n}\n')
    machine = detect_machine(root.path)
    assert machine.accelerators == (
        Accelerator(
            vendor="amd",
            arch="gfx950",
            count=2,
            gb_per_device=288,
            description="AMD Instinct MI355X OAM",
            driver="6.14.14",
            runtime="7.0.2",
        ),
    )
    assert machine.cdi_kinds == ("amd.com/gpu",)
    assert machine.device_files == ("/dev/kfd", "/dev/dri")


def test_the_groups_of_device_files_are_numbers(root: FakeRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container knows no names of the host's groups; those that may not write do not count."""
    root.write("sys/class/kfd/kfd/topology/nodes/1/properties", "gfx_target_version 90402\n")
    files = {"dev/kfd": (0o660, 993), "dev/dri/renderD128": (0o660, 992), "dev/dri/renderD129": (0o640, 44)}
    real = os.stat

    def stat(path: os.PathLike[str] | str, *rest: object, **more: object) -> os.stat_result:
        found = real(path, *rest, **more)  # type: ignore[arg-type]
        for name, (mode, group) in files.items():
            if str(path).endswith(name):
                values = list(found)
                values[0], values[5] = (found.st_mode & ~0o777) | mode, group
                return os.stat_result(values)
        return found

    for name in files:
        root.write(name)
    monkeypatch.setattr(os, "stat", stat)
    machine = detect_machine(root.path)
    assert machine.accelerators[0].arch == "gfx942"
    assert machine.device_groups == (992, 993)


@pytest.mark.parametrize(
    ("name", "arch"),
    [("910B3     ", "a2"), ("Ascend910 ", "a3"), ("910_9392  ", "a3"), ("Ascend950 ", "950")],
)
def test_ascend_by_its_tool(root: FakeRoot, name: str, arch: str) -> None:
    for index in range(2):
        root.write(f"dev/davinci{index}")
    root.write("dev/davinci_manager")
    root.write("usr/local/Ascend/driver/version.info", "Version=25.2.0\nascendhal_version=7.35.23\n")
    root.write("usr/local/Ascend/ascend-toolkit/latest/version.cfg", "runtime_running_version=[7.7.0.1.238:8.2.RC1]\n")
    program(root, "npu-smi", NPU_SMI.format(name=name))
    machine = detect_machine(root.path)
    (found,) = machine.accelerators
    assert (found.arch, found.count, found.gb_per_device) == (arch, 2, 64)
    assert (found.driver, found.runtime) == ("25.2.0", "8.2.RC1")
    assert machine.device_files == ("/dev/davinci0", "/dev/davinci1", "/dev/davinci_manager")


def test_ascend_without_its_tool(root: FakeRoot) -> None:
    root.write("dev/davinci0")
    (found,) = detect_machine(root.path).accelerators
    assert (found.count, found.arch, found.description) == (1, "", "Ascend NPU")


def test_the_operator_knows_better(root: FakeRoot) -> None:
    root.write("dev/nvidiactl")
    program(root, "nvidia-smi", H200)
    machine = detect_machine(root.path)
    assert machine.told_vendor(None) is machine
    assert machine.told_vendor("cpu").accelerators == ()
    assert machine.told_vendor("nvidia").accelerators == machine.accelerators
    (told,) = machine.told_vendor("amd").accelerators
    assert (told.vendor, told.count) == ("amd", 1)
