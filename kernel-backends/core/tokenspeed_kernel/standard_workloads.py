"""Workloads of this package's own operations: one row against a layer in decode, a chunk of rows in prefill."""

from collections.abc import Mapping
from typing import Any

import torch

from tokenspeed_kernel.gguf_blocks import BLOCK_ELEMENTS
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import WEIGHT_FORMATS, FormatSignature, TensorFormat
from tokenspeed_kernel.workloads import Traits, Work, Workload, bits_of, register_workload

ROWS = {"decode": 1, "prefill": 256}
"""Phase to the rows of one call."""

KV_TOKENS = {"decode": 4096, "prefill": 512}
"""Phase to the length of the one sequence that attention reads."""

WIDTH = 2048
"""Elements of a row where no trait says it."""

LOOKUP_ROWS = 4096
KV_HEADS = 4
RANDOM_ROWS = 64
"""Rows of a weight that are random; the others repeat them. Making a large weight must not cost more than timing it."""

_FLOAT_BYTES = 4


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def weight_of(tensor_format: TensorFormat, rows: int, columns: int) -> QuantizedTensor:
    """A weight [rows, columns] of the format with finite values."""
    from tokenspeed_kernel.numerics.weights import random_weight  # the numerics import the binding, which tunes

    name = next(name for name, known in WEIGHT_FORMATS.items() if known == tensor_format)
    small = random_weight(name, min(rows, RANDOM_ROWS), columns, torch.Generator().manual_seed(0)).weight
    index = torch.arange(rows) % max(1, small.shape[0])
    return small.select_rows(index)


