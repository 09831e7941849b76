"""Floats of four and eight bits: what checkpoints hold goes into blocks and comes out unchanged, against tables written
out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_kernel.float_packing import pack_fp8, pack_mxfp4, pack_nvfp4
from tokenspeed_kernel.gguf_blocks import dequantize_blocks
from tokenspeed_kernel.numerics.weights import random_weight

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def nibbles_of(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@given(rows=st.integers(0, 5), blocks=st.integers(1, 4), seed=st.integers(0, 1 << 30))
@settings(max_examples=20, deadline=None)
def test_mxfp4_comes_out_as_it_went_in(rows: int, blocks: int, seed: int) -> None:
    nibbles = nibbles_of(rows, 32 * blocks, seed)
    exponents = torch.randint(20, 230, (rows, blocks), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    values = torch.exp2(exponents.double() - 127).repeat_interleave(32, dim=1) * E2M1[nibbles.int()].double()
    assert torch.equal(dequantize_blocks("gguf_mxfp4", pack_mxfp4(nibbles, exponents)).double(), values)


@given(rows=st.integers(0, 5), blocks=st.integers(1, 3), seed=st.integers(0, 1 << 30))
@settings(max_examples=20, deadline=None)
def test_nvfp4_comes_out_as_it_went_in(rows: int, blocks: int, seed: int) -> None:
    """Within the three roundings of float32 that an element takes at most."""
    nibbles = nibbles_of(rows, 64 * blocks, seed)
    scales = (torch.rand(rows, 4 * blocks, generator=torch.Generator().manual_seed(seed)) * 448).to(torch.float8_e4m3fn)
    whole = torch.tensor([0.0123])
    packed = pack_nvfp4(nibbles, scales.view(torch.uint8), whole)
    values = scales.double().repeat_interleave(16, dim=1) * E2M1[nibbles.int()].double() * whole.double()
    moved = (dequantize_blocks("nvfp4", packed).double() - values).abs()
    assert bool((moved <= 2.0**-23 * values.abs()).all())


@given(rows=st.integers(0, 4), blocks=st.integers(1, 3), seed=st.integers(0, 1 << 30))
@settings(max_examples=20, deadline=None)
def test_fp8_comes_out_as_it_went_in(rows: int, blocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    elements = (torch.randn(rows, 128 * blocks, generator=generator) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(rows, blocks, generator=generator)
    values = elements.float() * scales.repeat_interleave(128, dim=1)
    assert torch.equal(dequantize_blocks("fp8_blocks", pack_fp8(elements, scales)), values)


def test_a_nan_in_fp8_makes_its_block_nan() -> None:
    elements = torch.ones(2, 256).to(torch.float8_e4m3fn)
    elements[1, 200] = torch.nan
    values = dequantize_blocks("fp8_blocks", pack_fp8(elements, torch.ones(2, 2)))
    assert values.isnan().nonzero().tolist() == [[1, column] for column in range(128, 256)]


def test_a_view_is_filled_and_nothing_beside_it() -> None:
    nibbles, exponents = nibbles_of(3, 64, 1), torch.full((3, 2), 120, dtype=torch.uint8)
    around = torch.full((5, 34), 7, dtype=torch.uint8)
    pack_mxfp4(nibbles, exponents, out=around[1:4])
    assert torch.equal(around[1:4], pack_mxfp4(nibbles, exponents))
    assert bool((around[[0, 4]] == 7).all())


def test_a_scale_that_is_no_number_makes_its_block_none() -> None:
    packed = pack_mxfp4(nibbles_of(1, 64, 1), torch.tensor([[255, 127]], dtype=torch.uint8))
    values = dequantize_blocks("gguf_mxfp4", packed)
    assert bool(values[0, :32].isnan().all())
    assert bool(values[0, 32:].isfinite().all())


@pytest.mark.parametrize("format_name", ["gguf_mxfp4", "nvfp4", "fp8_blocks"])
def test_the_random_blocks_of_the_numeric_cases_hold_the_values_they_claim(format_name: str) -> None:
    made = random_weight(format_name, 6, 128, torch.Generator().manual_seed(3))
    assert torch.equal(made.weight.dequantize().double(), made.values)
    assert 0.01 < float(made.values.abs().mean()) < 1.0


def test_what_does_not_fit_is_refused() -> None:
    nibbles, bytes_of_two = torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"gguf_mxfp4: nibbles must be uint8 \[N, K\] with K a multiple of 32"):
        pack_mxfp4(nibbles[:, :33], bytes_of_two)
    with pytest.raises(ValueError, match=r"gguf_mxfp4: the scales' bytes must be uint8 \[2, 2\]"):
        pack_mxfp4(nibbles, bytes_of_two[:, :1])
    with pytest.raises(ValueError, match=r"nvfp4: the scales' bytes must be uint8 \[2, 4\], got torch\.uint8 \[2, 2\]"):
        pack_nvfp4(nibbles, bytes_of_two, torch.ones(1))
    with pytest.raises(ValueError, match="nvfp4: the scale of all must be one float32"):
        pack_nvfp4(nibbles, torch.zeros(2, 4, dtype=torch.uint8), torch.ones(2))
    with pytest.raises(ValueError, match=r"out must be uint8 \[2, 34\]"):
        pack_mxfp4(nibbles, bytes_of_two, out=torch.zeros(2, 40, dtype=torch.uint8))
    with pytest.raises(ValueError, match="fp8_blocks: elements must be float8_e4m3fn"):
        pack_fp8(torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"fp8_blocks: scales must be float32 \[2, 1\]"):
        pack_fp8(torch.zeros(2, 128).to(torch.float8_e4m3fn), torch.ones(2, 2))
