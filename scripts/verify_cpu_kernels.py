"""Verifies the native CPU kernels on every instruction set that is here, and writes the records that ship with them.

    python scripts/verify_cpu_kernels.py

Run it when a kernel's numbers change, after its ``KernelSpec.version`` was raised: a record counts only for the version
and the platform that it names.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenspeed_kernel.plugins.loading import loaded_registry
from tokenspeed_kernel.records import read_records, write_records

INSTRUCTION_SETS = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16")
RECORDS = Path(__file__).parent.parent / "kernel-backends/cpu/tokenspeed_kernel_cpu/verified.json"


def main() -> int:
    """Returns 0 where every kernel is right on every instruction set; only then the file is written."""
    names = [
        kernel.spec.name for kernel in loaded_registry().kernels() if kernel.spec.solution.startswith("cpu_native")
    ]
    chosen = [part for kernel in names for part in ("--kernel", kernel)]
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for name in INSTRUCTION_SETS:
            path = Path(folder) / f"{name}.json"
            command = [sys.executable, "-m", "tokenspeed_kernel.numerics", *chosen, "--write", str(path)]
            ended = subprocess.run(command, env={**os.environ, "TOKENSPEED_KERNEL_CPU_ISA": name}, check=False)
            if ended.returncode != 0:
                print(f"not written: a kernel is wrong on {name}", file=sys.stderr)
                return 1
            records += read_records(path)
    write_records(RECORDS, records)
    print(f"{len(records)} records in {RECORDS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
