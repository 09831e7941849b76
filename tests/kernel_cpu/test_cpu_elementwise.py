"""Norms, gated activations and scaled rows against the references, or PyTorch."""

import pytest
import torch

from tokenspeed_kernel.ops import (
    bind_fused_add_rms_norm,
    bind_gelu_tanh_and_mul,
    bind_rms_norm,
    bind_scale_rows,
    bind_silu_and_mul,
)

SHAPES = [(0, 64), (1, 576), (17, 37), (300, 64), (3, 1)]


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_rms(instruction_set: str, rows: int, size: int) -> None:
    x, weight = torch.randn(rows, size) * 3, torch.randn(size)
    bound = bind_rms_norm()
    assert bound.spec.name == "cpu_norm_rms"
    out, expected = torch.full((rows, size), torch.nan), torch.empty(rows, size)
    bound.fn(x, weight, 1e-5, out)
    bind_rms_norm(override="reference").fn(x, weight, 1e-5, expected)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=1e-6)
    for row in range(min(rows, 3)):
        alone = torch.empty(1, size)
        bound.fn(x[row : row + 1], weight, 1e-5, alone)
        assert torch.equal(alone[0], out[row])
    bound.fn(x, weight, 1e-5, x)
    assert torch.equal(x, out), "in place"


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_fused_add_rms(instruction_set: str, rows: int, size: int) -> None:
    x, residual, weight = torch.randn(rows, size), torch.randn(rows, size), torch.randn(size)
    bound = bind_fused_add_rms_norm()
    assert bound.spec.name == "cpu_norm_fused_add_rms"
    out, expected = torch.full((rows, size), torch.nan), torch.empty(rows, size)
    expected_residual = residual.clone()
    bind_fused_add_rms_norm(override="reference").fn(x, expected_residual, weight, 1e-5, expected)
    bound.fn(x, residual, weight, 1e-5, out)
    assert torch.equal(residual, expected_residual)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_silu_and_mul(instruction_set: str, rows: int, size: int) -> None:
    both = torch.randn(rows, 2 * size) * 4
    gate, up = both[:, :size], both[:, size:]
    bound = bind_silu_and_mul()
    assert bound.spec.name == "cpu_activation_silu_and_mul"
    out, expected = torch.full((rows, size), torch.nan), torch.empty(rows, size)
    bound.fn(gate, up, out)
    bind_silu_and_mul(override="reference").fn(gate, up, expected)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)


def test_silu_at_its_ends(instruction_set: str) -> None:
    gate = torch.tensor([[-torch.inf, -1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30, torch.inf, torch.nan]])
    out = torch.empty_like(gate)
    bind_silu_and_mul().fn(gate, torch.ones_like(gate), out)
    finite = torch.nn.functional.silu(gate[:, 1:10])
    torch.testing.assert_close(out[:, 1:10], finite, rtol=1e-6, atol=1e-30)
    assert out[0, 10].isnan()


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_gelu_tanh_and_mul(instruction_set: str, rows: int, size: int) -> None:
    both = torch.randn(rows, 2 * size) * 3
    bound = bind_gelu_tanh_and_mul()
    assert bound.spec.name == "cpu_activation_gelu_tanh_and_mul"
    out = torch.full((rows, size), torch.nan)
    bound.fn(both[:, :size], both[:, size:], out)
    gelu = torch.nn.functional.gelu(both[:, :size].double(), approximate="tanh")
    torch.testing.assert_close(out, (gelu * both[:, size:]).float(), rtol=1e-5, atol=1e-7)


def test_gelu_at_its_ends(instruction_set: str) -> None:
    gate = torch.tensor([[-1e30, -200.0, -0.0, 0.0, 88.0, 1e30, torch.inf, torch.nan]])
    out = torch.empty_like(gate)
    bind_gelu_tanh_and_mul().fn(gate, torch.ones_like(gate), out)
    assert out[0, :7].tolist() == [0.0, 0.0, 0.0, 0.0, 88.0, gate[0, 5].item(), torch.inf]
    assert out[0, 7].isnan()


def test_rows_are_scaled_by_one_number_or_by_their_own(instruction_set: str) -> None:
    bound = bind_scale_rows()
    assert bound.spec.name == "cpu_activation_scale_rows"
    x, factors = torch.randn(5, 67), torch.randn(9)
    out = torch.empty_like(x)
    bound.fn(x, factors, None, out)
    assert torch.equal(out, x * factors[0])
    places = torch.tensor([8, 0, 3, 3, 1], dtype=torch.int32)
    expected = x * factors[places.long()].unsqueeze(1)
    bound.fn(x, factors, places, x)
    assert torch.equal(x, expected)


def test_exponential_is_accurate(instruction_set: str) -> None:
    """silu(x) * (1 / x) = 1 / (1 + exp(-x)): over the negative axis this is exp itself, to a few ulp."""
    x = torch.linspace(-80, -20, 20011).reshape(1, -1)
    out = torch.empty_like(x)
    bind_silu_and_mul().fn(x, torch.ones_like(x), out)
    expected = x.double() * torch.exp(x.double())
    assert ((out.double() - expected) / expected).abs().max() < 3e-7
