"""Everything that differs between architectures: tiles, warps and pipeline stages of each kernel, in one place.

None of these figures was measured: no kernel here has run on a GPU yet. They were chosen so that what is compiled keeps
within the architecture's shared memory and spills nothing (tests/kernel_triton compiles each), and for the operations a
byte that the tiles give (docs/design/triton-kernels.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from tokenspeed_kernel.ops.split_plan import best_split_count

SHARED_MEMORY: Mapping[str, int] = MappingProxyType(
    {
        "sm_80": 163 << 10,
        "sm_86": 99 << 10,
        "sm_90": 227 << 10,
        "sm_100": 227 << 10,
        "sm_120": 99 << 10,
        "gfx942": 64 << 10,
        "gfx950": 160 << 10,
    }
)
"""Bytes of shared memory (LDS on AMD) that one block may use."""

PROCESSORS: Mapping[str, int] = MappingProxyType(
    {"sm_80": 108, "sm_86": 84, "sm_90": 132, "sm_100": 148, "sm_120": 188, "gfx942": 304, "gfx950": 256}
)
"""Processors (SM, CU) of the largest device of an architecture, for the interpreter; a device says its own."""

REGISTERS: Mapping[str, int] = MappingProxyType(
    {name: 4 * 512 * 64 if name.startswith("gfx") else 65536 for name in SHARED_MEMORY}
)
"""32-bit registers of a processor."""

LANES: Mapping[str, int] = MappingProxyType({name: 64 if name.startswith("gfx") else 32 for name in SHARED_MEMORY})
"""Threads of one warp (wave)."""

WITHOUT_E4M3 = frozenset({"sm_80", "sm_86", "gfx942"})
"""Architectures that have no float8_e4m3fn: what is stored so is taken as bytes."""


@dataclass(frozen=True)
class AttentionTile:
    """How attention is cut.

    Attributes:
        rows: pairs of a token and a query head in a tile, at most.
        keys: keys of one step of the loop.
        warps: of a block.
        stages: of the loop's pipeline.
    """

    rows: int
    keys: int
    warps: int
    stages: int


_Tiles: TypeAlias = dict[str, AttentionTile]

# Exact kernels are there to be right: operands of 32 bits, no bandwidth to be had from larger tiles.
_EXACT_NVIDIA: _Tiles = {
    "decode, exact": AttentionTile(16, 32, 4, 1),
    "decode, wide, exact": AttentionTile(16, 32, 8, 1),
    "extend, exact": AttentionTile(32, 32, 4, 1),
    "extend, wide, exact": AttentionTile(16, 32, 8, 1),
    "latent, exact": AttentionTile(16, 16, 8, 1),
}
_EXACT_AMD: _Tiles = {
    "decode, exact": AttentionTile(16, 32, 4, 1),
    "decode, wide, exact": AttentionTile(16, 32, 4, 1),
    "extend, exact": AttentionTile(64, 32, 4, 1),
    "extend, wide, exact": AttentionTile(32, 32, 4, 1),
    "latent, exact": AttentionTile(16, 16, 4, 1),
}
_SMALL: _Tiles = _EXACT_NVIDIA | {
    "decode": AttentionTile(16, 32, 4, 2),
    "decode, wide": AttentionTile(16, 32, 4, 1),
    "extend": AttentionTile(64, 32, 4, 2),
    "extend, wide": AttentionTile(64, 32, 8, 1),
    "latent": AttentionTile(16, 32, 8, 1),
    "latent, eight": AttentionTile(32, 16, 8, 1),
}

_ATTENTION: Mapping[str, _Tiles] = MappingProxyType(
    {
        "sm_80": _EXACT_NVIDIA
        | {
            "decode": AttentionTile(16, 64, 4, 2),
            "decode, wide": AttentionTile(16, 32, 4, 2),
            "extend": AttentionTile(64, 64, 4, 2),
            "extend, wide": AttentionTile(64, 32, 8, 2),
            "latent": AttentionTile(32, 32, 8, 2),
            "latent, eight": AttentionTile(32, 16, 8, 1),
        },
        "sm_86": _SMALL,
        "sm_90": _EXACT_NVIDIA
        | {
            "decode": AttentionTile(16, 64, 4, 3),
            "decode, wide": AttentionTile(16, 64, 4, 2),
            "extend": AttentionTile(128, 64, 8, 2),
            "extend, wide": AttentionTile(64, 32, 8, 2),
            "latent": AttentionTile(64, 16, 8, 2),
            "latent, eight": AttentionTile(32, 16, 8, 1),
        },
        "sm_100": _EXACT_NVIDIA
        | {
            "decode": AttentionTile(16, 64, 4, 3),
            "decode, wide": AttentionTile(16, 64, 4, 2),
            "extend": AttentionTile(128, 64, 8, 2),
            "extend, wide": AttentionTile(128, 32, 8, 1),
            "latent": AttentionTile(64, 16, 8, 2),
            "latent, eight": AttentionTile(32, 16, 8, 1),
        },
        "sm_120": _SMALL,
        "gfx942": _EXACT_AMD
        | {
            "decode": AttentionTile(16, 32, 4, 1),
            "decode, wide": AttentionTile(16, 32, 4, 1),
            "extend": AttentionTile(64, 32, 4, 1),
            "extend, wide": AttentionTile(64, 32, 4, 1),
            "latent": AttentionTile(64, 16, 8, 2),
            "latent, eight": AttentionTile(64, 16, 4, 1),
        },
        "gfx950": _EXACT_AMD
        | {
            "decode": AttentionTile(16, 64, 4, 1),
            "decode, wide": AttentionTile(16, 32, 4, 1),
            "extend": AttentionTile(128, 64, 4, 1),
            "extend, wide": AttentionTile(64, 32, 4, 1),
            "latent": AttentionTile(64, 16, 8, 2),
            "latent, eight": AttentionTile(64, 16, 8, 2),
        },
    }
)

_WIDE = 128


def attention_tile(kind: str, architecture: str, width: int, rounded: bool, eight: bool = False) -> AttentionTile:
    """The tile of ``kind``: "decode" and "extend" for keys of ``width`` elements, or "latent", made for 512 + 64.
    ``eight``: the cache has 8 bits an element. Widening a latent key takes registers, on NVIDIA those of half the rows,
    and on gfx942, which widens bit by bit, those of half the warps."""
    wide = ", wide" if kind != "latent" and width > _WIDE else ""
    narrow = ", eight" if kind == "latent" and rounded and eight else ""
    return _ATTENTION[architecture][f"{kind}{wide}{narrow}{'' if rounded else ', exact'}"]


def index_tile(architecture: str) -> AttentionTile:
    """The tile of the indexer's scores: ``rows`` queries one after the other over ``keys`` entries."""
    return AttentionTile(8, 32, 4 if architecture.startswith("gfx") else 8, 1)