def whole_blocks(tensor_format: TensorFormat, columns: int) -> int:
    """The columns, grown to whole blocks where the format has blocks."""
    block = BLOCK_ELEMENTS.get(tensor_format.format, 1)
    return -(-columns // block) * block


def linear_work(signature: FormatSignature, traits: Traits, phase: str) -> Work:
    """The weight is read once, x once, out written once."""
    n, k, rows = int(traits["n"]), whole_blocks(signature["weight"], int(traits["k"])), ROWS[phase]
    weight_bytes = int(n * k * bits_of(signature["weight"]) / 8)
    return Work(weight_bytes + _FLOAT_BYTES * rows * (n + k), 2 * rows * n * k)


def linear_workload(
    signature: FormatSignature, traits: Traits, phase: str, bound: Mapping[str, Any] | None
) -> Workload:
    """gemm.linear on the bound weight, or on a random one of the traits' size, whole blocks where the format has
    them."""
    n, k, rows = int(traits["n"]), int(traits["k"]), ROWS[phase]
    if bound is None:
        k = whole_blocks(signature["weight"], k)
    values = {"weight": weight_of(signature["weight"], n, k), "bias": None} if bound is None else bound
    arguments = (_random(rows, k), torch.empty(rows, n))
    work = linear_work(signature, traits, phase)
    return Workload(f"[{rows}, {k}] x [{n}, {k}]", arguments, values, work, cold=True)


def _lookup_work(signature: FormatSignature, _traits: Traits, phase: str) -> Work:
    rows = ROWS[phase]
    return Work(int(rows * WIDTH * bits_of(signature["weight"]) / 8) + _FLOAT_BYTES * rows * WIDTH, 0)


def lookup_workload(
    signature: FormatSignature, traits: Traits, phase: str, bound: Mapping[str, Any] | None
) -> Workload:
    """embedding.lookup of rows spread over the bound table, or over a random one."""
    values = {"weight": weight_of(signature["weight"], LOOKUP_ROWS, WIDTH)} if bound is None else bound
    height, width = values["weight"].shape
    ids = (torch.arange(ROWS[phase]) * 7919 % height).to(torch.int32)  # a prime step visits rows far apart
    work = _lookup_work(signature, traits, phase) if bound is None else None
    description = f"{ids.shape[0]} of {height} rows of {width}"
    return Workload(description, (ids, torch.empty(ids.shape[0], width)), values, work, cold=True)


def _elementwise_work(tensors: int, operations: int, phase: str) -> Work:
    elements = ROWS[phase] * WIDTH
    return Work(tensors * elements * _FLOAT_BYTES, operations * elements)


def _rms_work(_signature: FormatSignature, _traits: Traits, phase: str) -> Work:
    return _elementwise_work(2, 4, phase)


def _rms_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    rows = ROWS[phase]
    arguments = (_random(rows, WIDTH), torch.ones(WIDTH), 1e-5, torch.empty(rows, WIDTH))
    return Workload(f"[{rows}, {WIDTH}]", arguments, work=_rms_work(signature, traits, phase))


def _fused_rms_work(_signature: FormatSignature, _traits: Traits, phase: str) -> Work:
    return _elementwise_work(4, 5, phase)


def _fused_rms_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    rows = ROWS[phase]
    # x is zero: the residual, which each call adds x to, stays as it is however often it is timed
    x, residual = torch.zeros(rows, WIDTH), _random(rows, WIDTH)
    arguments = (x, residual, torch.ones(WIDTH), 1e-5, torch.empty(rows, WIDTH))
    return Workload(f"[{rows}, {WIDTH}]", arguments, work=_fused_rms_work(signature, traits, phase))


def _silu_work(_signature: FormatSignature, _traits: Traits, phase: str) -> Work:
    return _elementwise_work(3, 6, phase)


def _silu_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    rows = ROWS[phase]
    arguments = (_random(rows, WIDTH), _random(rows, WIDTH), torch.empty(rows, WIDTH))
    return Workload(f"[{rows}, {WIDTH}]", arguments, work=_silu_work(signature, traits, phase))


def _gate_work(_signature: FormatSignature, _traits: Traits, phase: str) -> Work:
    return _elementwise_work(3, 6, phase)


def _gate_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    rows = ROWS[phase]
    arguments = (_random(rows, WIDTH), _random(rows, WIDTH), torch.empty(rows, WIDTH))
    return Workload(f"[{rows}, {WIDTH}]", arguments, work=_gate_work(signature, traits, phase))


def _add_work(_signature: FormatSignature, _traits: Traits, phase: str) -> Work:
    return _elementwise_work(3, 1, phase)


def _add_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    rows = ROWS[phase]
    arguments = (_random(rows, WIDTH), torch.zeros(rows, WIDTH))
    return Workload(f"[{rows}, {WIDTH}]", arguments, work=_add_work(signature, traits, phase))


def _attention_work(signature: FormatSignature, traits: Traits, phase: str) -> Work:
    head_dim, per_kv = int(traits["head_dim"]), int(traits["q_per_kv"])
    queries, tokens, query_heads = ROWS[phase], KV_TOKENS[phase], KV_HEADS * per_kv
    cache_bytes = int(2 * tokens * KV_HEADS * head_dim * bits_of(signature["kv"]) / 8)
    pairs = queries * tokens - queries * (queries - 1) // 2
    activations = 2 * _FLOAT_BYTES * queries * query_heads * head_dim
    return Work(cache_bytes + activations, 4 * pairs * query_heads * head_dim)


def _attention_workload(signature: FormatSignature, traits: Traits, phase: str, *, extend: bool) -> Workload:
    head_dim, per_kv, page = int(traits["head_dim"]), int(traits["q_per_kv"]), int(traits["kernel_page_size"])
    queries, tokens = ROWS[phase], KV_TOKENS[phase]
    pages = (tokens + page - 1) // page
    dtype: torch.dtype = getattr(torch, signature["kv"].storage_dtype)
    cache = _random(pages + 1, 2, KV_HEADS, page, head_dim).to(dtype)
    q = _random(queries, KV_HEADS * per_kv, head_dim)
    # pages in an order of their own, as a cache in use has them
    table = (torch.randperm(pages, generator=torch.Generator().manual_seed(0)) + 1).to(torch.int32).unsqueeze(0)
    lengths = torch.tensor([tokens], dtype=torch.int32)
    starts = (torch.tensor([0, queries], dtype=torch.int32),) if extend else ()
    extras: tuple[object, ...] = ()
    if traits.get("sinks") or traits.get("soft_cap"):
        extras = (_random(q.shape[1]) if traits.get("sinks") else None, 30.0 if traits.get("soft_cap") else 0.0)
    read = (q, cache[:, 0], cache[:, 1], table, *starts, lengths)
    arguments = (*read, head_dim**-0.5, 0, torch.empty_like(q), *extras)
    description = f"{queries} queries, {tokens} tokens, {KV_HEADS} x {per_kv} heads of {head_dim}, pages of {page}"
    return Workload(description, arguments, work=_attention_work(signature, traits, phase), cold=True)


def _decode_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    return _attention_workload(signature, traits, phase, extend=False)


def _extend_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    return _attention_workload(signature, traits, phase, extend=True)


register_workload("gemm.linear", linear_workload, linear_work)
register_workload("embedding.lookup", lookup_workload, _lookup_work)
register_workload("norm.rms", _rms_workload, _rms_work)
register_workload("norm.fused_add_rms", _fused_rms_workload, _fused_rms_work)
register_workload("activation.silu_and_mul", _silu_workload, _silu_work)
register_workload("activation.gelu_tanh_and_mul", _silu_workload, _silu_work)
register_workload("activation.sigmoid_gate", _gate_workload, _gate_work)
register_workload("activation.add", _add_workload, _add_work)
register_workload("attention.decode", _decode_workload, _attention_work)
register_workload("attention.extend", _extend_workload, _attention_work)
