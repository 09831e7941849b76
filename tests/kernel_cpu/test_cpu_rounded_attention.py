"""Attention with queries and weights rounded to bfloat16: only where it was asked for; float32 sums; the same bits
however queries are cut into calls; nothing unseen is touched."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

import tokenspeed_kernel_cpu
from tokenspeed_kernel.binding import Bound
from tokenspeed_kernel.ops import bind_attention_decode, bind_attention_extend
from tokenspeed_kernel.ops.gemm import ACTIVATIONS_VARIABLE
from tokenspeed_kernel.ops.mla import bind_mla_read
from tokenspeed_kernel.platform import current_platform

CACHES = [torch.bfloat16, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def _rounding_set() -> Iterator[None]:
    if "avx512_bf16" not in current_platform().features:
        pytest.skip("this machine, or the set chosen for it, has no AVX-512 BF16")
    with tokenspeed_kernel_cpu.use_instruction_set("avx512_bf16"):
        yield


def _cache(
    length: int, heads: int, page_size: int, width: int, fields: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, fields, heads, page, width], NaN wherever no position lies, and the table of one row in random order."""
    pages = -(-length // page_size)
    table = (torch.randperm(pages) + 1).to(torch.int32).unsqueeze(0)
    arena = torch.full((pages + 1, fields, heads, page_size, width), torch.nan, dtype=dtype)
    positions = torch.arange(length)
    block = table[0, positions // page_size].long()
    arena[block, :, :, positions % page_size] = torch.randn(length, fields, heads, width).to(dtype)
    return arena, table


def _run(
    bound: Bound, q: torch.Tensor, arena: torch.Tensor, table: torch.Tensor, length: int, window: int
) -> torch.Tensor:
    """The last q.rows positions of one row by decode or extend."""
    out = torch.full(q.shape, torch.nan)
    starts = (torch.tensor([0, q.shape[0]], dtype=torch.int32),) if bound.spec.mode == "extend" else ()
    lengths = torch.tensor([length], dtype=torch.int32)
    bound.fn(q, arena[:, 0], arena[:, 1], table, *starts, lengths, q.shape[2] ** -0.5, window, out)
    return out


def _bind(mode: str, arena: torch.Tensor, group: int) -> Bound:
    make = {"decode": bind_attention_decode, "extend": bind_attention_extend}[mode]
    bound = make(
        head_dim=arena.shape[4],
        q_per_kv=group,
        kernel_page_size=arena.shape[3],
        windowed=True,
        kv_dtype=arena.dtype,
        activations="bfloat16",
    )
    assert bound.spec.name == f"cpu_attention_{mode}_bf16"
    return bound


def _gathered(arena: torch.Tensor, table: torch.Tensor, length: int, field: int) -> torch.Tensor:
    """float64 [heads, length, width]."""
    return arena[table[0].long(), field].transpose(0, 1).flatten(1, 2)[:, :length].double()


def _within_rounded_weights(
    out: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int
) -> None:
    """Against float64 with scaled, then rounded queries: what is left is the rounding of the weights."""
    tokens, q_heads, _ = q.shape
    length, group = keys.shape[1], q_heads // keys.shape[0]
    rows = (q * scale).bfloat16().double().reshape(tokens, keys.shape[0], group, -1)
    scores = torch.einsum("thgd,hld->thgl", rows, keys)
    position = torch.arange(length - tokens, length).unsqueeze(1)
    hidden = torch.arange(length) > position
    if window:
        hidden |= torch.arange(length) <= position - window
    weights = torch.softmax(scores.masked_fill(hidden[:, None, None], -torch.inf), dim=-1)
    expected = torch.einsum("thgl,hld->thgd", weights, values).reshape(out.shape)
    bound = (2.0**-8 + 1e-4) * torch.einsum("thgl,hld->thgd", weights, values.abs()).reshape(out.shape) + 1e-6
    assert bool(((out.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize(
    ("heads", "group", "head_dim", "page_size"),
    [(2, 3, 64, 64), (1, 1, 16, 16), (2, 8, 128, 32), (1, 40, 10, 7), (1, 5, 72, 1)],
)
def test_queries_and_weights_are_rounded_and_nothing_else(
    heads: int, group: int, head_dim: int, page_size: int, window: int, dtype: torch.dtype
) -> None:
    length, tokens = 203, 75
    arena, table = _cache(length, heads, page_size, head_dim, 2, dtype)
    q = torch.randn(tokens, heads * group, head_dim)
    planes = [_gathered(arena, table, length, field) for field in (0, 1)]
    for mode in ("decode", "extend"):
        out = _run(_bind(mode, arena, group), q, arena, table, length, window)
        _within_rounded_weights(out, q, *planes, head_dim**-0.5, window)


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("window", [0, 63, 514])
def test_bits_depend_on_the_position_only(window: int, dtype: torch.dtype) -> None:
    length = 700
    arena, table = _cache(length, 1, 16, 48, 2, dtype)
    q = torch.randn(length, 3, 48)
    extend, decode = _bind("extend", arena, 3), _bind("decode", arena, 3)
    whole = _run(extend, q, arena, table, length, window)
    before = tokenspeed_kernel_cpu.num_threads()
    try:
        for threads in (1, 2):
            tokenspeed_kernel_cpu.set_num_threads(threads)
            for begin, end in pairwise([0, 1, 64, 65, 300, 511, 513, 700]):
                chunk = _run(extend, q[begin:end], arena, table, end, window)
                assert torch.equal(chunk, whole[begin:end]), f"chunk {begin} to {end}"
            for position in (0, 1, 62, 63, 64, 511, 512, 513, 699):
                alone = _run(decode, q[position : position + 1], arena, table, position + 1, window)
                assert torch.equal(alone[0], whole[position]), f"position {position}"
    finally:
        tokenspeed_kernel_cpu.set_num_threads(before)


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("broken", [65, 66])
def test_a_broken_later_key_reaches_no_earlier_query(broken: int, dtype: torch.dtype) -> None:
    """Keys are taken in pairs: the other half of a query's last pair must not be touched."""
    arena, table = _cache(70, 1, 16, 32, 2, dtype)
    q, extend = torch.randn(70, 4, 32), _bind("extend", arena, 4)
    sound = _run(extend, q, arena, table, 70, 0)
    place = int(table[0, broken // 16])
    arena[place, 0, :, broken % 16], arena[place, 1, :, broken % 16] = torch.nan, torch.inf
    out = _run(extend, q, arena, table, 70, 0)
    assert torch.equal(out[:broken], sound[:broken])
    assert out[broken:].isnan().all()
    windowed = _run(extend, q, arena, table, 70, 3)
    assert windowed[broken : broken + 3].isnan().all()
    assert not windowed[:broken].isnan().any() and not windowed[broken + 3 :].isnan().any()


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize(
    ("heads", "latent", "rotary", "page_size"), [(16, 64, 16, 16), (5, 31, 6, 7), (130, 17, 4, 32)]
)
def test_latent_attention_is_rounded_in_the_same_way(
    heads: int, latent: int, rotary: int, page_size: int, dtype: torch.dtype
) -> None:
    length, tokens = 150, 9
    arena, table = _cache(length, 1, page_size, latent + rotary, 1, dtype)
    q = torch.randn(tokens, heads, latent + rotary)
    sizes = {"latent_dim": latent, "rotary_dim": rotary, "kernel_page_size": page_size, "kv_dtype": dtype}
    lengths = torch.tensor([length], dtype=torch.int32)
    keys = _gathered(arena, table, length, 0)
    results = []
    for mode in ("mla_decode", "mla_extend", "mla_decode_partial"):
        bound = bind_mla_read(mode, **sizes, activations="bfloat16")
        assert bound.spec.name == f"cpu_attention_{mode}_bf16"
        starts = (torch.tensor([0, tokens], dtype=torch.int32),) if mode == "mla_extend" else ()
        out, lse = torch.full((1, tokens, heads, latent), torch.nan), torch.full((1, tokens, heads), torch.nan)
        outputs = {"mla_decode": (out[0], lse[0]), "mla_extend": (out[0],), "mla_decode_partial": (out, lse)}[mode]
        bound.fn(q[..., :latent], q[..., latent:], arena[:, 0], table, *starts, lengths, 0.15, *outputs)
        _within_rounded_weights(out[0], q, keys, keys[..., :latent], 0.15, 0)
        results.append(out[0])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_none_rounds_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ACTIVATIONS_VARIABLE, raising=False)
    heads = {"head_dim": 16, "q_per_kv": 2, "kernel_page_size": 16}
    for make, plain in (
        (bind_attention_decode, "cpu_attention_decode"),
        (bind_attention_extend, "cpu_attention_extend"),
    ):
        assert make(**heads, kv_dtype=torch.bfloat16).spec.name == plain
        monkeypatch.setenv(ACTIVATIONS_VARIABLE, "bfloat16")
        assert make(**heads, kv_dtype=torch.bfloat16).spec.name == f"{plain}_bf16"
        assert make(**heads, kv_dtype=torch.bfloat16, activations="float32").spec.name == plain
        assert make(**heads, kv_dtype=torch.float16).spec.name == plain
        assert make(**heads, kv_dtype=torch.bfloat16, override=plain).spec.name == plain
        monkeypatch.delenv(ACTIVATIONS_VARIABLE)
    with pytest.raises(ValueError, match="activations is 'int3'; attention knows float32 and bfloat16"):
        bind_attention_decode(**heads, kv_dtype=torch.bfloat16, activations="int3")


def test_another_set_put_in_force_meanwhile_is_an_error() -> None:
    arena, table = _cache(20, 1, 16, 16, 2)
    decode = _bind("decode", arena, 2)
    with (
        tokenspeed_kernel_cpu.use_instruction_set("avx512"),
        pytest.raises(RuntimeError, match="avx512 has no attention with rounded activations"),
    ):
        _run(decode, torch.randn(1, 2, 16), arena, table, 20, 0)
