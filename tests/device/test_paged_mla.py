"""Latent attention over paged latents: equal to plain attention with keys that all heads share, and which rows have
keys and values of their own expanded."""

from dataclasses import replace

import pytest
import torch
from refresh import decode, extend

from tokenspeed.device.attention.backends.paged_mla import Backend
from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.cache_groups import history
from tokenspeed.layers.cache_spec import CacheFieldSpec
from tokenspeed.layers.kernels import KernelBinder
from tokenspeed_kernel.ops.mla_expanded import make_reference_mla_extend_expanded
from tokenspeed_kernel.quantized import QuantizedTensor

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


def make_expanding(pairs: float) -> tuple[Backend, torch.Tensor, torch.Tensor]:
    backend, tables, caches = make()
    backend._spec = replace(backend._spec, pairs_per_expansion=pairs)
    return backend, tables, caches


@pytest.mark.parametrize(
    ("new", "before", "expanded"),
    [
        (1, 0, True),  # nothing has to be expanded but what is new
        (1, 1, False),
        (9, 100, False),
        (10, 100, True),  # 1055 pairs for 100 keys of 10 pairs each
        (9, 10, True),  # 135 pairs, the new ones among each other among them
        (7, 10, False),  # 98
        (64, 10**9, True),
        (9, 10**9, False),
    ],
)
def test_keys_are_expanded_where_enough_pairs_come_together(new: int, before: int, expanded: bool) -> None:
    spec = AttentionSpec(backend="paged_mla", latent_dim=LATENT, pairs_per_expansion=10.0)
    assert spec.expands(new, before) is expanded
    assert replace(spec, pairs_per_expansion=0.0).expands(new, before) is False


def test_rows_are_expanded_or_absorbed_in_runs_and_nobody_touches_the_others() -> None:
    """Rows of 5, 2, 1 and 3 tokens, of which the first and the last are expanded, and one that decodes."""
    backend, tables, caches = make_expanding(4.0)
    up = torch.randn(HEADS * 9, LATENT, generator=torch.Generator().manual_seed(3))
    kernel = make_reference_mla_extend_expanded(QuantizedTensor.from_dense(up, "up"), HEADS)
    q = torch.randn(12, HEADS, 5 + ROTARY)
    extend(backend, tables, [3, 1, 2, 2], [5, 2, 1, 3], [0, 20, 40, 0])
    decode(backend, tables, [2], [33], 1)
    assert backend.absorbed == (slice(5, 8), slice(11, None))
    out = torch.full((12, HEADS, 4), torch.nan)
    backend.attend_expanded(1, kernel, q, out)
    expected = torch.full_like(out, torch.nan)
    for tokens, row, length in ((slice(0, 5), 3, 5), (slice(8, 11), 2, 3)):
        ends = torch.tensor([0, length], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
        kernel(q[tokens], caches[1], tables[row : row + 1], *ends, SCALE, expected[tokens])
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6, equal_nan=True)
    attended = torch.full((12, HEADS, LATENT), torch.nan)
    wide = torch.randn(12, HEADS, LATENT + ROTARY)
    backend.attend_latent(1, wide[..., :LATENT], wide[..., LATENT:], attended)
    assert attended[:5].isnan().all() and attended[8:11].isnan().all()
    torch.testing.assert_close(attended[5:7], dense(wide[5:7], caches[1], [1, 2, 3], 22), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(attended[11:], dense(wide[11:], caches[1], [4, 5, 6], 33), atol=1e-5, rtol=1e-5)


def test_what_is_absorbed_is_one_slice_where_it_can_be() -> None:
    backend, tables, _ = make_expanding(4.0)
    extend(backend, tables, [3, 1], [5, 1], [0, 20])
    assert backend.absorbed == (slice(5, 6),)
    decode(backend, tables, [2], [33], 4)
    assert backend.absorbed == (slice(5, None),)
    extend(backend, tables, [3], [5], [0])
    decode(backend, tables, [], [], 0)
    assert backend.absorbed == ()
    extend(backend, tables, [], [], [])
    decode(backend, tables, [2], [33], 1)
    assert backend.absorbed == (slice(0, None),)
