"""Latent attention over paged latents: equal to plain attention with keys that all heads share."""

import torch
from refresh import decode, extend

from tokenspeed.device.attention.backends.paged_mla import Backend
from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.cache_groups import history
from tokenspeed.layers.cache_spec import CacheFieldSpec
from tokenspeed.layers.kernels import KernelBinder

GRANULARITY, HEADS, LATENT, ROTARY, SCALE = 16, 4, 32, 8, 0.3


def make() -> tuple[Backend, torch.Tensor, torch.Tensor]:
    """A backend over two layers of random latents, NaN in the null block, and the tables of four pool rows."""
    caches = torch.randn(2, 10, 1, GRANULARITY, LATENT + ROTARY, generator=torch.Generator().manual_seed(1))
    caches[:, 0] = torch.nan
    fields = [CacheFieldSpec(name="latent", heads=1, dim=LATENT + ROTARY)]
    backend = Backend(
        KernelBinder({}),
        group=history("g", [0, 1], fields, granularity=GRANULARITY),
        spec=AttentionSpec(backend="paged_mla", num_heads=HEADS, latent_dim=LATENT, scale=SCALE),
        caches=[{"latent": cache} for cache in caches],
        max_rows=4,
        table_slots=3,
    )
    tables = torch.tensor([[0, 0, 0], [1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)
    return backend, tables, caches


def dense(q: torch.Tensor, cache: torch.Tensor, blocks: list[int], length: int) -> torch.Tensor:
    """Plain attention of queries [n, heads, LATENT + ROTARY] at the last n of ``length`` positions."""
    keys = cache[blocks].flatten(0, 2)[:length]
    mask = torch.ones(length, length, dtype=torch.bool).tril()[length - q.shape[0] :]
    scores = (torch.einsum("nhd,ld->hnl", q, keys) * SCALE).masked_fill(~mask, -torch.inf)
    return torch.einsum("hnl,ld->nhd", scores.softmax(-1), keys[:, :LATENT])


def test_mixed_rows_equal_plain_attention_in_each_layer() -> None:
    backend, tables, caches = make()
    q = torch.randn(5 + 20 + 2, HEADS, LATENT + ROTARY)
    extend(backend, tables, [3, 1], [5, 20], [7, 0])
    decode(backend, tables, [2, 3], [33, 12], 2)
    for place, cache in enumerate(caches):
        out = torch.full((27, HEADS, LATENT), torch.nan)
        backend.attend_latent(place, q[..., :LATENT].contiguous(), q[..., LATENT:], out)
        expected = [
            dense(q[:5], cache, [7, 8, 9], 12),
            dense(q[5:25], cache, [1, 2, 3], 20),
            dense(q[25:26], cache, [4, 5, 6], 33),
            dense(q[26:27], cache, [7, 8, 9], 12),
        ]
        torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_padded_rows_are_null_and_change_nothing() -> None:
    backend, tables, _ = make()
    q = torch.randn(4, HEADS, LATENT + ROTARY)
    alone, padded = torch.empty(2, HEADS, LATENT), torch.full((4, HEADS, LATENT), torch.nan)
    extend(backend, tables, [], [], [])
    decode(backend, tables, [3, 1, 2, 3], [40, 40, 40, 40], 4)  # rows that must not shine through afterwards
    decode(backend, tables, [1, 2], [30, 17], 2)
    backend.attend_latent(0, q[:2, :, :LATENT].contiguous(), q[:2, :, LATENT:], alone)
    decode(backend, tables, [1, 2], [30, 17], 4)
    backend.attend_latent(0, q[..., :LATENT].contiguous(), q[..., LATENT:], padded)
    assert torch.equal(padded[:2], alone)
    assert not padded[2:].any()
