"""Grouped-query attention over paged caches: equal to plain attention, whatever rows share a batch."""

import torch
from refresh import decode, extend

from tokenspeed.device.attention.backends.paged_gqa import Backend
from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.cache_groups import history
from tokenspeed.layers.cache_spec import CacheFieldSpec
from tokenspeed.layers.kernels import KernelBinder

GRANULARITY, HEADS, KV_HEADS, HEAD_DIM, SLOTS = 16, 4, 2, 16, 3
FIELDS = [CacheFieldSpec(name=name, heads=KV_HEADS, dim=HEAD_DIM) for name in ("k", "v")]


def make(
    *, group_id: str = "g", window: int = 0, seed: int = 1
) -> tuple[Backend, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """A backend over one layer of random keys and values, NaN in the null block, and the tables of four pool rows."""
    generator = torch.Generator().manual_seed(seed)
    shape = (10, KV_HEADS, GRANULARITY, HEAD_DIM)
    cache = (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    cache[0][0], cache[1][0] = torch.nan, torch.nan
    backend = Backend(
        KernelBinder({}),
        group=history(group_id, [0], FIELDS, granularity=GRANULARITY, window=window),
        spec=AttentionSpec(backend="paged_gqa", num_heads=HEADS, scale=HEAD_DIM**-0.5),
        caches=[{"k": cache[0], "v": cache[1]}],
        max_rows=4,
        table_slots=SLOTS,
    )
    tables = torch.tensor([[0, 0, 0], [1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)
    return backend, tables, cache


def dense(
    q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], blocks: list[int], length: int, window: int = 1 << 30
) -> torch.Tensor:
    """Plain attention of queries [n, heads, D] at the last n of ``length`` positions."""
    keys, values = (part[blocks].transpose(0, 1).flatten(1, 2)[:, :length] for part in cache)
    keys, values = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (keys, values))
    mask = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)[length - q.shape[0] :]
    scores = (q.transpose(0, 1) @ keys.transpose(1, 2) * HEAD_DIM**-0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1)


def test_mixed_rows_equal_plain_attention() -> None:
    backend, tables, cache = make()
    q = torch.randn(5 + 20 + 2, HEADS, HEAD_DIM)
    out = torch.full_like(q, torch.nan)
    extend(backend, tables, [3, 1], [5, 20], [7, 0])
    decode(backend, tables, [2, 3], [33, 12], 2)
    backend.attend(0, q, out)
    expected = [
        dense(q[:5], cache, [7, 8, 9], 12),
        dense(q[5:25], cache, [1, 2, 3], 20),
        dense(q[25:26], cache, [4, 5, 6], 33),
        dense(q[26:27], cache, [7, 8, 9], 12),
    ]
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_a_window_reads_no_block_before_it() -> None:
    """Slots before the window of a row's first query are null; the null block is NaN here."""
    backend, tables, cache = make(window=10)
    q = torch.randn(5 + 20 + 1, HEADS, HEAD_DIM)
    out = torch.full_like(q, torch.nan)
    held = tables.clone()
    held[3, 0] = held[2, :2] = 0
    extend(backend, held, [3, 1], [5, 20], [27, 0])
    decode(backend, held, [2], [42], 1)
    backend.attend(0, q, out)
    expected = [
        dense(q[:5], cache, [7, 8, 9], 32, 10),
        dense(q[5:25], cache, [1, 2, 3], 20, 10),
        dense(q[25:], cache, [4, 5, 6], 42, 10),
    ]
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_groups_have_tables_windows_and_caches_of_their_own() -> None:
    full, tables, full_cache = make(group_id="full")
    sliding, _, sliding_cache = make(group_id="sliding", window=10, seed=2)
    other = torch.tensor([[0, 0, 0], [0, 9, 8], [0, 7, 6], [0, 5, 4]], dtype=torch.int32)
    both = {"full": tables, "sliding": other}
    q, out = torch.randn(3 + 1, HEADS, HEAD_DIM), torch.empty(2, 4, HEADS, HEAD_DIM)
    for place, backend in enumerate((sliding, full)):
        extend(backend, both, [2], [3], [30])
        decode(backend, both, [1], [47], 1)
        backend.attend(0, q, out[place])
    expected = [
        torch.cat([dense(q[:3], sliding_cache, [1, 7, 6], 33, 10), dense(q[3:], sliding_cache, [1, 9, 8], 47, 10)]),
        torch.cat([dense(q[:3], full_cache, [4, 5, 6], 33), dense(q[3:], full_cache, [1, 2, 3], 47)]),
    ]
    torch.testing.assert_close(out, torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_padded_rows_of_a_decode_are_null_and_change_nothing() -> None:
    backend, tables, _ = make()
    q = torch.randn(4, HEADS, HEAD_DIM)
    alone, padded = torch.empty(2, HEADS, HEAD_DIM), torch.full((4, HEADS, HEAD_DIM), torch.nan)
    extend(backend, tables, [], [], [])
    decode(backend, tables, [3, 1, 2, 3], [40, 40, 40, 40], 4)  # rows that must not shine through afterwards
    decode(backend, tables, [1, 2], [30, 17], 2)
    backend.attend(0, q[:2], alone)
    decode(backend, tables, [1, 2], [30, 17], 4)
    backend.attend(0, q, padded)
    assert torch.equal(padded[:2], alone)
    assert not padded[2:].any()


def test_an_idle_forward_takes_empty_slices() -> None:
    backend, tables, _ = make()
    extend(backend, tables, [1], [4], [0])
    extend(backend, tables, [], [], [])
    decode(backend, tables, [], [], 0)
    out = torch.empty(0, HEADS, HEAD_DIM)
    backend.attend(0, torch.empty(0, HEADS, HEAD_DIM), out)


def addresses(backend: Backend) -> list[int]:
    return [backend.decode.pages.data_ptr(), backend.decode.lengths.data_ptr()]


def test_metadata_keeps_its_addresses() -> None:
    """What a graph captures for a batch size must be what a later refresh fills."""
    backend, tables, _ = make()
    decode(backend, tables, [1, 2], [3, 4], 2)
    first = addresses(backend)
    decode(backend, tables, [3], [5], 1)
    decode(backend, tables, [2, 3], [9, 8], 2)
    assert addresses(backend) == first


def test_padded_rows_resolve_to_the_null_block() -> None:
    backend, tables, _ = make()
    decode(backend, tables, [1, 2, 3], [40, 40, 40], 3)
    decode(backend, tables, [2], [33], 3)
    pages, lengths = backend.decode.pages, backend.decode.lengths
    assert pages.tolist() == [[4, 5, 6], [0, 0, 0], [0, 0, 0]]
    assert lengths.tolist() == [33, 0, 0]
