"""What a vendor's compiler is told beside warps and stages, chosen by what it makes of it; nothing here was timed.

AMD's decides between matrix instructions of 16 and of 32 rows by the tile, and on gfx942 reads one operand of a product
at a time from LDS. ``kpack`` 2 has it read two: with Triton 3.9 a decode over float8 latents spills 44 bytes a thread
instead of 100, one of grouped queries takes 92 registers instead of 114. Instructions of 16 rows take a chunk of
grouped queries from 157 registers to 126, which is one wave more, and everything else to more registers. On gfx950 the
compiler's own choice is never worse by more than a register or two, and there is nothing to pack.

NVIDIA's compiler is told nothing: its tensor cores have one shape for each tile.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_FOR_ALL: Mapping[str, Mapping[str, int]] = MappingProxyType({"gfx942": {"kpack": 2}})
_FOR_CHUNKS: Mapping[str, Mapping[str, int]] = MappingProxyType({"gfx942": {"matrix_instr_nonkdim": 16}})
"""Attention of rows with queries of their own number, over keys and values apart."""


def compiler_options(architecture: str, function: str, constants: Mapping[str, Any]) -> dict[str, int]:
    """The options for a kernel compiled with these constants; empty for most."""
    chunk = function == "attend" and bool(constants.get("RAGGED")) and not constants.get("LATENT")
    return {**_FOR_ALL.get(architecture, {}), **(_FOR_CHUNKS.get(architecture, {}) if chunk else {})}
