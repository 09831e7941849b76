"""Writes the tables of docs/design/mla-kernels.md: what the compiler made, and what is expected of it on an H200.

usage: describe_mla_kernels.py [--check]

--check writes nothing and ends with 1 where the page says something else. Compiles every variant, in about two minutes;
needs nvidia-cutlass-dsl and no GPU.
"""

import sys
from pathlib import Path

from tokenspeed_mla.addressing import LATENT, TILE_KEYS, TILE_ROWS, WIDTH, ceil_div
from tokenspeed_mla.ahead import compile_ahead, variants
from tokenspeed_mla.kernels.hopper_steps import SHARED_BYTES, THREADS
from tokenspeed_mla.kernels.merge import LANES, WARPS
from tokenspeed_mla.plan import DecodePlan

PAGE = Path(__file__).parent.parent / "docs/design/mla-kernels.md"

PROCESSORS = 132
READ_BYTES_A_SECOND = 4.8e12
PRODUCTS_A_SECOND = 989e12 / 2
"""Multiply-adds with 16-bit operands, dense: the H200's data sheet."""

SHAPES = (
    (16, 1, 1, 32768),
    (16, 64, 1, 4096),
    (64, 1, 1, 32768),
    (64, 32, 2, 4096),
    (128, 1, 1, 32768),
    (128, 64, 1, 4096),
)
"""Heads, requests, queries each, tokens each."""


def compiled() -> list[str]:
    """The table of variants."""
    lines = [
        "| variant | threads | registers | stack, bytes | shared memory, bytes | code, bytes |",
        "|---|---|---|---|---|---|",
    ]
    for variant in variants():
        code = compile_ahead(variant)
        decode = variant.kernel == "decode"
        threads, shared = (THREADS, SHARED_BYTES) if decode else (WARPS * LANES, 0)
        numbers = (threads, code.registers, code.stack_bytes, shared, code.code_bytes)
        lines.append(f"| {str(variant).removeprefix('mla ')} | " + " | ".join(f"{n:,}" for n in numbers) + " |")
    return lines


def expected() -> list[str]:
    """The roofline of some calls."""
    lines = [
        "| heads | requests | queries | tokens | splits | blocks | workspace, MB | read, µs | products, µs | bound |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for heads, batch, q_len, tokens in SHAPES:
        plan = DecodePlan.choose(batch, q_len, heads, tokens // 64, PROCESSORS)
        x, y, z = plan.grid
        read = batch * tokens * WIDTH * 2 / READ_BYTES_A_SECOND * 1e6
        products = x * y * TILE_ROWS * ceil_div(tokens, TILE_KEYS) * TILE_KEYS * (WIDTH + LATENT)
        computing = products / PRODUCTS_A_SECOND * 1e6
        cells = (heads, batch, q_len, f"{tokens:,}", plan.splits, x * y * z, f"{plan.workspace_bytes / 1e6:.1f}")
        times = (f"{read:.1f}", f"{computing:.1f}", "memory" if read > computing else "products")
        lines.append("| " + " | ".join(map(str, (*cells, *times))) + " |")
    return lines


def rewritten(text: str, tables: dict[str, list[str]]) -> str:
    """The page with what stands between ``<!-- name -->`` and ``<!-- end of name -->`` replaced."""
    for name, lines in tables.items():
        before, rest = text.split(f"<!-- {name} -->\n")
        _, after = rest.split(f"<!-- end of {name} -->\n")
        text = f"{before}<!-- {name} -->\n" + "\n".join(lines) + f"\n<!-- end of {name} -->\n{after}"
    return text


def main() -> int:
    """Returns the exit status."""
    before = PAGE.read_text(encoding="utf-8")
    after = rewritten(before, {"compiled": compiled(), "expected": expected()})
    if "--check" in sys.argv[1:]:
        if after != before:
            print(f"{PAGE} is not what the compiler makes now; run {Path(__file__).name}")
        return int(after != before)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
