"""What is read from the operating system; free memory and cores have their tests beside the device's sizing."""

from pathlib import Path

from tokenspeed.recipes.host import total_memory_bytes
from tokenspeed.recipes.machine import detect_machine


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
