"""Workloads of layers with a state: a row with a token and its state in decode, a chunk of one row in prefill."""

import torch

from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.standard_workloads import ROWS, WIDTH
from tokenspeed_kernel.workloads import Traits, Work, Workload, register_workload

CHANNELS = 8192
HEADS, HEAD_DIM = 32, 128

_FLOAT_BYTES = 4


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _one_row(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Starts, sources and targets of a row that goes on in its block."""
    block = torch.ones(1, dtype=torch.int32)
    return torch.tensor([0, tokens], dtype=torch.int32), block, block.clone()


def _conv_work(_signature: FormatSignature, traits: Traits, phase: str) -> Work:
    """Tokens in and out, the weights once, the state read and written."""
    width, rows = int(traits["width"]), ROWS[phase]
    elements = (2 * rows + width + 2 * (width - 1)) * CHANNELS
    return Work(_FLOAT_BYTES * elements, rows * CHANNELS * (2 * width + 6))


def _conv_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    width, rows = int(traits["width"]), ROWS[phase]
    bias = _random(CHANNELS) if traits.get("biased") else None
    arguments = (
        _random(rows, CHANNELS), _random(width, CHANNELS), bias, _random(2, width - 1, 1, CHANNELS), *_one_row(rows),
        torch.empty(rows, CHANNELS),
    )  # fmt: skip
    work = _conv_work(signature, traits, phase)
    return Workload(f"{rows} tokens of {CHANNELS} channels, width {width}", arguments, work=work, cold=True)


def _key_heads(traits: Traits) -> int:
    return max(1, HEADS // int(traits["v_per_k"]))


def _delta_work(_signature: FormatSignature, traits: Traits, phase: str) -> Work:
    """A state read once and written once, however many tokens it takes."""
    key_dim, value_dim, shared = (int(traits[name]) for name in ("key_dim", "value_dim", "v_per_k"))
    heads, rows = _key_heads(traits) * shared, ROWS[phase]
    decays = key_dim if traits["decay"] == "channel" else 1
    each = 2 * key_dim // shared + 2 * value_dim + decays + 1
    elements = heads * (2 * key_dim * value_dim + rows * each)
    return Work(_FLOAT_BYTES * elements, 7 * rows * heads * key_dim * value_dim)


def _delta_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    key_dim, value_dim, shared = (int(traits[name]) for name in ("key_dim", "value_dim", "v_per_k"))
    rows, key_heads = ROWS[phase], _key_heads(traits)
    heads = key_heads * shared
    decayed = (heads, key_dim) if traits["decay"] == "channel" else (heads,)
    arguments = (
        _random(rows, key_heads, key_dim), _random(rows, key_heads, key_dim), _random(rows, heads, value_dim),
        _random(rows, *decayed), _random(rows, heads), torch.ones(heads), torch.zeros(decayed), 1e-6,
        _random(2, heads, 1, key_dim * value_dim), *_one_row(rows), torch.empty(rows, heads, value_dim),
    )  # fmt: skip
    description = f"{rows} tokens, {heads} heads of {key_dim} x {value_dim}, a decay a {traits['decay']}"
    return Workload(description, arguments, work=_delta_work(signature, traits, phase), cold=True)


def _norm_work(_signature: FormatSignature, _traits: Traits, phase: str) -> Work:
    elements = ROWS[phase] * WIDTH
    return Work(3 * elements * _FLOAT_BYTES, 10 * elements)


def _norm_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    shape = (ROWS[phase], WIDTH // HEAD_DIM, HEAD_DIM)
    silu = traits["gate"] == "silu"
    arguments = (_random(*shape), _random(*shape), torch.ones(HEAD_DIM), 1e-6, silu, torch.empty(shape))
    return Workload(f"{list(shape)}", arguments, work=_norm_work(signature, traits, phase))


register_workload("recurrent.causal_conv", _conv_workload, _conv_work)
register_workload("recurrent.gated_delta", _delta_workload, _delta_work)
register_workload("norm.gated_rms", _norm_workload, _norm_work)
