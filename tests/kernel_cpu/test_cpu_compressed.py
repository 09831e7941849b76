"""Compressed entries, streams and looked-up experts: the reference's numbers on every instruction set, and the same
bits whatever else is in the call."""

import pytest
import torch
from stored_values import assert_stored_alike

from tokenspeed_kernel.ops import (
    bind_apply_sinks,
    bind_compress,
    bind_hyper,
    bind_rotary,
    bind_table_route,
    bind_write,
)
from tokenspeed_kernel.ops.kv_cache import row_dtype

KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("overlapping", [False, True])
def test_entries_are_those_of_the_reference(instruction_set: str, dtype: torch.dtype, overlapping: bool) -> None:
    """Two rows of a step, one of which completes entries in the middle of its chunk; then one query at a time."""
    stride, width, page = 4, 40, 16
    columns = width * (2 if overlapping else 1)
    rows = torch.randn(5, 2, 1, page, columns).to(row_dtype(dtype))
    table = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32)
    starts, lengths = torch.tensor([0, 21, 22], dtype=torch.int32), torch.tensor([30, 8], dtype=torch.int32)
    slots = (torch.arange(22) + 8) * stride
    bias, norm, table_of_angles = torch.randn(stride, columns), torch.randn(width), torch.randn(64, 16)

    def made(override: str | None, *, apart: bool = False) -> torch.Tensor:
        entries = torch.full((4, 1, 8, width), torch.nan, dtype=dtype)
        bound = bind_compress(
            entry_dim=width, overlapping=overlapping, kernel_page_size=page, kv_dtype=dtype, override=override
        )
        assert override or bound.spec.name == "cpu_attention_compress"
        common = (bias, norm, 1e-6, table_of_angles, entries)
        calls = [(slice(None), starts, lengths, slice(None))]
        if apart:
            one = torch.tensor([0, 1], dtype=torch.int32)
            ends = [*range(10, 31), 8]
            calls = [
                (
                    slice(place // 21, place // 21 + 1),
                    one,
                    torch.tensor([end], dtype=torch.int32),
                    slice(place, place + 1),
                )
                for place, end in enumerate(ends)
            ]
        for which, first, length, part in calls:
            bound.fn(rows[:, 0], rows[:, 1], table[which], first, length, *common, slots[part], overlapping)
        return entries

    ours, theirs = made(None), made("reference")
    assert not ours.isnan().all()
    assert_stored_alike(ours.float(), theirs.float(), dtype)
    again = made(None, apart=True)
    assert torch.equal(ours.float().nan_to_num(7.0), again.float().nan_to_num(7.0))


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_rows_are_written_as_they_are(instruction_set: str, dtype: torch.dtype) -> None:
    x, cache = torch.randn(3, 40)[:, :33], torch.zeros(3, 1, 4, 33, dtype=dtype)
    bind_write(entry_dim=33, kv_dtype=dtype).fn(x, cache, torch.tensor([9, -1, 4]))
    assert torch.equal(cache[2, 0, 1], x[0].to(dtype))
    assert torch.equal(cache[1, 0, 0], x[2].to(dtype))
    assert not cache[0].any()


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_ends_of_heads_are_rotated(instruction_set: str, interleaved: bool) -> None:
    x, positions = torch.randn(7, 3, 40), torch.randint(0, 50, (1, 7), dtype=torch.int32)
    table = torch.randn(50, 16)
    ours, theirs = x.clone(), x.clone()
    for out, override in ((ours, None), (theirs, "reference")):
        bound = bind_rotary(head_dim=16, interleaved=interleaved, override=override)
        bound.fn(out[..., 24:], positions, None, table, interleaved)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours[..., :24], x[..., :24])


def test_streams_are_mixed_as_by_the_reference(instruction_set: str) -> None:
    tokens, count, width = 5, 4, 200
    x = torch.randn(tokens, width)
    shares = torch.randn((2 + count) * count, count * width) * 0.05, torch.randn((2 + count) * count), torch.rand(3)
    last = torch.randn(count, count * width) * 0.05, torch.randn(count), torch.rand(1)
    found = []
    for override in (None, "reference"):
        fns = {
            mode: bind_hyper(mode, streams=count, override=override).fn
            for mode in ("begin", "mix", "spread", "collapse")
        }
        streams, out = torch.full((tokens, count, width), torch.nan), torch.empty(tokens, width)
        post, comb = torch.empty(tokens, count), torch.empty(tokens, count, count)
        fns["begin"](x, streams)
        for _ in range(3):  # equal streams stay equal: the second round is the first that tells
            fns["mix"](streams, *shares, 1e-6, 1e-6, 20, post, comb, out)
            fns["spread"](out, post, comb, streams)
            streams[:, 0] *= 1.5
        fns["collapse"](streams, *last, 1e-6, 1e-6, out)
        found.append((streams, post, comb, out))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    comb = found[0][2]
    torch.testing.assert_close(comb.sum(dim=1), torch.ones(tokens, count), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(comb.sum(dim=2), torch.ones(tokens, count), rtol=1e-3, atol=1e-3)


def test_sinks_and_tables(instruction_set: str) -> None:
    x, lse, sinks = torch.randn(5, 3, 20), torch.randn(5, 3) * 5.0, torch.randn(3)
    ours, theirs = x.clone(), x.clone()
    bind_apply_sinks(head_dim=20).fn(ours, lse, sinks)
    bind_apply_sinks(head_dim=20, override="reference").fn(theirs, lse, sinks)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    logits, table = torch.randn(5, 8) * 30.0, torch.rand(9, 8).argsort(dim=1)[:, :3].to(torch.int32)
    tokens = torch.tensor([8, 0, 3, 3, 1], dtype=torch.int32)
    found = []
    for override in (None, "reference"):
        ids, weights = torch.empty(5, 3, dtype=torch.int32), torch.empty(5, 3)
        bind_table_route(override=override).fn(logits, tokens, table, 2.5, ids, weights)
        assert torch.equal(ids, table[tokens.long()])
        found.append(weights)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
