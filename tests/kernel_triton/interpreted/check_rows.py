"""Norms, activations, rotary and prologues by Triton's interpreter against the references: odd and strided rows, in
place, padded slots, partial and interleaved rotary."""

import pytest
import torch

from tokenspeed_kernel.ops.activation import reference_clamped_swiglu, reference_silu_and_mul
from tokenspeed_kernel.ops.attention import reference_gqa_prologue
from tokenspeed_kernel.ops.gating import reference_sigmoid_gate
from tokenspeed_kernel.ops.mla import reference_mla_prologue
from tokenspeed_kernel.ops.norm import reference_fused_add_rms, reference_rms
from tokenspeed_kernel.ops.rotary import reference_apply
from tokenspeed_kernel_triton import elementwise, rotary


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20261130)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("width", [1, 37, 64])
def test_norms_in_place_and_of_a_sum(width):
    x, residual, weight = torch.randn(3, width), torch.randn(3, width), torch.randn(width)
    expected = torch.empty_like(x)
    reference_rms(x, weight, 1e-5, expected)
    found = x.clone()
    elementwise.rms(found, weight, 1e-5, found)
    close(found, expected)
    summed = residual.clone()
    reference_fused_add_rms(x, summed, weight, 1e-5, expected)
    elementwise.fused_add_rms(x, residual, weight, 1e-5, found)
    close(found, expected)
    assert torch.equal(residual, summed)


def test_a_row_that_is_too_wide_to_hold_is_refused():
    wide = torch.empty(1, elementwise.MAX_WIDTH + 1)
    with pytest.raises(ValueError, match="rows of 65537 elements are too wide"):
        elementwise.rms(wide, wide[0], 1e-5, wide)


def test_activations_of_strided_halves():
    both = torch.randn(3, 2 * 1030) * 20.0
    gate, up, out, expected = both[:, :1030], both[:, 1030:], *torch.empty(2, 3, 1030)
    reference_silu_and_mul(gate, up, expected)
    elementwise.silu_and_mul(gate, up, out)
    close(out, expected)
    reference_clamped_swiglu(gate, up, 1.7, 7.0, expected)
    elementwise.clamped_swiglu(gate, up, 1.7, 7.0, out)
    close(out, expected)


def test_one_gate_for_several_elements():
    x, gate, expected = torch.randn(2, 12), torch.randn(2, 9)[:, :3], torch.empty(2, 12)
    reference_sigmoid_gate(x, gate, expected)
    elementwise.sigmoid_gate(x, gate, x)
    close(x, expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_over_three_axes_leaves_the_rest_alone(interleaved):
    whole = torch.randn(4, 3, 14)
    found = whole.clone()
    positions = torch.tensor([[0, 5, 9, 1], [3, 3, 3, 3], [8, 0, 2, 7]], dtype=torch.int32)
    axes, cos_sin = torch.tensor([0, 2, 1], dtype=torch.int32), torch.randn(10, 6)
    reference_apply(whole[..., 2:], positions, axes, cos_sin, interleaved)
    rotary.apply(found[..., 2:], positions, axes, cos_sin, interleaved)
    close(found, whole)
    assert torch.equal(found[..., 8:], whole[..., 8:]) and torch.equal(found[..., :2], whole[..., :2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "turned", "normed"), [(16, 16, True), (20, 12, False), (20, 12, True)])
def test_the_prologue_writes_slots_and_the_null_block(dtype, width, turned, normed):
    """A token of padding (slot -1) changes the null block and nothing else."""
    tokens, page = 3, 4
    qkv = torch.randn(tokens, 4 + 2 + 2, width)
    caches = torch.zeros(2, 2, 5, 2, page, width, dtype=dtype)
    positions, slots = torch.tensor([0, 7, 3], dtype=torch.int32), torch.tensor([9, -1, 19])
    cos_sin, norms = torch.randn(8, turned), (torch.randn(width), torch.randn(width)) if normed else (None, None)
    results = []
    for fn, cache in ((reference_gqa_prologue, caches[0]), (rotary.gqa_prologue, caches[1])):
        own = qkv.clone()
        fn(own[:, :4], own[:, 4:6], own[:, 6:], positions, cos_sin, *norms, 1e-5, cache[0], cache[1], slots)
        results.append(own[:, :4])
    close(results[1], results[0])
    torch.testing.assert_close(
        caches[1][:, 1:].float(), caches[0][:, 1:].float(), rtol=2e-6 if dtype is torch.float32 else 8e-3, atol=1e-5
    )
    assert bool(caches[1][:, 0].any())
    assert not caches[1][:, 1].any() and not caches[1][:, 3].any()


def test_the_latent_prologue():
    q, compressed = torch.randn(3, 5, 14), torch.randn(3, 20)
    caches, norm, cos_sin = torch.zeros(2, 4, 1, 2, 20), torch.randn(14), torch.randn(9, 6)
    positions, slots = torch.tensor([8, 0, 2], dtype=torch.int32), torch.tensor([3, -5, 6])
    found = []
    for fn, cache in ((reference_mla_prologue, caches[0]), (rotary.mla_prologue, caches[1])):
        own = q.clone()
        fn(own, compressed.clone(), positions, cos_sin, norm, 1e-6, cache, slots)
        found.append(own)
    close(found[1], found[0])
    close(caches[1], caches[0])
    assert torch.equal(found[1][..., :8], q[..., :8])


def test_calls_without_rows_launch_nothing():
    nothing = torch.empty(0, 8)
    elementwise.rms(nothing, torch.ones(8), 1e-5, nothing)
    elementwise.silu_and_mul(nothing, nothing, nothing)
    elementwise.add(nothing, nothing)
    rotary.apply(torch.empty(0, 2, 8), torch.empty(1, 0, dtype=torch.int32), None, torch.empty(4, 8), False)
