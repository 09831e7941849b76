"""Walks every attention backend: no defaults, no keyword catch-alls, no second way to prepare a decode."""

import ast
import inspect
from types import ModuleType

import pytest
import torch

from tokenspeed.device.attention import backends
from tokenspeed.device.attention.backend import AttentionBackend, ForwardMode
from tokenspeed.device.attention.router import GroupRouter, attention_of
from tokenspeed.layers.cache_spec import CacheFieldSpec, CacheGroupSpec
from tokenspeed.layers.kernels import KernelBinder

NAMES = backends.backend_names()
DECODE = ["self", "bs", "actual_bs", "req_pool_indices", "seq_lens"]
DECODE_KEYWORDS = ["forward_mode", "block_tables", "for_graph_replay"]
EXTEND = ["self", "bs", "req_pool_indices"]
EXTEND_KEYWORDS = [
    "forward_mode",
    "block_tables",
    "extend_seq_lens",
    "extend_seq_lens_cpu",
    "extend_prefix_lens",
    "extend_prefix_lens_cpu",
    "extend_with_prefix",
    "query_shard",
]


def module(name: str) -> ModuleType:
    return inspect.getmodule(backends.backend_class(name))  # type: ignore[return-value]


def test_there_is_a_backend_and_unknown_ones_are_refused() -> None:
    assert "paged_gqa" in NAMES
    with pytest.raises(ValueError, match="'flash' does not exist; there are"):
        backends.backend_class("flash")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("method", "positional", "keywords"),
    [("refresh_decode_metadata", DECODE, DECODE_KEYWORDS), ("refresh_extend_metadata", EXTEND, EXTEND_KEYWORDS)],
)
def test_signatures_have_no_defaults_and_no_catch_alls(
    name: str, method: str, positional: list[str], keywords: list[str]
) -> None:
    for owner in (AttentionBackend, GroupRouter, backends.backend_class(name)):
        parameters = inspect.signature(getattr(owner, method)).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
        assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == keywords
        assert len(parameters) == len(positional) + len(keywords)
        assert all(p.default is p.empty for p in parameters)


@pytest.mark.parametrize("name", NAMES)
def test_decode_is_prepared_in_one_place_and_without_a_second_arm(name: str) -> None:
    methods = [method for method, _ in inspect.getmembers(backends.backend_class(name), inspect.isfunction)]
    public = sorted(method for method in methods if not method.startswith("_"))
    assert public == ["attend", "refresh_decode_metadata", "refresh_extend_metadata"]
    tree = ast.parse(inspect.getsource(module(name)))
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.Match):
            test = node.subject if isinstance(node, ast.Match) else node.test
            words = {inner.id for inner in ast.walk(test) if isinstance(inner, ast.Name)}
            assert not words & {"for_graph_replay", "forward_mode"}, f"line {node.lineno} branches on {words}"


GRANULARITY, HEADS, KV_HEADS, HEAD_DIM, SLOTS = 16, 4, 2, 16, 3


