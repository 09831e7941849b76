"""Walks every attention backend: no defaults, no keyword catch-alls, no second way to prepare a decode."""

import ast
import inspect
from types import ModuleType

import pytest
import torch

from tokenspeed.device.attention import backends
from tokenspeed.device.attention.backend import AttentionBackend, ForwardMode
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
    for owner in (AttentionBackend, backends.backend_class(name)):
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


def make(name: str) -> tuple[AttentionBackend, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """A backend over one layer of random keys and values, and the tables of four pool rows."""
    generator = torch.Generator().manual_seed(1)
    shape = (10, KV_HEADS, GRANULARITY, HEAD_DIM)
    cache = (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    backend = backends.backend_class(name)(
        KernelBinder({}), group_id="g", caches=[cache], num_heads=HEADS, max_rows=4, table_slots=SLOTS
    )
    tables = torch.tensor([[0, 0, 0], [1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)
    return backend, tables, cache


def dense(q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], blocks: list[int], length: int) -> torch.Tensor:
    """Plain attention of queries [n, heads, D] at the last n of ``length`` positions."""
    keys, values = (part[blocks].transpose(0, 1).flatten(1, 2)[:, :length] for part in cache)
    keys, values = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (keys, values))
    mask = torch.ones(length, length, dtype=torch.bool).tril()[length - q.shape[0] :]
    scores = (q.transpose(0, 1) @ keys.transpose(1, 2) * HEAD_DIM**-0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1)


def decode(backend: AttentionBackend, tables: torch.Tensor, rows: list[int], lengths: list[int], bs: int) -> None:
    backend.refresh_decode_metadata(
        bs,
        len(rows),
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int32),
        forward_mode=ForwardMode.DECODE,
        block_tables={"g": tables},
        for_graph_replay=False,
    )


def extend(backend: AttentionBackend, tables: torch.Tensor, rows: list[int], new: list[int], old: list[int]) -> None:
    lengths, prefixes = torch.tensor(new, dtype=torch.int32), torch.tensor(old, dtype=torch.int32)
    backend.refresh_extend_metadata(
        len(rows),
        torch.tensor(rows, dtype=torch.int64),
        forward_mode=ForwardMode.EXTEND,
        block_tables={"g": tables},
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
