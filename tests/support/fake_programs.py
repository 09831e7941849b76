"""Programs of other vendors, as small scripts on PATH: what a driver's tool prints, or what docker does."""

import os
from pathlib import Path

import pytest


def put_program(folder: Path, name: str, script: str) -> Path:
    """Writes an executable shell script."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def only_programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PATH is this folder, and what scripts need; no tool of this machine's own is found by accident."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("sh", "cat", "sleep", "env", "tail", "kill"):
        source = next(Path(part) / name for part in os.defpath.split(":") if (Path(part) / name).exists())
        target = folder / name
        if not target.exists():
            target.symlink_to(source)
    monkeypatch.setenv("PATH", str(folder))


class FakeRoot:
    """A folder that stands for / of another machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\n")
        self.write("proc/self/cgroup", "0::/\n")
        self.write("proc/cpuinfo", "flags : fpu avx2 avx512f sse\n")

    def write(self, name: str, text: str = "") -> Path:
        """Writes a file and its folders."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path
