"""A small layer over every attention backend, to be computed by any solution's kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed.device.attention.backends import backend_class
from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.batch import Compressor
from tokenspeed.layers.cache_groups import history
from tokenspeed.layers.cache_spec import CacheFieldSpec, CacheGroupSpec
from tokenspeed.layers.kernels import KernelBinder

GRANULARITY, SLOTS, BLOCKS, MAX_ROWS = 16, 3, 10, 4
TABLES = torch.tensor([[0, 0, 0], [1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)
STATE_TABLES = torch.tensor([[0, 0, 0], [0, 1, 0], [2, 3, 0], [0, 4, 0]], dtype=torch.int32)
"""Blocks of four pool rows; of states their input and live blocks."""

HEADS, LATENT, ROTARY = 4, 32, 8

Layer = Callable[[int], list[torch.Tensor]]
"""Computes the layer for a step of so many tokens with inputs of its own; what came out."""


@dataclass(frozen=True)
class BackendCase:
    """Attributes:
    file: the backend's.
    make: the backend over caches of a dtype, and its layer, both bound by a binder.
    tables: of the pool rows.
    """

    file: str
    make: Callable[[KernelBinder, torch.dtype], tuple[Any, Layer]]
    tables: torch.Tensor


def _random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _cache(dtype: torch.dtype, heads: int, width: int, seed: int) -> torch.Tensor:
    """NaN in the null block."""
    cache = _random(BLOCKS, heads, GRANULARITY, width, seed=seed).to(dtype)
    cache[0] = torch.nan
    return cache


def _made(
    kernels: KernelBinder,
    group: CacheGroupSpec,
    spec: AttentionSpec,
    caches: dict[str, torch.Tensor],
) -> Any:
    return backend_class(spec.backend)(
        kernels, group=group, spec=spec, caches=[caches], max_rows=MAX_ROWS, table_slots=SLOTS
    )


def _grouped(window: int) -> Callable[[KernelBinder, torch.dtype], tuple[Any, Layer]]:
    def make(kernels: KernelBinder, dtype: torch.dtype) -> tuple[Any, Layer]:
        width = 16
        fields = [CacheFieldSpec(name=name, heads=2, dim=width) for name in ("k", "v")]
        backend = _made(
            kernels,
            history("g", [0], fields, granularity=GRANULARITY, window=window),
            AttentionSpec(backend="paged_gqa", num_heads=HEADS, scale=width**-0.5),
            {"k": _cache(dtype, 2, width, 1), "v": _cache(dtype, 2, width, 2)},
        )

        def layer(tokens: int) -> list[torch.Tensor]:
            out = torch.full((tokens, HEADS, width), torch.nan)
            backend.attend(0, _random(tokens, HEADS, width, seed=tokens), out)
            return [out]

        return backend, layer

    return make


def _latent(kernels: KernelBinder, dtype: torch.dtype) -> tuple[Any, Layer]:
    fields = [CacheFieldSpec(name="latent", heads=1, dim=LATENT + ROTARY)]
    backend = _made(
        kernels,
        history("g", [0], fields, granularity=GRANULARITY),
        AttentionSpec(backend="paged_mla", num_heads=HEADS, latent_dim=LATENT, scale=0.3),
        {"latent": _cache(dtype, 1, LATENT + ROTARY, 1)},
    )

    def layer(tokens: int) -> list[torch.Tensor]:
        q, out = _random(tokens, HEADS, LATENT + ROTARY, seed=tokens), torch.full((tokens, HEADS, LATENT), torch.nan)
        backend.attend_latent(0, q[..., :LATENT].contiguous(), q[..., LATENT:], out)
        return [out]

    return backend, layer


def _indexed(kernels: KernelBinder, dtype: torch.dtype) -> tuple[Any, Layer]:
    width, best = 16, 6
    fields = [
        CacheFieldSpec(name="latent", heads=1, dim=LATENT + ROTARY),
        CacheFieldSpec(name="index_key", heads=1, dim=width),
    ]
    backend = _made(
        kernels,
        history("g", [0], fields, granularity=GRANULARITY),
        AttentionSpec(backend="sparse_mla", num_heads=HEADS, latent_dim=LATENT, index_heads=2, scale=0.3),
        {"latent": _cache(dtype, 1, LATENT + ROTARY, 1), "index_key": _cache(dtype, 1, width, 2)},
    )

    def layer(tokens: int) -> list[torch.Tensor]:
        selected = torch.full((tokens, best), -7, dtype=torch.int32)
        backend.select(0, _random(tokens, 2, width, seed=tokens), _random(tokens, 2, seed=3), selected)
        q, out = _random(tokens, HEADS, LATENT + ROTARY, seed=tokens), torch.full((tokens, HEADS, LATENT), torch.nan)
        backend.attend_selected(0, q[..., :LATENT].contiguous(), q[..., LATENT:], selected, out, None)
        return [selected.float(), out]

    return backend, layer


def _compressed(kernels: KernelBinder, dtype: torch.dtype) -> tuple[Any, Layer]:
    width, stride = 8, 4
    fields = [CacheFieldSpec(name=name, heads=1, dim=2 * width) for name in ("values", "gates")]
    values, gates = _cache(dtype, 1, 2 * width, 1), _cache(dtype, 1, 2 * width, 2)
    backend = _made(
        kernels,
        history("g", [0], fields, granularity=GRANULARITY, window=2 * GRANULARITY),
        AttentionSpec(backend="compressor"),
        {"values": values, "gates": gates},
    )
    kernel = kernels.compress(entry_dim=width, overlapping=True, page=GRANULARITY, kv_dtype=dtype)
    compressor = Compressor(
        kernel, _random(stride, 2 * width), torch.ones(width), 1e-6, _random(SLOTS * GRANULARITY, 4), overlapping=True
    )

    def layer(tokens: int) -> list[torch.Tensor]:
        entries = torch.zeros(BLOCKS, 1, GRANULARITY // stride, width, dtype=dtype)
        slots = GRANULARITY + stride * torch.arange(tokens, dtype=torch.int64)
        backend.compress(values, gates, compressor, entries, slots)
        return [entries[1:].float()]

    return backend, layer


def _recurrent(channel: bool) -> Callable[[KernelBinder, torch.dtype], tuple[Any, Layer]]:
    def make(kernels: KernelBinder, _dtype: torch.dtype) -> tuple[Any, Layer]:
        heads, width = 2, 16
        before = _random(BLOCKS, heads, 1, width * width)
        before[0] = torch.nan
        group = CacheGroupSpec(
            group_id="g", kind="state", layers=(0,), dtype="float32", checkpoint_granularity=64,
            fields=(CacheFieldSpec(name="matrix", heads=heads, dim=width * width),),
        )  # fmt: skip
        backend = _made(kernels, group, AttentionSpec(backend="recurrent"), {"matrix": before})
        decay = "channel" if channel else "head"
        kernel = kernels.gated_delta(key_dim=width, value_dim=width, v_per_k=1, decay=decay)
        decayed = (heads, width) if channel else (heads,)

        def layer(tokens: int) -> list[torch.Tensor]:
            q, k, v = (_random(tokens, heads, width, seed=tokens + place) for place in range(3))
            state, out, rows = before.clone(), torch.full((tokens, heads, width), torch.nan), backend.state_rows
            kernel(
                q, k, v, _random(tokens, *decayed), _random(tokens, heads), torch.ones(heads), torch.zeros(decayed),
                1e-6, state, rows.starts, rows.sources, rows.targets, out,
            )  # fmt: skip
            return [out, state[1:]]

        return backend, layer

    return make


CASES: dict[str, BackendCase] = {
    "grouped queries": BackendCase("paged_gqa", _grouped(0), TABLES),
    "a sliding window": BackendCase("paged_gqa", _grouped(10), TABLES),
    "latents": BackendCase("paged_mla", _latent, TABLES),
    "an indexer and what it selects": BackendCase("sparse_mla", _indexed, TABLES),
    "a compressor": BackendCase("compressor", _compressed, TABLES),
    "the gated delta rule": BackendCase("recurrent", _recurrent(channel=False), STATE_TABLES),
    "Kimi delta attention": BackendCase("recurrent", _recurrent(channel=True), STATE_TABLES),
}
