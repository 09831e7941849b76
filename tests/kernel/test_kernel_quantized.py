"""Weights: GGUF blocks against the gguf package, and slices that keep every value."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_kernel.gguf_blocks import BLOCK_BYTES, BLOCK_ELEMENTS
from tokenspeed_kernel.numerics.k_quants import random_blocks
from tokenspeed_kernel.numerics.weights import random_weight
from tokenspeed_kernel.quantized import QuantizedTensor, WeightError
from tokenspeed_kernel.signature import WEIGHT_FORMATS

OWN = ("nvfp4", "fp8_blocks")
GGUF_TYPES = {
    name: gguf.GGMLQuantizationType[name.removeprefix("gguf_").upper()] for name in BLOCK_BYTES if name not in OWN
}
K_FORMATS = [name for name in sorted(GGUF_TYPES) if name.endswith("_k")]
HALVES = {"gguf_q2_k": (80, 82), "gguf_q3_k": (108,), "gguf_q6_k": (208,), "gguf_mxfp4": ()}
"""The bytes at which a block's float16 numbers begin, where it is not 0 and 2."""
FORMATS = sorted(WEIGHT_FORMATS)


def random_bytes(format_name, rows, blocks, seed=1):
    """Blocks of any bytes with finite float16 numbers, uint8 [rows, blocks * block bytes]."""
    generator = np.random.default_rng(seed)
    plane = generator.integers(0, 256, (rows, blocks, BLOCK_BYTES[format_name]), dtype=np.uint8)
    if format_name == "gguf_mxfp4":
        plane[..., 0] %= 250  # what follows is infinite; 255 is no number here, and in GGUF the next power of two
    for start in HALVES.get(format_name, (0, 2)):
        plane[..., start : start + 2] = generator.standard_normal((rows, blocks, 1)).astype(np.float16).view(np.uint8)
    return plane.reshape(rows, -1)


