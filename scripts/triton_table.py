"""Compiles the Triton kernels ahead of time and writes what they take into docs/design/triton-kernels.md.

usage: triton_table.py [ARCHITECTURE ...]

Without architectures: sm_90, sm_100, gfx942 and gfx950. Needs the package triton and no GPU; takes some minutes.
"""

import sys
from pathlib import Path

from tokenspeed_kernel_triton.ahead import compile_ahead, resident_blocks
from tokenspeed_kernel_triton.ahead_cases import launches
from tokenspeed_kernel_triton.device import compiling_for
from tokenspeed_kernel_triton.loading import Launch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.page_parts import with_part  # noqa: E402

PAGE = ROOT / "docs/design/triton-kernels.md"
BEGIN, END = "<!-- compiled: begin -->", "<!-- compiled: end -->"
ARCHITECTURES = ("sm_90", "sm_100", "gfx942", "gfx950")
TWINS = ("attend", "linear", "attend_selected", "expand")
"""Functions with an exact twin, which is there to check by."""

HEAD = "| kernel | on | tile | warps, stages | operations a byte | registers | shared KiB | spilled B | blocks |"


def intensity(launch: Launch) -> str:
    """Arithmetic operations for each byte of cache or weight that a tile reads; empty where neither is read."""
    constants = launch.constants
    if launch.function == "attend":
        width = launch.arguments[2].element_size()
        dim, rope, rows = constants["DIM"], constants["ROPE"], constants["BLOCK_M"]
        bytes_of_key = (dim + rope if constants["LATENT"] else 2 * dim) * width
        return f"{2 * rows * (2 * dim + rope) / bytes_of_key:.0f}"
    if launch.function == "linear":
        x, *planes = launch.arguments[:7]
        size = sum(plane.numel() * plane.element_size() for plane in planes if plane is not x)
        return f"{2 * constants['BLOCK_M'] * launch.arguments[10] * constants['INPUTS'] / size:.0f}"
    return ""


def tile(launch: Launch) -> str:
    """Rows and columns of a tile."""
    constants = launch.constants
    names = [name for name in ("BLOCK_M", "BLOCK_N", "BLOCK") if name in constants]
    return " × ".join(str(constants[name]) for name in names)


def rows(architecture: str) -> list[str]:
    """A line for each kernel whose operands are not float32 for exactness."""
    lines = []
    with compiling_for(architecture):
        for name, launch in launches():
            if launch.function in TWINS and not launch.constants["ROUNDED"]:
                continue
            found = compile_ahead(launch, architecture)
            blocks = resident_blocks(found, launch.warps, architecture)
            figures = (
                name.replace("torch.", ""),
                architecture,
                tile(launch),
                f"{launch.warps}, {launch.stages}",
                intensity(launch),
                found.registers,
                f"{found.shared / 1024:.0f}",
                found.spilled,
                blocks,
            )
            lines.append("| " + " | ".join(map(str, figures)) + " |")
    return lines


def main(architectures: list[str]) -> None:
    """Rewrites the table of the page."""
    lines = sorted(line for architecture in architectures for line in rows(architecture))
    table = "\n".join([HEAD, "|---|---|---|---|---|---|---|---|---|", *lines])
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_part(PAGE.name, text, BEGIN, END, table), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or list(ARCHITECTURES))
