"""Latent attention, its prologue and the merge of parts: the reference's numbers, and the same bits however queries are
cut into calls."""

import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from stored_values import assert_stored_alike

import tokenspeed_kernel_cpu
from tokenspeed_kernel.binding import Bound
from tokenspeed_kernel.ops.merge import bind_merge_partials
from tokenspeed_kernel.ops.mla import bind_mla_prologue, bind_mla_read

KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
SIZES = [(16, 64, 16, 16), (5, 31, 6, 7), (1, 48, 2, 1), (70, 32, 8, 64), (130, 17, 4, 32)]
"""Heads, latent, rotary, page size; more heads than a tile has rows among them."""


@dataclass
class Latents:
    """A cache that is NaN wherever no sequence has written, in shuffled blocks, and the table of its pages."""

    cache: torch.Tensor
    table: torch.Tensor
    latent: int

    @property
    def rotary(self) -> int:
        return self.cache.shape[3] - self.latent

    def bind(self, mode: str, override: str | None = None) -> Bound:
        bound = bind_mla_read(
            mode,
            latent_dim=self.latent,
            rotary_dim=self.rotary,
            kernel_page_size=self.cache.shape[2],
            kv_dtype=self.cache.dtype,
            override=override,
        )
        assert override or bound.spec.name == f"cpu_attention_{mode}"
        return bound


