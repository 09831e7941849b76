"""Latent attention with expanded keys and values: the absorbed form's numbers, and mistakes that its cases notice."""

import dataclasses

import pytest
import torch

from tokenspeed_kernel.numerics import verify_kernel
from tokenspeed_kernel.ops.gemm import make_reference_head_linear
from tokenspeed_kernel.ops.mla import reference_mla_extend
from tokenspeed_kernel.ops.mla_expanded import (
    bind_mla_extend_expanded,
    expanded_signature,
    make_reference_mla_extend_expanded,
)
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.registry import Band, RegisteredKernel, global_registry, use_registry
from tokenspeed_kernel.signature import BFLOAT16, FLOAT32

HEADS, PLAIN, LATENT, ROTARY, VALUE, PAGE = 4, 12, 32, 8, 10, 4


def lens(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_expanded_is_the_absorbed_form_in_another_order():
    """Two rows, one behind a prefix, against absorbing the queries and taking the output to the values."""
    generator = torch.Generator().manual_seed(4)
    cache = torch.randn(9, 1, PAGE, LATENT + ROTARY, generator=generator)
    cache[0] = torch.nan
    table = torch.tensor([[3, 1, 7, 2], [8, 5, 6, 4]], dtype=torch.int32)
    up = torch.randn(HEADS, PLAIN + VALUE, LATENT, generator=generator) / LATENT**0.5
    q = torch.randn(11, HEADS, PLAIN + ROTARY, generator=generator)
    starts, lengths, scale = lens(0, 6, 11), lens(6, 15), 0.25
    to_latent = QuantizedTensor.from_dense(up[:, :PLAIN].transpose(1, 2).reshape(-1, PLAIN).contiguous(), "keys")
    weight = QuantizedTensor.from_dense(up.reshape(-1, LATENT), "up")
    q_latent, attended = torch.empty(2, 11, HEADS, LATENT)
    expected, found = torch.empty(2, 11, HEADS, VALUE)
    make_reference_head_linear(to_latent, HEADS, 0)(q[..., :PLAIN], q_latent)
    reference_mla_extend(q_latent, q[..., PLAIN:], cache, table, starts, lengths, scale, attended)
    make_reference_head_linear(weight, HEADS, PLAIN)(attended, expected)
    bound = bind_mla_extend_expanded(
        weight, HEADS, rotary_dim=ROTARY, plain_dim=PLAIN, kernel_page_size=PAGE, kv_dtype=torch.float32,
        override="reference",
    )  # fmt: skip
    assert bound is not None
    bound(q, cache, table, starts, lengths, scale, found)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "plain"), [(5, PLAIN), (0, PLAIN), (HEADS, PLAIN + VALUE)])
def test_rows_that_are_no_heads_are_refused(heads, plain):
    weight = QuantizedTensor.from_dense(torch.zeros(HEADS * (PLAIN + VALUE), LATENT), "layer 3 up")
    with pytest.raises(ValueError, match=rf"layer 3 up: 88 rows are not {heads} heads of {plain} rows for a key"):
        bind_mla_extend_expanded(
            weight, heads, rotary_dim=ROTARY, plain_dim=plain, kernel_page_size=PAGE, kv_dtype=torch.float32
        )


def test_a_caller_may_do_without_the_reference(reference_registry):
    weight = QuantizedTensor.from_dense(torch.zeros(HEADS * (PLAIN + VALUE), LATENT), "up")
    sizes = {"rotary_dim": ROTARY, "plain_dim": PLAIN, "kernel_page_size": PAGE, "kv_dtype": torch.float32}
    with use_registry(reference_registry):
        assert bind_mla_extend_expanded(weight, HEADS, **sizes, reference=False) is None
        for more in ({}, {"reference": False, "override": "reference"}):
            assert bind_mla_extend_expanded(weight, HEADS, **sizes, **more).spec.band is Band.REFERENCE


def make_with_values_before_keys(weight, heads):
    rows = torch.arange(weight.shape[0]).view(heads, -1)
    plain = {256: 128, 28: 16, 44: 24, 12: 5, 19: 10}[rows.shape[1]]
    return make_reference_mla_extend_expanded(weight.select_rows(rows.roll(-plain, 1).reshape(-1)), heads)


def make_without_the_rotated_part(weight, heads):
    exact = make_reference_mla_extend_expanded(weight, heads)

    def run(q, cache, *more):
        q = q.clone()
        q[..., q.shape[2] - (cache.shape[3] - weight.shape[1]) :] = 0.0
        exact(q, cache, *more)

    return run


def make_that_forgets_the_prefix(weight, heads):
    exact = make_reference_mla_extend_expanded(weight, heads)
    return lambda q, cache, table, starts, lengths, scale, out: exact(
        q, cache, table, starts, torch.minimum(lengths, starts.diff()), scale, out
    )


def make_that_sees_one_key_beyond(weight, heads):
    """By a later query of the same row that stands where the first one does."""
    exact = make_reference_mla_extend_expanded(weight, heads)

    def run(q, cache, table, starts, lengths, scale, out):
        exact(q, cache, table, starts, lengths, scale, out)
        for row, (first, last) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            if last - first > 1 and lengths[row] >= last - first:
                shifted = torch.cat([q[first:first], q[first : last - 1]])
                there = torch.empty(last - first - 1, *out.shape[1:])
                exact(
                    shifted,
                    cache,
                    table[row : row + 1],
                    lens(0, last - first - 1),
                    lengths[row : row + 1],
                    scale,
                    there,
                )
                out[first : last - 1] = there

    return run


@pytest.mark.parametrize(
    "make",
    [
        make_with_values_before_keys,
        make_without_the_rotated_part,
        make_that_forgets_the_prefix,
        make_that_sees_one_key_beyond,
    ],
)
def test_a_mistake_is_caught(make):
    spec = global_registry().reference("attention", "mla_extend_expanded").spec
    few = frozenset({expanded_signature(FLOAT32, FLOAT32), expanded_signature(BFLOAT16, BFLOAT16)})
    wrong = dataclasses.replace(spec, name="wrong", solution="wrong", band=Band.PLUGIN, signatures=few)
    report = verify_kernel(RegisteredKernel(wrong, make, "test"), global_registry())
    lines = [line for failure in report.failures for line in failure.details]
    assert "elements wrong" in "\n".join(lines)
    assert not any("raised" in line for line in lines), lines