def make(
    name: str, *, group_id: str = "g", window: int = 0, seed: int = 1
) -> tuple[AttentionBackend, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """A backend over one layer of random keys and values, NaN in the null block, and the tables of four pool rows."""
    generator = torch.Generator().manual_seed(seed)
    shape = (10, KV_HEADS, GRANULARITY, HEAD_DIM)
    cache = (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    cache[0][0], cache[1][0] = torch.nan, torch.nan
    backend = backends.backend_class(name)(
        KernelBinder({}),
        group_id=group_id,
        caches=[cache],
        num_heads=HEADS,
        window=window,
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


Tables = torch.Tensor | dict[str, torch.Tensor]


def by_group(tables: Tables) -> dict[str, torch.Tensor]:
    return tables if isinstance(tables, dict) else {"g": tables}


def decode(backend: AttentionBackend, tables: Tables, rows: list[int], lengths: list[int], bs: int) -> None:
    backend.refresh_decode_metadata(
        bs,
        len(rows),
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int32),
        forward_mode=ForwardMode.DECODE,
        block_tables=by_group(tables),
        for_graph_replay=False,
    )


def extend(backend: AttentionBackend, tables: Tables, rows: list[int], new: list[int], old: list[int]) -> None:
    lengths, prefixes = torch.tensor(new, dtype=torch.int32), torch.tensor(old, dtype=torch.int32)
    backend.refresh_extend_metadata(
        len(rows),
        torch.tensor(rows, dtype=torch.int64),
        forward_mode=ForwardMode.EXTEND,
        block_tables=by_group(tables),
        extend_seq_lens=lengths,
        extend_seq_lens_cpu=lengths,
        extend_prefix_lens=prefixes,
        extend_prefix_lens_cpu=prefixes,
        extend_with_prefix=any(old),
        query_shard=None,
    )


@pytest.mark.parametrize("name", NAMES)
def test_mixed_rows_equal_plain_attention(name: str) -> None:
    backend, tables, cache = make(name)
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


@pytest.mark.parametrize("name", NAMES)
def test_a_window_reads_no_block_before_it(name: str) -> None:
    """Slots before the window of a row's first query are null; the null block is NaN here."""
    backend, tables, cache = make(name, window=10)
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


def group(group_id: str, *layers: int) -> CacheGroupSpec:
    fields = (CacheFieldSpec(name="k", heads=1, dim=2),)
    return CacheGroupSpec(
        group_id=group_id,
        kind="full_history",
        layers=layers,
        fields=fields,
        rows_per_page=GRANULARITY,
        entry_stride_tokens=1,
    )


@pytest.mark.parametrize("name", NAMES)
def test_each_layer_reads_its_own_groups_cache_table_and_window(name: str) -> None:
    full, tables, full_cache = make(name, group_id="full")
    sliding, _, sliding_cache = make(name, group_id="sliding", window=10, seed=2)
    attention = attention_of([group("full", 1), group("sliding", 0)], [full, sliding])
    other = torch.tensor([[0, 0, 0], [0, 9, 8], [0, 7, 6], [0, 5, 4]], dtype=torch.int32)
    both = {"full": tables, "sliding": other}
    q, out = torch.randn(3 + 1, HEADS, HEAD_DIM), torch.empty(2, 4, HEADS, HEAD_DIM)
    extend(attention, both, [2], [3], [30])
    decode(attention, both, [1], [47], 1)
    for layer in range(2):
        attention.attend(layer, q, out[layer])
    expected = [
        torch.cat([dense(q[:3], sliding_cache, [1, 7, 6], 33, 10), dense(q[3:], sliding_cache, [1, 9, 8], 47, 10)]),
        torch.cat([dense(q[:3], full_cache, [4, 5, 6], 33), dense(q[3:], full_cache, [1, 2, 3], 47)]),
    ]
    torch.testing.assert_close(out, torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_the_attention_of_one_group_is_its_backend() -> None:
    backend, _, _ = make("paged_gqa")
    assert attention_of([group("g", 0, 1)], [backend]) is backend


@pytest.mark.parametrize("name", NAMES)
def test_padded_rows_of_a_decode_are_null_and_change_nothing(name: str) -> None:
    backend, tables, _ = make(name)
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


@pytest.mark.parametrize("name", NAMES)
def test_an_idle_forward_takes_empty_slices(name: str) -> None:
    backend, tables, _ = make(name)
    extend(backend, tables, [1], [4], [0])
    extend(backend, tables, [], [], [])
    decode(backend, tables, [], [], 0)
    out = torch.empty(0, HEADS, HEAD_DIM)
    backend.attend(0, torch.empty(0, HEADS, HEAD_DIM), out)


def test_metadata_of_paged_gqa_keeps_its_addresses() -> None:
    """What a graph captures for a batch size must be what a later refresh fills."""
    backend, tables, _ = make("paged_gqa")
    decode(backend, tables, [1, 2], [3, 4], 2)
    first = [view.data_ptr() for view in backend._decode_rows.views]  # type: ignore[attr-defined]
    decode(backend, tables, [3], [5], 1)
    decode(backend, tables, [2, 3], [9, 8], 2)
    assert [view.data_ptr() for view in backend._decode_rows.views] == first  # type: ignore[attr-defined]


def test_padded_rows_of_paged_gqa_resolve_to_the_null_block() -> None:
    backend, tables, _ = make("paged_gqa")
    decode(backend, tables, [1, 2, 3], [40, 40, 40], 3)
    decode(backend, tables, [2], [33], 3)
    pages, lengths = backend._decode_rows.views  # type: ignore[attr-defined]
    assert pages.tolist() == [[4, 5, 6], [0, 0, 0], [0, 0, 0]]
    assert lengths.tolist() == [33, 0, 0]
