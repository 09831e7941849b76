"""Paged attention and its prologue: the reference's numbers, and the same bits however queries are cut into calls."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from stored_values import assert_stored_alike

import tokenspeed_kernel_cpu
from tokenspeed_kernel.ops import bind_attention_decode, bind_attention_extend, bind_gqa_prologue
from tokenspeed_kernel.ops.kv_cache import to_cached

KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@dataclass
class Paged:
    """A cache that is poisoned wherever no sequence has written, and the table of its pages."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]


def _paged(lengths: list[int], heads: int, page_size: int, head_dim: int, dtype: torch.dtype) -> Paged:
    """Keys and values for these lengths, in shuffled blocks of one buffer [block, field, head, token, dim]."""
    pages = [(length + page_size - 1) // page_size for length in lengths]
    blocks = torch.randperm(sum(pages)) + 1
    arena = torch.full((sum(pages) + 1, 2, heads, page_size, head_dim), torch.nan, dtype=dtype)
    table = torch.full((len(lengths), max(pages, default=0) + 2), -7, dtype=torch.int32)
    used = 0
    for row, length in enumerate(lengths):
        table[row, : pages[row]] = blocks[used : used + pages[row]]
        used += pages[row]
        positions = torch.arange(length)
        block = table[row, positions // page_size].long()
        arena[block, :, :, positions % page_size] = torch.randn(length, 2, heads, head_dim).to(dtype)
    return Paged(arena[:, 0], arena[:, 1], table)


def _drop_before_windows(paged: Paged, lengths: list[int], queries: list[int], window: int) -> Paged:
    """The cache without what no query sees: table entries lead outside the memory, keys and values are NaN."""
    table, keys, values = paged.table.clone(), paged.keys.clone(), paged.values.clone()
    for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        first_page, offset = divmod(max(0, length - count + 1 - window), paged.page_size)
        table[row, :first_page] = -0x70000000
        for plane in (keys, values):
            plane[paged.table[row, :first_page].long()] = torch.nan
            if length > 0:
                plane[int(paged.table[row, first_page]), :, :offset] = torch.nan
    return Paged(keys, values, table)


def _bind(name: str, paged: Paged, q_per_kv: int, override: str | None = None):  # type: ignore[no-untyped-def]
    make = {"decode": bind_attention_decode, "extend": bind_attention_extend}[name]
    return make(
        head_dim=paged.keys.shape[3],
        q_per_kv=q_per_kv,
        kernel_page_size=paged.page_size,
        windowed=True,
        kv_dtype=paged.keys.dtype,
        override=override,
    )


def _extend(
    paged: Paged,
    q: torch.Tensor,
    starts: list[int],
    lengths: list[int],
    override: str | None = None,
    window: int = 0,
) -> torch.Tensor:
    bound = _bind("extend", paged, q.shape[1] // paged.keys.shape[1], override)
    assert override or bound.spec.name == "cpu_attention_extend"
    out = torch.full(q.shape, torch.nan)
    starts_tensor, lengths_tensor = (torch.tensor(values, dtype=torch.int32) for values in (starts, lengths))
    bound.fn(q, paged.keys, paged.values, paged.table, starts_tensor, lengths_tensor, q.shape[2] ** -0.5, window, out)
    return out


def _decode(
    paged: Paged, q: torch.Tensor, lengths: list[int], override: str | None = None, window: int = 0
) -> torch.Tensor:
    bound = _bind("decode", paged, q.shape[1] // paged.keys.shape[1], override)
    assert override or bound.spec.name == "cpu_attention_decode"
    out = torch.full(q.shape, torch.nan)
    lengths_tensor = torch.tensor(lengths, dtype=torch.int32)
    bound.fn(q, paged.keys, paged.values, paged.table, lengths_tensor, q.shape[2] ** -0.5, window, out)
    return out


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("heads", "group", "head_dim", "page_size"),
    [(3, 3, 64, 64), (1, 1, 16, 16), (2, 8, 128, 32), (2, 5, 72, 128), (1, 40, 10, 7), (2, 2, 256, 1)],
)
def test_extend_agrees_with_the_reference(
    instruction_set: str, dtype: torch.dtype, heads: int, group: int, head_dim: int, page_size: int
) -> None:
    lengths, queries = [1, 65, 0, 130, 17], [1, 65, 0, 3, 0]
    starts = torch.tensor([0, *queries]).cumsum(0).tolist()
    paged = _paged(lengths, heads, page_size, head_dim, dtype)
    fused = torch.randn(starts[-1], heads * group * head_dim + 24)
    q = fused[:, 8 : 8 + heads * group * head_dim].view(starts[-1], heads * group, head_dim)
    out = _extend(paged, q, starts, lengths)
    torch.testing.assert_close(out, _extend(paged, q, starts, lengths, "reference"), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("width", [1, 3])
def test_decode_agrees_with_the_reference(instruction_set: str, dtype: torch.dtype, width: int) -> None:
    lengths = [5, 64, 65, 0, 700, 1030]
    paged = _paged(lengths, 2, 64, 64, dtype)
    q = torch.randn(len(lengths) * width, 6, 64)
    out = _decode(paged, q, lengths)
    torch.testing.assert_close(out, _decode(paged, q, lengths, "reference"), rtol=2e-5, atol=2e-6)
    assert (out[3 * width : 4 * width] == 0).all()


def test_empty_calls(instruction_set: str) -> None:
    paged = _paged([], 2, 16, 32, torch.float32)
    q = torch.empty(0, 4, 32)
    assert _decode(paged, q, []).shape == _extend(paged, q, [0], []).shape == (0, 4, 32)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_bits_depend_on_the_position_only(instruction_set: str, dtype: torch.dtype) -> None:
    """One prompt over three key splits: whole, in chunks, beside others, token by token, and several at a time."""
    length = 1100
    paged = _paged([length, 40], 1, 32, 48, dtype)
    q = torch.randn(length, 3, 48)
    whole = _extend(paged, q, [0, length, length], [length, 0])
    cuts = [0, 1, 64, 65, 300, 511, 513, 1023, 1100]
    for begin, end in pairwise(cuts):
        other = torch.randn(20, 3, 48)
        both = torch.cat([q[begin:end], other])
        chunk = _extend(paged, both, [0, end - begin, end - begin + 20], [end, 40])
        assert torch.equal(chunk[: end - begin], whole[begin:end]), f"chunk {begin} to {end}"
    for position in (0, 1, 63, 64, 511, 512, 513, 1024, 1099):
        assert torch.equal(_decode(paged, q[position : position + 1], [position + 1])[0], whole[position])
        beside = _decode(paged, torch.cat([q[position : position + 1], q[:1]]), [position + 1, 40])
        assert torch.equal(beside[0], whole[position])
    assert torch.equal(_decode(paged, q[1000:1004], [1004]), whole[1000:1004])


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("heads", "group", "head_dim", "page_size", "window"),
    [(3, 3, 64, 64, 20), (1, 1, 16, 16, 1), (2, 8, 128, 32, 64), (1, 40, 10, 7, 33), (2, 2, 72, 1, 600)],
)
def test_windows_agree_with_the_reference(
    instruction_set: str, dtype: torch.dtype, heads: int, group: int, head_dim: int, page_size: int, window: int
) -> None:
    lengths, queries = [1, 65, 0, 130, 17, 720], [1, 65, 0, 3, 0, 90]
    starts = torch.tensor([0, *queries]).cumsum(0).tolist()
    whole = _paged(lengths, heads, page_size, head_dim, dtype)
    q = torch.randn(starts[-1], heads * group, head_dim)
    paged = _drop_before_windows(whole, lengths, queries, window)
    out = _extend(paged, q, starts, lengths, window=window)
    expected = _extend(paged, q, starts, lengths, "reference", window)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-6)
    paged = _drop_before_windows(whole, lengths, [3] * 6, window)
    out = _decode(paged, q[:18], lengths, window=window)
    torch.testing.assert_close(out, _decode(paged, q[:18], lengths, "reference", window), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("window", [7, 64, 500, 513, 2000])
def test_bits_under_a_window_depend_on_the_position_only(instruction_set: str, window: int) -> None:
    """Whole, in chunks whose pages before the window are gone, token by token, and on several threads."""
    length = 1700
    paged = _paged([length], 1, 32, 48, torch.float32)
    q = torch.randn(length, 3, 48)
    whole = _extend(paged, q, [0, length], [length], window=window)
    if window >= length:
        assert torch.equal(whole, _extend(paged, q, [0, length], [length]))
    for begin, end in pairwise([0, 1, 64, 65, 300, 511, 513, 1023, 1111, 1700]):
        left = _drop_before_windows(paged, [end], [end - begin], window)
        chunk = _extend(left, q[begin:end], [0, end - begin], [end], window=window)
        assert torch.equal(chunk, whole[begin:end]), f"chunk {begin} to {end}"
    before = tokenspeed_kernel_cpu.num_threads()
    try:
        for position in (0, 6, 63, 64, 499, 512, 513, 1024, 1087, 1699):
            left = _drop_before_windows(paged, [position + 1], [1], window)
            for threads in (1, 2):
                tokenspeed_kernel_cpu.set_num_threads(threads)
                alone = _decode(left, q[position : position + 1], [position + 1], window=window)
                assert torch.equal(alone[0], whole[position]), f"position {position}, {threads} threads"
    finally:
        tokenspeed_kernel_cpu.set_num_threads(before)


def _with_rules(name: str, paged: Paged, q_per_kv: int, override: str | None = None):  # type: ignore[no-untyped-def]
    """As _bind, for calls that give sinks and a soft cap."""
    make = {"decode": bind_attention_decode, "extend": bind_attention_extend}[name]
    shape = {"head_dim": paged.keys.shape[3], "q_per_kv": q_per_kv, "kernel_page_size": paged.page_size}
    kv_dtype, float32 = paged.keys.dtype, "float32"
    bound = make(
        **shape, windowed=True, sinks=True, soft_cap=True, kv_dtype=kv_dtype, activations=float32, override=override
    )
    assert override or bound.spec.name == f"cpu_attention_{name}"
    return bound.fn


@pytest.mark.parametrize(("sink", "cap", "window"), [(4.0, 0.0, 70), (None, 1.5, 0), (-3.0, 5.0, 540)])
def test_sinks_and_soft_caps_agree_with_the_reference_and_cut_no_bits(
    instruction_set: str, sink: float | None, cap: float, window: int
) -> None:
    """Over two splits: whole, in chunks, token by token and on several threads. Scores from far below the cap to
    far beyond it; sinks below and above the scores."""
    length, scale = 600, 0.3
    paged = _paged([length, 0], 1, 32, 48, torch.float32)
    q = torch.randn(length, 3, 48) * torch.logspace(-3, 0.3, length).unsqueeze(-1).unsqueeze(-1)
    sinks = None if sink is None else torch.randn(3) + sink

    def extend(begin: int, end: int, override: str | None = None) -> torch.Tensor:
        out = torch.full((end - begin, 3, 48), torch.nan)
        starts = torch.tensor([0, end - begin, end - begin], dtype=torch.int32)
        lengths = torch.tensor([end, 0], dtype=torch.int32)
        fn = _with_rules("extend", paged, 3, override)
        fn(q[begin:end], paged.keys, paged.values, paged.table, starts, lengths, scale, window, out, sinks, cap)
        return out

    whole = extend(0, length)
    torch.testing.assert_close(whole, extend(0, length, "reference"), rtol=1e-4, atol=1e-5)
    for begin, end in pairwise([0, 1, 64, 513, 600]):
        assert torch.equal(extend(begin, end), whole[begin:end]), f"chunk {begin} to {end}"
    before = tokenspeed_kernel_cpu.num_threads()
    try:
        for position in (0, 63, 512, 599):
            for threads in (1, 2):
                tokenspeed_kernel_cpu.set_num_threads(threads)
                out, lengths = torch.full((2, 3, 48), torch.nan), torch.tensor([position + 1, 0], dtype=torch.int32)
                rows = q[[position, 0]]
                fn = _with_rules("decode", paged, 3)
                fn(rows, paged.keys, paged.values, paged.table, lengths, scale, window, out, sinks, cap)
                assert torch.equal(out[0], whole[position]), f"position {position}, {threads} threads"
                assert (out[1] == 0).all()
    finally:
        tokenspeed_kernel_cpu.set_num_threads(before)


def test_neither_pages_nor_threads_change_a_bit(instruction_set: str) -> None:
    first = _paged([1500], 2, 64, 64, torch.float32)
    keys, values = (
        plane[first.table[0, :24].long()].transpose(0, 1).reshape(2, -1, 64) for plane in (first.keys, first.values)
    )
    second = Paged(*(p.reshape(2, 12, 128, 64).transpose(0, 1) for p in (keys, values)), torch.arange(12).int()[None])
    q = torch.randn(1, 6, 64)
    out = _decode(first, q, [1500])
    assert torch.equal(_decode(second, q, [1500]), out)
    before = tokenspeed_kernel_cpu.num_threads()
    try:
        for count in (1, 2, 5):
            tokenspeed_kernel_cpu.set_num_threads(count)
            assert torch.equal(_decode(first, q, [1500]), out), f"{count} threads"
    finally:
        tokenspeed_kernel_cpu.set_num_threads(before)


def test_a_broken_later_key_reaches_no_earlier_query(instruction_set: str) -> None:
    paged = _paged([70], 1, 16, 32, torch.float32)
    q = torch.randn(70, 4, 32)
    sound = _extend(paged, q, [0, 70], [70])
    last = int(paged.table[0, 66 // 16])
    paged.keys[last, :, 66 % 16] = torch.nan
    paged.values[last, :, 66 % 16] = torch.inf
    out = _extend(paged, q, [0, 70], [70])
    assert torch.equal(out[:66], sound[:66])
    assert out[66:].isnan().all()


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "group", "head_dim", "rotary"), [(3, 3, 64, 64), (2, 1, 10, 10), (1, 4, 128, 128), (2, 2, 64, 22)]
)
def test_prologue_agrees_with_the_reference(
    instruction_set: str, dtype: torch.dtype, with_norm: bool, heads: int, group: int, head_dim: int, rotary: int
) -> None:
    arguments = {"head_dim": head_dim, "q_per_kv": group, "qk_norm": with_norm, "kv_dtype": dtype}
    arguments["partial_rotary"] = rotary < head_dim
    native, reference = bind_gqa_prologue(**arguments), bind_gqa_prologue(**arguments, override="reference")
    assert native.spec.name == "cpu_attention_gqa_prologue"
    angles = torch.rand(400, rotary // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    norms = [torch.randn(head_dim), torch.randn(head_dim)] if with_norm else [None, None]
    for tokens in (0, 1, 17, 300):
        fused = torch.randn(tokens, (group + 2) * heads, head_dim)
        positions = torch.randint(0, 400, (tokens,), dtype=torch.int32)
        slots = torch.randperm(29 * 16)[:tokens] + 16
        slots[tokens // 2 :: 5] = torch.tensor(-1)
        results = []
        for bound in (native, reference):
            qkv = fused.clone()
            q, k, v = qkv.split([group * heads, heads, heads], dim=1)
            arena = torch.full((30, 2, heads, 16, head_dim), 7.0, dtype=dtype)
            bound.fn(q, k, v, positions, cos_sin, *norms, 1e-6, arena[:, 0], arena[:, 1], slots)
            results.append((q.clone(), arena[1:].float()))
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
        assert_stored_alike(results[0][1], results[1][1], dtype)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_values_are_rounded_as_the_contract_says(instruction_set: str, dtype: torch.dtype) -> None:
    patterns = torch.randint(-(2**31), 2**31 - 1, (64, 1, 64), dtype=torch.int32).view(torch.float32)
    patterns[:, :, :8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 65519.9, 65520.0, 6.1e-5, 2.98e-8])
    patterns[:32] *= (
        torch.tensor(2.0) ** torch.randint(-12, 12, (32, 1, 64)) / patterns[:32].abs().log2().floor().exp2()
    )
    patterns = torch.where(patterns.isnan(), torch.tensor(1.0), patterns)
    keys, values = (torch.zeros(6, 1, 16, 64, dtype=dtype) for _ in range(2))
    bound = bind_gqa_prologue(head_dim=64, q_per_kv=1, qk_norm=False, kv_dtype=dtype)
    q, cos_sin = torch.zeros(64, 1, 64), torch.ones(1, 64)
    positions, slots = torch.zeros(64, dtype=torch.int32), torch.arange(16, 80)
    bound.fn(q, q.clone(), patterns, positions, cos_sin, None, None, 0.0, keys, values, slots)
    assert torch.equal(values[1:5].reshape(64, 1, 64), to_cached(patterns, dtype))
