"""Integers packed into GGUF's blocks come out as they went in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.recipes.weight_scheme import BLOCKS
from tokenspeed_kernel.gguf_blocks import BLOCK_BYTES, BLOCK_ELEMENTS, dequantize_blocks
from tokenspeed_kernel.gguf_packing import PACKED_FORMATS, pack_blocks
from tokenspeed_kernel.numerics.float_blocks import FLOAT_BLOCKS


def _random(
    format_name: str, rows: int, blocks: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Integers [rows, blocks * 32], scales and minimums [rows, blocks] of every size that float16 has."""
    generator = torch.Generator().manual_seed(seed)

    def halves() -> torch.Tensor:
        bits = torch.randint(-(1 << 15), 1 << 15, (rows, blocks), generator=generator).to(torch.int16)
        return torch.where(bits & 0x7C00 == 0x7C00, bits & ~0x4000, bits).to(torch.int16).view(torch.float16)

    low, high = (-128, 128) if format_name == "gguf_q8_0" else (0, 16)
    quants = torch.randint(low, high, (rows, blocks * 32), generator=generator)
    quants = quants.to(torch.int8 if format_name == "gguf_q8_0" else torch.uint8)
    return quants, halves(), halves() if format_name == "gguf_q4_1" else None


@pytest.mark.parametrize("format_name", PACKED_FORMATS)
@given(rows=st.integers(0, 5), blocks=st.integers(1, 4), seed=st.integers(0, 1 << 30))
@settings(max_examples=20, deadline=None)
def test_what_is_packed_comes_out(format_name: str, rows: int, blocks: int, seed: int) -> None:
    quants, scales, minimums = _random(format_name, rows, blocks, seed)
    packed = pack_blocks(format_name, quants, scales, minimums)
    wide = [values.float().repeat_interleave(32, dim=1) for values in (scales, minimums) if values is not None]
    offset = wide[1] if minimums is not None else 0.0
    expected = wide[0] * (quants.float() - (8.0 if format_name == "gguf_q4_0" else 0.0)) + offset
    assert torch.equal(dequantize_blocks(format_name, packed), expected)


def test_a_view_is_filled_and_nothing_beside_it() -> None:
    quants, scales, _ = _random("gguf_q8_0", 3, 2, 0)
    around = torch.full((5, 68), 7, dtype=torch.uint8)
    pack_blocks("gguf_q8_0", quants, scales, out=around[1:4])
    assert torch.equal(around[1:4], pack_blocks("gguf_q8_0", quants, scales))
    assert bool((around[[0, 4]] == 7).all())


def test_the_plan_knows_the_same_blocks() -> None:
    kernels = {name: (BLOCK_ELEMENTS[name], BLOCK_BYTES[name]) for name in (*PACKED_FORMATS, *FLOAT_BLOCKS)}
    assert kernels == BLOCKS


def test_what_does_not_fit_is_refused() -> None:
    quants, scales = torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.float16)
    with pytest.raises(ValueError, match="'gguf_q4_k' cannot be packed"):
        pack_blocks("gguf_q4_k", quants, scales)
    with pytest.raises(ValueError, match=r"quants must be torch\.int8"):
        pack_blocks("gguf_q8_0", quants, scales)
    with pytest.raises(ValueError, match="33 columns do not divide"):
        pack_blocks("gguf_q4_0", torch.zeros(2, 33, dtype=torch.uint8), scales)
    with pytest.raises(ValueError, match="minimums belong to gguf_q4_1"):
        pack_blocks("gguf_q4_0", quants, scales, scales)
    with pytest.raises(ValueError, match=r"scales must be float16 \[2, 2\], got torch\.float32"):
        pack_blocks("gguf_q4_0", quants, scales.float())
    with pytest.raises(ValueError, match=r"out must be uint8 \[2, 36\]"):
        pack_blocks("gguf_q4_0", quants, scales, out=torch.zeros(2, 40, dtype=torch.uint8))