def make_weight(format_name, rows, columns, seed=0):
    """Random values, quantised by the gguf package where it can write the format, else random bytes."""
    values = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
    if format_name in OWN:
        return random_weight(format_name, rows, columns, torch.Generator().manual_seed(seed)).weight
    if format_name not in GGUF_TYPES:
        dtype = getattr(torch, format_name)
        return QuantizedTensor.from_dense(torch.from_numpy(values).to(dtype), "a test")
    if format_name in K_FORMATS:
        plane = torch.from_numpy(random_bytes(format_name, rows, columns // 256, seed))
        return QuantizedTensor(format_name, (rows, columns), {"blocks": plane}, "a test")
    blocks = gguf.quantize(values, GGUF_TYPES[format_name])
    return QuantizedTensor(format_name, (rows, columns), {"blocks": torch.from_numpy(blocks)}, "a test")


@pytest.mark.parametrize("format_name", sorted(GGUF_TYPES))
def test_dequantised_blocks_equal_the_gguf_package_bit_by_bit(format_name):
    elements = BLOCK_ELEMENTS[format_name]
    weight = make_weight(format_name, 37, 5 * elements)
    expected = gguf.dequantize(weight.plane.numpy(), GGUF_TYPES[format_name])
    assert torch.equal(weight.dequantize(), torch.from_numpy(expected))
    assert weight.dequantize(torch.bfloat16).dtype == torch.bfloat16
    assert weight.nbytes == 37 * 5 * BLOCK_BYTES[format_name]
    assert weight.block_elements == elements == gguf.GGML_QUANT_SIZES[GGUF_TYPES[format_name]][0]


@pytest.mark.parametrize("format_name", sorted(GGUF_TYPES))
def test_any_bytes_that_hold_finite_scales_dequantise_as_gguf_does(format_name):
    plane = random_bytes(format_name, 40, 3)
    shape = (40, 3 * BLOCK_ELEMENTS[format_name])
    weight = QuantizedTensor(format_name, shape, {"blocks": torch.from_numpy(plane)}, "random bytes")
    expected = torch.from_numpy(gguf.dequantize(plane, GGUF_TYPES[format_name]))
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("format_name", K_FORMATS)
def test_the_random_blocks_of_the_numeric_cases_hold_the_values_they_claim(format_name):
    made = random_blocks(format_name, 6, 2, 1.0, torch.Generator().manual_seed(3))
    decoded = gguf.dequantize(made.plane.reshape(6, -1).numpy(), GGUF_TYPES[format_name])
    values = made.values.reshape(6, 512)
    assert torch.equal(torch.from_numpy(decoded), values.float())
    assert bool((made.magnitude.reshape(6, 512) >= values.abs()).all())
    assert 0.01 < float(values.abs().mean()) < 1.0


@settings(max_examples=40, deadline=None)
@given(
    format_name=st.sampled_from(FORMATS),
    rows=st.integers(1, 12),
    blocks=st.integers(1, 5),
    data=st.data(),
)
def test_slices_hold_the_values_of_the_whole(format_name, rows, blocks, data):
    elements = BLOCK_ELEMENTS.get(format_name, 32)
    weight = make_weight(format_name, rows, blocks * elements)
    whole = weight.dequantize()
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    part = weight.rows(start, stop)
    assert torch.equal(part.dequantize(), whole[start:stop])
    assert part.plane.untyped_storage().data_ptr() == weight.plane.untyped_storage().data_ptr()
    index = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), max_size=8)), dtype=torch.int64)
    assert torch.equal(weight.select_rows(index).dequantize(), whole[index])
    first = data.draw(st.integers(0, blocks - 1)) * elements
    last = data.draw(st.integers(first // elements + 1, blocks)) * elements
    columns = weight.columns(first, last)
    assert torch.equal(columns.dequantize(), whole[:, first:last])
    joined = QuantizedTensor.concat([part, weight, weight.select_rows(index)])
    assert torch.equal(joined.dequantize(), torch.cat([whole[start:stop], whole, whole[index]]))
    assert joined.nbytes == part.nbytes + weight.nbytes + weight.select_rows(index).nbytes


def test_dense_columns_may_be_cut_anywhere():
    weight = make_weight("bfloat16", 3, 40)
    assert torch.equal(weight.columns(3, 7).dequantize(), weight.dequantize()[:, 3:7])


def test_a_read_only_plane_is_used_in_place(tmp_path):
    weight = make_weight("gguf_q4_1", 4, 64)
    path = tmp_path / "blocks.bin"
    path.write_bytes(weight.plane.numpy().tobytes())
    mapped = np.memmap(path, dtype=np.uint8, mode="r").reshape(4, 40)
    with pytest.warns(UserWarning, match="not writable"):
        plane = torch.from_numpy(mapped)
    again = QuantizedTensor("gguf_q4_1", (4, 64), {"blocks": plane}, str(path))
    assert again.rows(1, 3).plane.data_ptr() == mapped.ctypes.data + 40
    assert torch.equal(again.dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: QuantizedTensor("gguf_q9", (1, 32), {}, "f.gguf: w"), "f.gguf: w: format 'gguf_q9' is unknown"),
        (
            lambda: QuantizedTensor("gguf_q4_1", (1, 33), {"blocks": torch.zeros(1, 20, dtype=torch.uint8)}, "w"),
            "33 columns do not divide into gguf_q4_1 blocks of 32",
        ),
        (
            lambda: QuantizedTensor("gguf_q4_1", (2, 32), {"blocks": torch.zeros(2, 18, dtype=torch.uint8)}, "w"),
            r"must be torch.uint8 \[2, 20\], got torch.uint8 \[2, 18\]",
        ),
        (lambda: QuantizedTensor("float32", (2, 3), {"data": torch.zeros(3, 3)}, "w"), r"\[2, 3\], got .* \[3, 3\]"),
        (lambda: QuantizedTensor("float32", (2, 3), {"blocks": torch.zeros(2, 3)}, "w"), "one plane 'data'"),
        (lambda: QuantizedTensor("float32", (3, 2), {"data": torch.zeros(2, 3).T}, "w"), "is not contiguous"),
        (lambda: QuantizedTensor("float32", (-1, 0), {"data": torch.zeros(1, 1)}, "w"), "must be .rows >= 0"),
        (lambda: QuantizedTensor.from_dense(torch.zeros(2, 2, dtype=torch.int64), "w"), "is not a matrix of"),
        (lambda: make_weight("float32", 4, 32).rows(2, 5), "a test: rows 2 to 5 of a weight with 4 rows"),
        (lambda: make_weight("float32", 4, 32).columns(8, 40), "columns 8 to 40 of a weight with 32 columns"),
        (lambda: make_weight("gguf_q8_0", 4, 64).columns(16, 48), "would cut a gguf_q8_0 block; use multiples of 32"),
        (
            lambda: make_weight("gguf_q4_k", 4, 512).columns(32, 288),
            "would cut a gguf_q4_k block; use multiples of 256",
        ),
        (
            lambda: make_weight("float32", 4, 32).select_rows(torch.tensor([4])),
            "but there are rows 0 to 3",
        ),
        (lambda: make_weight("float32", 4, 32).select_rows(torch.tensor([1.0])), "1-dimensional int32 or int64"),
        (lambda: QuantizedTensor.concat([]), "give at least one"),
        (
            lambda: QuantizedTensor.concat([make_weight("float32", 4, 32), make_weight("float32", 4, 64)]),
            "formats and widths must be equal",
        ),
        (
            lambda: QuantizedTensor.concat([make_weight("float32", 4, 32), make_weight("float16", 4, 32)]),
            "formats and widths must be equal",
        ),
    ],
)
def test_a_weight_that_does_not_fit_says_which_and_why(build, message):
    with pytest.raises(WeightError, match=message):
        build()
