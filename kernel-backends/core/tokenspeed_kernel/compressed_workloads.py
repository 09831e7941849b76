"""Workloads of what DeepSeek-V4 computes besides sparse attention: a row in decode, a chunk in prefill."""

import torch

from tokenspeed_kernel.ops.kv_cache import kv_format, row_dtype
from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.standard_workloads import ROWS, WIDTH
from tokenspeed_kernel.workloads import Traits, Work, Workload, bits_of, register_workload

HEADS = 64
STRIDE, HEAVY_STRIDE = 4, 128
"""Tokens of an entry, where entries overlap and where they do not."""

ROTATED = 64
POSITIONS = 1024
EXPERTS, TOP_K, VOCABULARY = 256, 6, 1024

_FLOAT_BYTES = 4


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _cache(dtype: torch.dtype, blocks: int, page: int, width: int) -> torch.Tensor:
    return _random(blocks, 1, page, width).to(dtype)


def _kv_dtype(signature: FormatSignature) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, signature["kv"].storage_dtype)
    return dtype


def _write_work(signature: FormatSignature, traits: Traits, phase: str) -> Work:
    elements = ROWS[phase] * int(traits["entry_dim"])
    return Work(int(elements * (_FLOAT_BYTES + bits_of(signature["kv"]) / 8)), 0)


