"""Measures the native CPU kernels on every instruction set that is here, and writes the tables that ship with them.

    python scripts/tune_cpu_kernels.py [FOLDER]

One table for each platform key goes to FOLDER, by default ``latencies`` beside the package's records. Run it on a
machine that does nothing else, after a kernel's ``KernelSpec.version`` was raised: a measurement counts only for the
version and the platform that it names, and decides wherever several kernels of the package fit a request.
"""

import os
import subprocess
import sys
from pathlib import Path

INSTRUCTION_SETS = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16")
FOLDER = Path(__file__).parent.parent / "kernel-backends/cpu/tokenspeed_kernel_cpu/latencies"


def main(arguments: list[str]) -> int:
    """Returns 0 where every instruction set was measured; the tables of those before a failure stay."""
    folder = Path(arguments[0]) if arguments else FOLDER
    machine = os.uname().machine
    for name in INSTRUCTION_SETS:
        path = folder / f"cpu-{machine}-{name}.json"
        path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tokenspeed_kernel.plugins.cli", "tune", "--all", "--output", str(path)]
        ended = subprocess.run(command, env={**os.environ, "TOKENSPEED_KERNEL_CPU_ISA": name}, check=False)
        if ended.returncode != 0:
            print(f"stopped: a kernel failed on {name}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
