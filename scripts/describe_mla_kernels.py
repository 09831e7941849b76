"""Writes the tables of docs/design/mla-kernels.md: what the compiler made, and what is expected of it by data sheets.

usage: describe_mla_kernels.py [--check]

--check writes nothing and ends with 1 where the page says something else. Compiles some variants of every kind, in
about two minutes, and ends with an error where one spills registers; needs nvidia-cutlass-dsl and no GPU.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from tokenspeed_mla.addressing import (
    EXPANDED,
    LATENT,
    PAIR_ROWS,
    PREFILL_KEYS,
    PREFILL_QUERIES,
    TILE_ROWS,
    VALUE,
    WIDTH,
    ceil_div,
)
from tokenspeed_mla.ahead import compile_ahead, variants
from tokenspeed_mla.compilation import HOPPER, Variant
from tokenspeed_mla.kernels import (
    blackwell,
    blackwell_pair,
    blackwell_prefill,
    blackwell_steps,
    hopper_prefill_steps,
    hopper_steps,
)
from tokenspeed_mla.kernels.merge import LANES, WARPS
from tokenspeed_mla.plan import DecodePlan, tile_rows_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.page_parts import with_part, write_or_compare  # noqa: E402

PAGE = ROOT / "docs/design/mla-kernels.md"


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet: what it reads, and 16-bit multiply-adds, dense, in a second."""

    name: str
    processors: int
    read_bytes: float
    products: float


H200 = Gpu("H200", 132, 4.8e12, 989e12 / 2)
B200 = Gpu("B200", 148, 8.0e12, 2250e12 / 2)

SHAPES = (
    (16, 1, 1, 32768),
    (16, 64, 1, 4096),
    (64, 1, 1, 32768),
    (64, 32, 2, 4096),
    (128, 1, 1, 32768),
    (128, 64, 1, 4096),
)
"""Heads, requests, queries each, tokens each."""

CHUNKS = ((128, 2048, 0), (128, 2048, 14336), (16, 8192, 0))
"""Heads, queries, keys before the first of them."""


def facts(variant: Variant) -> tuple[int, int, int, int]:
    """Threads, bytes of shared memory and columns of tensor memory of a block, and the most registers a thread may
    have."""
    if variant.kernel == "merge":
        return WARPS * LANES, 0, 0, 255
    if variant.kernel == "prefill" and variant.architecture != HOPPER:
        return blackwell_prefill.THREADS, blackwell_prefill.SHARED_BYTES, blackwell_steps.TENSOR_COLUMNS, 168
    if variant.kernel == "prefill":
        return hopper_steps.THREADS, hopper_prefill_steps.SHARED_BYTES, 0, 168
    if variant.architecture == HOPPER:
        return hopper_steps.THREADS, hopper_steps.SHARED_BYTES, 0, 168
    if variant.cached is not None:
        return blackwell.MORE_THREADS, blackwell.SHARED_BYTES, blackwell_steps.TENSOR_COLUMNS, 168
    module = blackwell_pair if variant.tile_rows == PAIR_ROWS else blackwell
    return module.THREADS, module.SHARED_BYTES, blackwell_steps.TENSOR_COLUMNS, blackwell_steps.MOST_REGISTERS


def compiled() -> list[str]:
    """The table of variants; ValueError where registers are spilt, or more than a thread may have."""
    lines = [
        "| variant | threads | registers | stack, bytes | shared memory, bytes | tensor columns | code, bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in variants():
        code = compile_ahead(variant)
        threads, shared, columns, most = facts(variant)
        # The merge keeps an address while the exact reciprocal is called, once a row.
        if code.registers > most or code.stack_bytes > (8 if variant.kernel == "merge" else 0):
            raise ValueError(f"{variant}: {code.registers} registers, {code.stack_bytes} bytes of stack")
        numbers = (threads, code.registers, code.stack_bytes, shared, columns, code.code_bytes)
        lines.append(f"| {str(variant).removeprefix('mla ')} | " + " | ".join(f"{n:,}" for n in numbers) + " |")
    return lines


def expected() -> list[str]:
    """The roofline of some decodes. A product of 64 rows takes Blackwell's tensor core as long as one of 128."""
    lines = [
        "| GPU | heads | requests | queries | tokens | tile | splits | blocks | workspace, MB | read, µs | "
        "products, µs | bound |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for gpu in (H200, B200):
        for heads, batch, q_len, tokens in SHAPES:
            tile = tile_rows_of(gpu is B200, heads, q_len)
            plan = DecodePlan.choose(batch, q_len, heads, tokens // 64, gpu.processors, tile)
            x, y, z = plan.grid
            read = batch * tokens * WIDTH * 2 / gpu.read_bytes * 1e6
            rows = x * TILE_ROWS * (2 if gpu is B200 and tile == TILE_ROWS else 1)
            computing = y * rows * ceil_div(tokens, tile) * tile * (WIDTH + LATENT) / gpu.products * 1e6
            cells = (gpu.name, heads, batch, q_len, f"{tokens:,}", tile, plan.splits, x * y * z)
            times = (f"{plan.workspace_bytes / 1e6:.1f}", f"{read:.1f}", f"{computing:.1f}")
            bound = "memory" if read > computing else "products"
            lines.append("| " + " | ".join(map(str, (*cells, *times, bound))) + " |")
    return lines


def prefilled() -> list[str]:
    """The roofline of some chunks of one row on an H200, with a mask."""
    lines = [
        "| heads | queries | keys before | blocks | read and written, MB | memory, µs | products, µs | masked away |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for heads, queries, before in CHUNKS:
        keys, tiles = before + queries, ceil_div(queries, PREFILL_QUERIES)
        moved = 2 * heads * (queries * (EXPANDED + VALUE) + keys * (EXPANDED + VALUE))
        steps = sum(ceil_div(before + (tile + 1) * PREFILL_QUERIES, PREFILL_KEYS) for tile in range(tiles))
        pairs = steps * PREFILL_QUERIES * PREFILL_KEYS
        seen = sum(before + query + 1 for query in range(queries))
        times = (moved / H200.read_bytes * 1e6, heads * pairs * (EXPANDED + VALUE) / H200.products * 1e6)
        cells = (heads, f"{queries:,}", f"{before:,}", tiles * heads, f"{moved / 1e6:.0f}")
        lines.append(
            "| " + " | ".join(map(str, cells)) + f" | {times[0]:.0f} | {times[1]:.0f} | {1 - seen / pairs:.0%} |"
        )
    return lines


def rewritten(text: str, tables: dict[str, list[str]]) -> str:
    """The page with what stands between ``<!-- name -->`` and ``<!-- end of name -->`` replaced."""
    for name, lines in tables.items():
        text = with_part(PAGE.name, text, f"<!-- {name} -->", f"<!-- end of {name} -->", "\n".join(lines))
    return text


def main() -> int:
    """Returns the exit status."""
    tables = {"compiled": compiled(), "expected": expected(), "prefilled": prefilled()}
    wanted = rewritten(PAGE.read_text(encoding="utf-8"), tables)
    return write_or_compare(PAGE, wanted, check="--check" in sys.argv[1:], script=__file__)


if __name__ == "__main__":
    sys.exit(main())