def _write_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    rows, width = ROWS[phase], int(traits["entry_dim"])
    cache = _cache(_kv_dtype(signature), 1 + rows // 64 + 1, 64, width)
    arguments = (_random(rows, width), cache, torch.arange(rows) + 64)
    return Workload(f"[{rows}, {width}]", arguments, work=_write_work(signature, traits, phase))


def _compress_work(signature: FormatSignature, traits: Traits, phase: str) -> Work:
    width, overlapping = int(traits["entry_dim"]), bool(traits["overlapping"])
    stride = STRIDE if overlapping else HEAVY_STRIDE
    entries = max(1, ROWS[phase] // stride)
    read = entries * stride * (2 if overlapping else 1) * width
    return Work(int(2 * read * bits_of(kv_format(row_dtype(_kv_dtype(signature)))) / 8), 8 * read)


def _compress_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    """The last token of an entry in decode, a chunk of whole entries in prefill, behind as many tokens."""
    width, page, overlapping = int(traits["entry_dim"]), int(traits["kernel_page_size"]), bool(traits["overlapping"])
    stride, columns = (STRIDE, 2 * width) if overlapping else (HEAVY_STRIDE, width)
    rows, tokens = ROWS[phase], 2 * max(ROWS["prefill"], stride)
    pages = -(-tokens // page)
    table = torch.arange(1, pages + 1, dtype=torch.int32).unsqueeze(0)
    kv_dtype = _kv_dtype(signature)
    values, gates = (_cache(row_dtype(kv_dtype), pages + 1, page, columns) for _ in range(2))
    arguments = (
        values, gates, table, torch.tensor([0, rows], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32),
        _random(stride, columns), torch.ones(width), 1e-6, _random(POSITIONS, min(ROTATED, width // 2 * 2)),
        _cache(kv_dtype, rows // stride + 2, 1, width), (torch.arange(rows) // stride + 1) * stride, overlapping,
    )  # fmt: skip
    description = f"{rows} tokens, entries of {stride} with {width} elements, pages of {page}"
    return Workload(description, arguments, work=_compress_work(signature, traits, phase), cold=True)


def _sinks_work(_signature: FormatSignature, traits: Traits, phase: str) -> Work:
    elements = ROWS[phase] * HEADS * int(traits["head_dim"])
    return Work(2 * _FLOAT_BYTES * elements, elements)


def _sinks_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    rows, width = ROWS[phase], int(traits["head_dim"])
    # sinks of -inf take nothing, so that x stays as it is however often it is timed
    arguments = (_random(rows, HEADS, width), _random(rows, HEADS), torch.full((HEADS,), -torch.inf))
    return Workload(f"[{rows}, {HEADS}, {width}]", arguments, work=_sinks_work(signature, traits, phase))


def _rotary_work(_signature: FormatSignature, traits: Traits, phase: str) -> Work:
    elements = ROWS[phase] * HEADS * int(traits["head_dim"])
    return Work(2 * _FLOAT_BYTES * elements, 3 * elements)


def _rotary_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    rows, width, axes = ROWS[phase], int(traits["head_dim"]) // 2 * 2, int(traits["axes"])
    angles = _random(POSITIONS, width // 2)
    positions = torch.arange(rows, dtype=torch.int32).expand(axes, rows).contiguous()
    follows = None if axes == 1 else (torch.arange(width // 2) % axes).to(torch.int32)
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    arguments = (_random(rows, HEADS, width), positions, follows, table, bool(traits["interleaved"]))
    return Workload(f"{rows} rows, {HEADS} heads of {width}", arguments, work=_rotary_work(signature, traits, phase))


def _shares(rows: int, streams: int, scales: int) -> tuple[torch.Tensor, ...]:
    return _random(rows, streams * WIDTH) * 0.01, torch.zeros(rows), torch.ones(scales)


def _streams_work(traits: Traits, phase: str, outputs: int) -> Work:
    elements = ROWS[phase] * int(traits["streams"]) * WIDTH
    return Work(2 * _FLOAT_BYTES * elements, 2 * elements * outputs)


def _begin_work(_signature: FormatSignature, traits: Traits, phase: str) -> Work:
    return _streams_work(traits, phase, 0)


def _begin_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    rows, streams = ROWS[phase], int(traits["streams"])
    arguments = (_random(rows, WIDTH), torch.empty(rows, streams, WIDTH))
    return Workload(f"[{rows}, {streams}, {WIDTH}]", arguments, work=_begin_work(signature, traits, phase))


def _mix_work(_signature: FormatSignature, traits: Traits, phase: str) -> Work:
    streams = int(traits["streams"])
    return _streams_work(traits, phase, (2 + streams) * streams + 1)


def _mix_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    rows, streams = ROWS[phase], int(traits["streams"])
    outputs = torch.empty(rows, streams), torch.empty(rows, streams, streams), torch.empty(rows, WIDTH)
    shares = _shares((2 + streams) * streams, streams, 3)
    arguments = (_random(rows, streams, WIDTH), *shares, 1e-6, 1e-6, 20, *outputs)
    return Workload(f"[{rows}, {streams}, {WIDTH}]", arguments, work=_mix_work(signature, traits, phase))


def _spread_work(_signature: FormatSignature, traits: Traits, phase: str) -> Work:
    return _streams_work(traits, phase, int(traits["streams"]) + 1)


def _spread_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    rows, streams = ROWS[phase], int(traits["streams"])
    # mixed by the identity and without a share of x, streams stay as they are
    identity = torch.eye(streams).expand(rows, streams, streams).contiguous()
    arguments = (_random(rows, WIDTH), torch.zeros(rows, streams), identity, _random(rows, streams, WIDTH))
    return Workload(f"[{rows}, {streams}, {WIDTH}]", arguments, work=_spread_work(signature, traits, phase))


def _collapse_work(_signature: FormatSignature, traits: Traits, phase: str) -> Work:
    return _streams_work(traits, phase, int(traits["streams"]) + 1)


def _collapse_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    rows, streams = ROWS[phase], int(traits["streams"])
    shares = _shares(streams, streams, 1)
    arguments = (_random(rows, streams, WIDTH), *shares, 1e-6, 1e-6, torch.empty(rows, WIDTH))
    return Workload(f"[{rows}, {streams}, {WIDTH}]", arguments, work=_collapse_work(signature, traits, phase))


def _table_work(_signature: FormatSignature, _traits: Traits, phase: str) -> Work:
    return Work(_FLOAT_BYTES * ROWS[phase] * 4 * TOP_K, 16 * ROWS[phase] * TOP_K)


def _table_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    rows = ROWS[phase]
    table = _random(VOCABULARY, EXPERTS).argsort(dim=1)[:, :TOP_K].to(torch.int32)
    outputs = torch.empty(rows, TOP_K, dtype=torch.int32), torch.empty(rows, TOP_K)
    arguments = (_random(rows, EXPERTS), torch.arange(rows, dtype=torch.int32), table, 1.5, *outputs)
    return Workload(f"{rows} rows, {TOP_K} of {EXPERTS}", arguments, work=_table_work(signature, traits, phase))


def _clamped_work(_signature: FormatSignature, _traits: Traits, phase: str) -> Work:
    return Work(3 * _FLOAT_BYTES * ROWS[phase] * WIDTH, 8 * ROWS[phase] * WIDTH)


def _clamped_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    rows = ROWS[phase]
    arguments = (_random(rows, WIDTH), _random(rows, WIDTH), 10.0, torch.empty(rows, WIDTH))
    return Workload(f"[{rows}, {WIDTH}]", arguments, work=_clamped_work(signature, traits, phase))


register_workload("attention.write", _write_workload, _write_work)
register_workload("attention.compress", _compress_workload, _compress_work)
register_workload("attention.apply_sinks", _sinks_workload, _sinks_work)
register_workload("rotary.apply", _rotary_workload, _rotary_work)
register_workload("hyper.begin", _begin_workload, _begin_work)
register_workload("hyper.mix", _mix_workload, _mix_work)
register_workload("hyper.spread", _spread_workload, _spread_work)
register_workload("hyper.collapse", _collapse_workload, _collapse_work)
register_workload("moe.table_route", _table_workload, _table_work)
register_workload("activation.clamped_silu", _clamped_workload, _clamped_work)
