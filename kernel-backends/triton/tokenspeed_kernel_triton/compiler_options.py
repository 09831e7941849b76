"""What a vendor's compiler is told beside warps and stages, chosen by what it makes of it; nothing here was timed.

AMD's decides between matrix instructions of 16 and of 32 rows by the tile, and on gfx942 reads one operand of a product
at a time from LDS. ``kpack`` 2 has it read two: with Triton 3.9 a decode over float8 latents takes 392 registers
instead of 407, one of grouped queries over bfloat16 92 instead of 114. Over float8, whose bits are widened one by one,
the latter takes 167 instead of 92, so it is not told. Instructions of 16 rows take a chunk of grouped queries from 157
registers to 126, which is one wave more, and everything else to more registers. On gfx950 the compiler's own choice is
never worse by more than a register or two, and there is nothing to pack.

NVIDIA's compiler is told nothing: its tensor cores have one shape for each tile.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_FOR_ALL: Mapping[str, Mapping[str, int]] = MappingProxyType({"gfx942": {"kpack": 2}})
_FOR_CHUNKS: Mapping[str, Mapping[str, int]] = MappingProxyType({"gfx942": {"matrix_instr_nonkdim": 16}})
"""Attention of rows with queries of their own number, over keys and values apart."""


def compiler_options(
    architecture: str, function: str, constants: Mapping[str, Any], byte_cache: bool = False
) -> dict[str, int]:
    """The options for a kernel compiled with these constants; empty for most. ``byte_cache``: of attention, that it
    takes e4m3 by their bits."""
    grouped = function == "attend" and not constants.get("LATENT")
    chunk = grouped and bool(constants.get("RAGGED"))
    if grouped and byte_cache and not chunk:
        return {}
    return {**_FOR_ALL.get(architecture, {}), **(_FOR_CHUNKS.get(architecture, {}) if chunk else {})}
