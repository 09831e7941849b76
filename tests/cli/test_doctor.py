"""``doctor``: each thing it looks at, where it is well and where it is not, with the line that mends it."""

import json
import os
import resource
import shutil
import socket
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Command
from fake_programs import FakeRoot, only_programs, put_program

from tokenspeed.cli import doctor_devices as devices
from tokenspeed.cli import doctor_host as host
from tokenspeed.recipes.machine import Accelerator, Machine
from tokenspeed.recipes.resolve import resolve

usage = namedtuple("usage", "total used free")
H200 = Accelerator(
    vendor="nvidia", arch="sm90", count=8, gb_per_device=140, description="NVIDIA H200", driver="580.95.05"
)


@pytest.fixture
def machine() -> Machine:
    return Machine(cores=4, memory_bytes=8 << 30, free_bytes=4 << 30, isa=(), accelerators=())


@pytest.fixture
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PATH without container engines and drivers."""
    only_programs(tmp_path / "bin", monkeypatch)
    return tmp_path / "bin"


def test_this_machine(tokenspeed: Command, nothing_installed: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        examined = tokenspeed("doctor", "--port", str(port), "--vendor", "cpu")
        as_json = tokenspeed("doctor", "kimi-k2.5", "--port", str(port), "--vendor", "cpu", "--json")
    assert f"warn  port {port}\n      -> port {port} on 127.0.0.1 is taken" in examined.out
    assert "warn  no C++ compiler\n      -> to build from source: apt install g++" in examined.out
    assert "ok    no container engine works: models run natively" in examined.out
    findings = json.loads(as_json.out)
    assert {finding["level"] for finding in findings} <= {"ok", "warn", "fail"}
    assert all(finding["mend"] for finding in findings if finding["level"] != "ok")
    assert findings[-1] == {"level": "ok", "what": "kimi-k2.5, profile smoke: fits", "mend": ""}


def test_a_model_that_does_not_fit_is_a_finding(tokenspeed: Command, nothing_installed: Path) -> None:
    done = tokenspeed("doctor", "kimi-k2.5", "--vendor", "nvidia")
    assert done.code == 2
    assert "fail  no profile of kimi-k2.5 fits this machine" in done.out
    assert "-> tokenspeed recipe plan kimi-k2.5" in done.out
    unknown = tokenspeed("doctor", "kimi-k2.7")
    assert (unknown.code, 'did you mean "kimi-k2.' in unknown.err) == (2, True)


def test_memory_and_the_cgroup(machine: Machine, tmp_path: Path) -> None:
    proc = FakeRoot(tmp_path).path / "proc"
    assert host.check_memory(machine, proc).level == "ok"
    bounded = host.check_memory(replace(machine, memory_bytes=4 << 30, free_bytes=1 << 30), proc)
    assert bounded.level == "fail"
    assert "(a cgroup allows that much of 8.0 GiB)" in bounded.what


@pytest.mark.parametrize(("switch", "level"), [("always [madvise] never", "ok"), ("always madvise [never]", "warn")])
def test_huge_pages(tmp_path: Path, switch: str, level: str) -> None:
    root = FakeRoot(tmp_path)
    assert host.check_huge_pages(root.path).level == "ok"
    root.write("sys/kernel/mm/transparent_hugepage/enabled", f"{switch}\n")
    assert host.check_huge_pages(root.path).level == level


def test_locked_memory_matters_for_devices(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    assert host.check_locked_memory(machine).level == "ok"
    found = host.check_locked_memory(replace(machine, accelerators=(H200,)))
    assert (found.level, "ulimit -l unlimited" in found.mend) == ("warn", True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert host.check_locked_memory(replace(machine, accelerators=(H200,))).level == "ok"


def test_shared_memory_for_ranks(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = resolve("kimi-k2.5", machine, profile="h200-int4")
    assert ranks.keys.parallel.tp == 8
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(64 << 20, 0, 64 << 20))
    assert host.check_shared_memory(None, tmp_path).level == "warn"
    found = host.check_shared_memory(ranks, tmp_path)
    assert (found.level, found.what) == ("fail", "/dev/shm has 0.06 GiB, too little for 8 ranks")
    assert "--shm-size 16g" in found.mend
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(64 << 30, 0, 64 << 30))
    assert host.check_shared_memory(ranks, tmp_path).level == "ok"


def test_disk_for_the_weights_of_a_model(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 0, 100 << 30))
    assert host.check_disk(None).level == "ok"
    found = host.check_disk(resolve("kimi-k2.5", machine, profile="h200-int4"))
    assert found.level == "fail"
    assert f"the weights of kimi-k2.5 in {tmp_path}/hub-home/hub, 554.1 GiB needed" in found.what
    assert found.mend == "set HF_HOME to a folder with room"


def test_caches_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert host.check_caches().level == "ok"
    closed = tmp_path / "triton"
    closed.mkdir()
    monkeypatch.setattr(os, "access", lambda path, _: path != closed)
    found = host.check_caches()
    assert (found.level, found.mend) == ("fail", "set TRITON_CACHE_DIR to a folder of yours")


def test_a_clock_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.check_clock().level == "ok"
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert host.check_clock().level == "warn"


@pytest.mark.parametrize(("driver", "level"), [("580.95.05", "ok"), ("600.1", "ok"), ("1.2.3", "fail"), ("", "warn")])
def test_the_driver_against_what_the_hardware_needs(
    machine: Machine, nothing_installed: Path, driver: str, level: str
) -> None:
    (found,) = devices.check_driver(replace(machine, accelerators=(replace(H200, driver=driver),)), None)
    assert found.level == level
    assert (level == "ok") == (not found.mend)


def test_the_driver_against_what_the_image_needs(machine: Machine, nothing_installed: Path) -> None:
    put_program(nothing_installed, "docker", """echo '{"tokenspeed.minimum-driver": "590.10"}'""")
    (found,) = devices.check_driver(replace(machine, accelerators=(H200,)), None)
    assert found.level == "fail"
    assert "image tokenspeed-nvidia needs 590.10" in found.what
    put_program(nothing_installed, "nvidia-smi", "echo 'CUDA Version  : 13.0'")
    put_program(nothing_installed, "docker", """echo '{"tokenspeed.minimum-driver": "580.65.06"}'""")
    (found,) = devices.check_driver(replace(machine, accelerators=(H200,)), None)
    assert (found.level, "runtime 13.0" in found.what) == ("ok", True)


def test_device_files_that_may_not_be_opened(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = FakeRoot(tmp_path)
    root.write("dev/kfd")
    root.write("dev/dri/renderD128")
    with_files = replace(machine, device_files=("/dev/kfd", "/dev/dri"), device_groups=(992,))
    assert [found.level for found in devices.check_device_files(with_files, root.path)] == ["ok"]
    assert list(devices.check_device_files(machine, root.path)) == []
    monkeypatch.setattr(os, "access", lambda path, _: not str(path).endswith("renderD128"))
    (found,) = devices.check_device_files(with_files, root.path)
    assert found.level == "fail"
    assert "renderD128" in found.what
    assert "992" in found.mend


def test_container_engines_and_cdi(machine: Machine, nothing_installed: Path) -> None:
    put_program(nothing_installed, "docker", """echo '{"ServerVersion": "29.1.0"}'""")
    put_program(nothing_installed, "podman", "echo 'cannot set up namespace' >&2; exit 125")
    found = {
        finding.what: finding for finding in devices.check_containers(replace(machine, accelerators=(H200,)), None)
    }
    assert found["docker 29.1.0"].level == "ok"
    assert found["podman: podman is installed but does not work: cannot set up namespace"].level == "warn"
    assert found["image tokenspeed-nvidia: in docker"].level == "ok"
    cdi = found["CDI specification of nvidia.com/gpu: none"]
    assert (cdi.level, cdi.mend) == ("warn", "as root: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml")
    there = replace(machine, accelerators=(H200,), cdi_kinds=("nvidia.com/gpu",))
    assert "CDI specification of nvidia.com/gpu: there" in {
        finding.what for finding in devices.check_containers(there, None)
    }


def test_accelerators_are_said_to_lie_idle(machine: Machine) -> None:
    (found,) = devices.check_accelerators(replace(machine, accelerators=(H200,)))
    assert (found.level, found.what) == ("warn", "8 x NVIDIA H200 (sm90, 140 GiB each)")