def selected_tile(architecture: str, rounded: bool, eight: bool) -> AttentionTile:
    """The tile of latent attention over selected entries: addresses of their own take the registers of half the
    rows on NVIDIA. ``eight``: the cache has 8 bits an element."""
    if rounded and not architecture.startswith("gfx"):
        return AttentionTile(32, 32, 8, 2)
    return attention_tile("latent", architecture, _WIDE, rounded, eight)


@dataclass(frozen=True)
class LinearTile:
    """How a product with a weight is cut.

    Attributes:
        rows: tokens of a tile.
        columns: outputs of a tile.
        depth: inputs of a step of the loop, for dense weights; a quantised one takes a group a step.
        warps: of a block.
        stages: of the loop's pipeline.
        precision: of products of float32.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    precision: str = "ieee"


_MOST_ROWS: Mapping[str, int] = MappingProxyType(
    {"sm_80": 64, "sm_86": 64, "sm_90": 128, "sm_100": 128, "sm_120": 64, "gfx942": 64, "gfx950": 128}
)
_LINEAR_STAGES: Mapping[str, int] = MappingProxyType(
    {"sm_80": 3, "sm_86": 2, "sm_90": 3, "sm_100": 3, "sm_120": 2, "gfx942": 1, "gfx950": 2}
)
_FEW_ROWS = 32

_SPLIT_INPUTS = 512
"""Inputs that a split takes at least: fewer would not pay for the addition of the parts."""

_BLOCKS_OF_A_READ = 2
"""Blocks that a processor should have for the read of a weight, so that one loads while another multiplies."""


def linear_tile(architecture: str, tokens: int, weight: str, rounded: bool) -> LinearTile:
    """The tile of a product of ``tokens`` rows; ``weight`` is planes.Planes.burden.

    Few tokens are a read of the weight: narrow tiles make more blocks that read it at the same time. With many tokens
    the registers decide: what a step loads and widens besides the sums of a tile. Pairs of groups in 64 columns spill
    everywhere but on sm_90.
    """
    if not rounded:
        rows = row_blocks(tokens, _FEW_ROWS if weight in ("dense", "light") else 16)
        return LinearTile(rows, 32, 32, 4, 1, float32_products("linear", architecture))
    pairs, amd = weight == "pairs", architecture.startswith("gfx")
    rows = row_blocks(tokens, min(64, _MOST_ROWS[architecture]) if pairs else _MOST_ROWS[architecture])
    few = rows <= _FEW_ROWS
    wide = weight in ("dense", "light") or (weight == "float4" and _MOST_ROWS[architecture] == 128)
    columns = 32 if few or (pairs and architecture != "sm_90") else 128 if wide else 64
    stages = _LINEAR_STAGES[architecture] if weight == "dense" or few else 1
    warps = 8 if rows > 64 or (pairs and not few and not amd) else 4
    return LinearTile(rows, columns, 64, warps, stages)


def input_splits(tiles: int, tokens: int, inputs: int, processors: int) -> int:
    """How many parts a product of ``tokens`` rows in ``tiles`` blocks is cut into, along its inputs: enough for every
    processor to read its part of the weight, where few tokens make few blocks."""
    if tokens > _FEW_ROWS:
        return 1
    return best_split_count(tiles, inputs // _SPLIT_INPUTS, _BLOCKS_OF_A_READ * processors)


def float32_products(kind: str, architecture: str) -> str:
    """How products of float32 are made. On NVIDIA as three products of TF32, which keep 22 bits of each operand; but
    not over latents, where that takes more registers than there are, and not on AMD, whose matrix instructions take
    float32 as it is."""
    return "ieee" if kind == "latent" or architecture.startswith("gfx") else "tf32x3"


def row_blocks(rows: int, most: int) -> int:
    """Rows of a matrix tile for ``rows`` pairs of a token and a head: a power of two from 16 to ``most``."""
    return max(16, min(most, 1 << max(0, rows - 1).bit_length()))


@dataclass(frozen=True)
class DeltaTile:
    """How the gated delta rule is cut.

    Attributes:
        chunk: tokens whose updates are solved for at a time: 16, 32 or 64.
        values, walk_warps: columns of a state that a block takes through a row's chunks, and its warps.
        warps: of a block that pairs tokens, or solves a chunk.
        step_values, step_warps: of a block that goes token by token.
        precision: of products of float32.
    """

    chunk: int
    values: int
    walk_warps: int
    warps: int
    step_values: int
    step_warps: int
    precision: str


# Chunk, columns, warps through the chunks, warps that solve one. On NVIDIA three products of TF32 take operands twice.
_DELTA: Mapping[str, tuple[int, int, int, int]] = MappingProxyType(
    {
        "sm_80": (32, 16, 8, 8),
        "sm_86": (32, 16, 8, 8),
        "sm_90": (64, 16, 8, 8),
        "sm_100": (64, 32, 8, 8),
        "sm_120": (32, 16, 8, 8),
        "gfx942": (32, 32, 4, 4),
        "gfx950": (64, 32, 4, 4),
    }
)


def delta_tile(architecture: str) -> DeltaTile:
    """The tile of the rule, made for keys and values of 128 elements."""
    return DeltaTile(*_DELTA[architecture], 16, 2, float32_products("delta", architecture))