def _latents(lengths: list[int], latent: int, rotary: int, page_size: int, dtype: torch.dtype) -> Latents:
    pages = [-(-length // page_size) for length in lengths]
    blocks = torch.randperm(sum(pages)) + 1
    arena = torch.full((sum(pages) + 1, 3, page_size, latent + rotary), torch.nan, dtype=dtype)
    table = torch.full((len(lengths), max(pages, default=0) + 2), -0x70000000, dtype=torch.int32)
    used = 0
    for row, length in enumerate(lengths):
        table[row, : pages[row]] = blocks[used : used + pages[row]]
        used += pages[row]
        positions = torch.arange(length)
        block = table[row, positions // page_size].long()
        arena[block, 1, positions % page_size] = torch.randn(length, latent + rotary).to(dtype)
    return Latents(arena[:, 1:2], table, latent)


def _queries(tokens: int, heads: int, latents: Latents) -> torch.Tensor:
    """Of both parts together, in a wider buffer: neither rows nor heads are dense."""
    return torch.randn(tokens, heads, latents.cache.shape[3] + 5)


def _split(q: torch.Tensor, latents: Latents) -> tuple[torch.Tensor, torch.Tensor]:
    return q[..., : latents.latent], q[..., latents.latent : latents.cache.shape[3]]


def _decode(
    latents: Latents, q: torch.Tensor, lengths: list[int], override: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full((*q.shape[:2], latents.latent), torch.nan)
    lse = torch.full(q.shape[:2], torch.nan)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    fn = latents.bind("mla_decode", override).fn
    fn(*_split(q, latents), latents.cache, latents.table, seq_lens, 0.2, out, lse)
    return out, lse


def _extend(
    latents: Latents, q: torch.Tensor, starts: list[int], lengths: list[int], override: str | None = None
) -> torch.Tensor:
    out = torch.full((*q.shape[:2], latents.latent), torch.nan)
    query_start, seq_lens = (torch.tensor(values, dtype=torch.int32) for values in (starts, lengths))
    fn = latents.bind("mla_extend", override).fn
    fn(*_split(q, latents), latents.cache, latents.table, query_start, seq_lens, 0.2, out)
    return out


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(("heads", "latent", "rotary", "page_size"), SIZES)
def test_decode_agrees_with_the_reference(
    instruction_set: str, dtype: torch.dtype, heads: int, latent: int, rotary: int, page_size: int
) -> None:
    lengths = [5, 64, 65, 0, 1, 530]
    latents = _latents(lengths, latent, rotary, page_size, dtype)
    for width in (1, 3):
        q = _queries(len(lengths) * width, heads, latents)
        found, expected = _decode(latents, q, lengths), _decode(latents, q, lengths, "reference")
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=3e-6)
        assert (found[0][3 * width : 4 * width] == 0).all()
        assert found[1][3 * width : 4 * width].isneginf().all()


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(("heads", "latent", "rotary", "page_size"), SIZES)
def test_extend_agrees_with_the_reference(
    instruction_set: str, dtype: torch.dtype, heads: int, latent: int, rotary: int, page_size: int
) -> None:
    lengths, queries = [1, 65, 0, 130, 17, 3], [1, 65, 0, 3, 0, 5]
    starts = torch.tensor([0, *queries]).cumsum(0).tolist()
    latents = _latents(lengths, latent, rotary, page_size, dtype)
    q = _queries(starts[-1] + 2, heads, latents)
    out = _extend(latents, q, starts, lengths)
    expected = _extend(latents, q, starts, lengths, "reference")
    torch.testing.assert_close(out[:-2], expected[:-2], rtol=3e-5, atol=3e-6)
    assert out[-2:].isnan().all()  # they belong to no row


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_bits_depend_on_the_position_only(instruction_set: str, dtype: torch.dtype) -> None:
    """One prompt over two key splits: whole, in chunks, token by token, beside others, on several threads."""
    length = 600
    latents = _latents([length, 40], 40, 8, 32, dtype)
    q = _queries(length, 3, latents)
    whole = _extend(latents, q, [0, length, length], [length, 0])
    for begin, end in pairwise([0, 1, 64, 65, 300, 511, 513, 600]):
        both = torch.cat([q[begin:end], _queries(20, 3, latents)])
        chunk = _extend(latents, both, [0, end - begin, end - begin + 20], [end, 40])
        assert torch.equal(chunk[: end - begin], whole[begin:end]), f"chunk {begin} to {end}"
    before = tokenspeed_kernel_cpu.num_threads()
    try:
        for threads in (1, 2, 5):
            tokenspeed_kernel_cpu.set_num_threads(threads)
            for position in (0, 1, 63, 64, 511, 512, 599):
                here = q[position : position + 1]
                assert torch.equal(_decode(latents, here, [position + 1])[0][0], whole[position])
                beside = _decode(latents, torch.cat([here, q[:1]]), [position + 1, 40])[0]
                assert torch.equal(beside[0], whole[position])
            assert torch.equal(_decode(latents, q[500:504], [504])[0], whole[500:504])
    finally:
        tokenspeed_kernel_cpu.set_num_threads(before)


def test_many_heads_give_the_bits_of_each_alone(instruction_set: str) -> None:
    """Tiles of many rows widen their keys first and cut the heads; the arithmetic is that of one row."""
    latents = _latents([77], 33, 6, 16, torch.bfloat16)
    q = _queries(1, 150, latents)
    together = _decode(latents, q, [77])
    for head in (0, 1, 63, 64, 74, 75, 149):
        alone = _decode(latents, q[:, head : head + 1], [77])
        assert torch.equal(alone[0][0, 0], together[0][0, head])
        assert torch.equal(alone[1][0, 0], together[1][0, head])


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_parts_merge_to_the_whole(instruction_set: str, dtype: torch.dtype, parts: int) -> None:
    lengths, width = [0, 1, 33, 700, 100], 2
    latents = _latents(lengths, 24, 8, 16, dtype)
    q = _queries(len(lengths) * width, 9, latents)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    results = []
    for override in (None, "reference"):
        out = torch.full((parts, *q.shape[:2], 24), torch.nan)
        lse = torch.full(out.shape[:3], torch.nan)
        fn = latents.bind("mla_decode_partial", override).fn
        fn(*_split(q, latents), latents.cache, latents.table, seq_lens, 0.2, out, lse)
        results.append((out, lse))
    (out, lse), (expected, expected_lse) = results
    torch.testing.assert_close(out, expected, rtol=3e-5, atol=3e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    assert (out[lse.isneginf()] == 0).all()
    merge = bind_merge_partials(head_dim=24)
    assert merge.spec.name == "cpu_attention_merge_partials"
    merged, total = torch.full(out.shape[1:], torch.nan), torch.full(lse.shape[1:], torch.nan)
    merge.fn(out, lse, merged, total)
    whole, whole_lse = _decode(latents, q, lengths)
    torch.testing.assert_close(merged, whole, rtol=3e-5, atol=3e-6)
    torch.testing.assert_close(total, whole_lse, rtol=1e-5, atol=1e-5)


def test_merging_keeps_a_part_that_is_alone_and_looks_at_no_empty_one(instruction_set: str) -> None:
    partials, lse = torch.randn(4, 3, 2, 37), torch.randn(4, 3, 2)
    lse[1:, 0] = lse[:3, 1] = lse[:, 2, 1] = -torch.inf
    lse[2, 2, 0] = 150.0
    partials[lse.isneginf()] = torch.nan
    out, total = torch.full((3, 2, 37), torch.nan), torch.full((3, 2), torch.nan)
    bind_merge_partials(head_dim=37).fn(partials, lse, out, total)
    assert torch.equal(out[0], partials[0, 0]) and torch.equal(total[0], lse[0, 0])
    assert torch.equal(out[1], partials[3, 1]) and torch.equal(total[1], lse[3, 1])
    assert (out[2, 1] == 0).all() and total[2, 1].isneginf()
    torch.testing.assert_close(out[2, 0], partials[2, 2, 0], rtol=1e-6, atol=1e-6)
    again = torch.full_like(out, torch.nan)
    bind_merge_partials(head_dim=37).fn(partials, lse, again, None)
    assert torch.equal(again, out)
    single, single_lse = partials[:1, :1].contiguous(), lse[:1, :1].contiguous()
    kept = single.clone()
    bind_merge_partials(head_dim=37).fn(single, single_lse, single[0], None)  # in place
    assert torch.equal(single, kept)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(("heads", "plain", "latent", "rotary"), [(4, 128, 512, 64), (3, 5, 31, 6), (1, 16, 64, 2)])
def test_prologue_agrees_with_the_reference(
    instruction_set: str, dtype: torch.dtype, heads: int, plain: int, latent: int, rotary: int
) -> None:
    traits = {"latent_dim": latent, "rotary_dim": rotary, "plain_dim": plain, "kv_dtype": dtype}
    native, reference = bind_mla_prologue(**traits), bind_mla_prologue(**traits, override="reference")
    assert native.spec.name == "cpu_attention_mla_prologue"
    angles = torch.rand(400, rotary // 2) * 6
    cos_sin, norm = torch.cat([angles.cos(), angles.sin()], dim=1), torch.randn(latent)
    for tokens in (0, 1, 17, 130):
        q, compressed = torch.randn(tokens, heads, plain + rotary), torch.randn(tokens, latent + rotary + 7)
        positions = torch.randint(0, 400, (tokens,), dtype=torch.int32)
        slots = torch.randperm(13 * 16)[:tokens] + 16
        slots[tokens // 2 :: 5] = torch.tensor(-1)
        results = []
        for bound in (native, reference):
            turned, held = q.clone(), compressed.clone()
            cache = torch.full((14, 1, 16, latent + rotary), 7.0, dtype=dtype)
            bound.fn(turned, held[:, : latent + rotary], positions, cos_sin, norm, 1e-6, cache, slots)
            results.append((turned, cache[1:].float()))
            assert torch.equal(held[:, latent + rotary :], compressed[:, latent + rotary :])
        assert torch.equal(results[0][0][..., :plain], q[..., :plain])
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
        assert_stored_alike(results[0][1], results[1][1], dtype)


def test_empty_calls(instruction_set: str) -> None:
    latents = _latents([], 16, 4, 16, torch.float32)
    q = _queries(0, 4, latents)
    assert _decode(latents, q, [])[0].shape == _extend(latents, q, [0], []).shape == (0, 4, 16)


DEBUG_CALLS = """
import torch
from tokenspeed_kernel.ops.merge import bind_merge_partials
from tokenspeed_kernel.ops.mla import bind_mla_prologue, bind_mla_read
from tokenspeed_kernel_cpu.checks import KernelArgumentError
f, i = torch.zeros, lambda *s: torch.zeros(*s, dtype=torch.int32)
sizes = dict(latent_dim=8, rotary_dim=4, kv_dtype=torch.float32)
decode, partial, extend = (bind_mla_read(mode, **sizes, kernel_page_size=4).fn
                           for mode in ("mla_decode", "mla_decode_partial", "mla_extend"))
prologue, merge = bind_mla_prologue(**sizes, plain_dim=2).fn, bind_merge_partials(head_dim=8).fn
cache, table, lengths = f(3, 1, 4, 12), torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
q, rope, out, lse = f(1, 2, 8), f(1, 2, 4), f(1, 2, 8), f(1, 2)
wrong = [
    (decode, (q, rope, f(3, 1, 4, 11), table, lengths, 1.0, out, lse)),
    (decode, (q, f(2, 2, 4), cache, table, lengths, 1.0, out, lse)),
    (decode, (q, rope, cache, table + 1, lengths, 1.0, out, lse)),
    (decode, (q, rope, cache, table, lengths + 4, 1.0, out, lse)),
    (decode, (q, rope, cache, table, lengths, 1.0, out, f(2, 2))),
    (decode, (f(3, 2, 8), f(3, 2, 4), cache, table.repeat(2, 1), lengths.repeat(2), 1.0, f(3, 2, 8), None)),
    (partial, (q, rope, cache, table, lengths, 1.0, f(2, 1, 2, 8), f(3, 1, 2))),
    (extend, (q, rope, cache, table, torch.tensor([1, 0], dtype=torch.int32), lengths, 1.0, out)),
    (prologue, (f(1, 2, 6), f(1, 12), i(1) + 3, f(3, 4), f(8), 1e-5, cache, i(1).long())),
    (prologue, (f(1, 2, 6), f(1, 12), i(1), f(3, 4), f(8), 1e-5, cache, i(1).long() + 12)),
    (prologue, (f(1, 2, 6), f(1, 11), i(1), f(3, 4), f(8), 1e-5, cache, i(1).long())),
    (merge, (f(2, 1, 2, 8), f(3, 1, 2), out, lse)),
    (merge, (f(0, 1, 2, 8), f(0, 1, 2), out, lse)),
]
for fn, arguments in wrong:
    try:
        fn(*arguments)
    except KernelArgumentError as error:
        print(error)
    else:
        raise SystemExit(f"let pass: {fn} {arguments}")
decode(q, rope, cache, table, lengths, 1.0, out, lse)
partial(q, rope, cache, table, lengths, 1.0, f(3, 1, 2, 8), f(3, 1, 2))
extend(q, rope, cache, table, i(2) + torch.tensor([0, 1], dtype=torch.int32), lengths, 1.0, out)
prologue(f(1, 2, 6), f(1, 12), i(1), f(3, 4), f(8), 1e-5, cache, i(1).long())
merge(f(2, 1, 2, 8), f(2, 1, 2), out, None)
"""


def test_debug_mode_checks_arguments() -> None:
    result = subprocess.run(
        [sys.executable, "-c", DEBUG_CALLS],
        env={**os.environ, "TOKENSPEED_KERNEL_DEBUG": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    messages = result.stdout.splitlines()
    assert len(messages) == 13
    assert messages[0] == "latent_cache has shape [0, 1, 4, 11]; it must be [0, 1, 4, 12]"
    assert "page_table holds values from 2 to 3; they must lie in [0, 3)" in messages
    assert "3 queries do not divide among 2 rows" in messages
    assert "slots holds values from 12 to 12; they must lie in [0, 12)" in messages
    assert "partials has no parts; there must be one at least" in messages
