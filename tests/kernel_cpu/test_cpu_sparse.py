"""The indexer chooses what the reference chooses; attention over what it selected has, where that is everything, the
bits of plain latent attention."""

import pytest
import torch

from tokenspeed_kernel.binding import Bound
from tokenspeed_kernel.ops.mla import bind_mla_read
from tokenspeed_kernel.ops.sparse import bind_index_select, bind_mla_selected

KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def paged(lengths: list[int], width: int, page: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache that is NaN wherever no sequence has an entry, in shuffled blocks, and the table of its pages."""
    pages = [-(-length // page) for length in lengths]
    blocks = (torch.randperm(sum(pages)) + 1).to(torch.int32)
    cache = torch.full((sum(pages) + 1, 1, page, width), torch.nan, dtype=dtype)
    table = torch.full((len(lengths), max(pages) + 1), -0x70000000, dtype=torch.int32)
    for row, (length, own) in enumerate(zip(lengths, blocks.split(pages), strict=True)):
        table[row, : pages[row]] = own
        places = torch.arange(length)
        cache[own.long()[places // page], 0, places % page] = torch.randn(length, width).to(dtype)
    return cache, table


def starts_of(queries: list[int]) -> torch.Tensor:
    return torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def select_bound(heads: int, cache: torch.Tensor, override: str | None = None) -> Bound:
    return bind_index_select(
        index_dim=cache.shape[3],
        index_heads=heads,
        kernel_page_size=cache.shape[2],
        kv_dtype=cache.dtype,
        override=override,
    )


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(("heads", "width", "page", "chosen", "stride"), [(32, 64, 16, 20, 1), (9, 31, 7, 130, 4)])
def test_choices_agree_with_the_reference(
    instruction_set: str, dtype: torch.dtype, heads: int, width: int, page: int, chosen: int, stride: int
) -> None:
    """Rows longer than one stretch of scores, and rows that see less than may be chosen."""
    lengths, queries = [2100 * stride, 65, 0, 20], [3, 65, 0, 1]
    cache, table = paged([length // stride for length in lengths], width, page, dtype)
    total = sum(queries)
    q, weights = torch.randn(total, heads, width + 5)[..., :width].contiguous(), torch.randn(total, heads)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    found = {}
    for override in (None, "reference"):
        bound, out = select_bound(heads, cache, override), torch.full((total, chosen), -7, dtype=torch.int32)
        bound.fn(q, weights, cache, table, starts_of(queries), seq_lens, stride, out)
        found[bound.spec.solution] = out
    assert set(found) == {"cpu_native", "reference"}
    ours, theirs = found["cpu_native"], found["reference"]
    same = (ours.unsqueeze(2) == theirs.unsqueeze(1)).any(2).float().mean()
    assert same > 0.999, "more than rounding at the last place is different"
    assert ((ours >= 0).sum(1) == (theirs >= 0).sum(1)).all()
    assert (ours[:, 1:] > ours[:, :-1]).logical_or(ours[:, 1:] == -1).all()


def test_a_nan_is_chosen_first_and_zeros_of_either_sign_are_equal(instruction_set: str) -> None:
    cache, table = paged([6], 4, 4, torch.float32)
    cache[table[0, 0], 0, 2] = torch.nan
    q, weights = torch.zeros(1, 1, 4), torch.tensor([[-1.0]])
    out = torch.empty(1, 2, dtype=torch.int32)
    one = torch.tensor([0, 1], dtype=torch.int32)
    select_bound(1, cache).fn(q, weights, cache, table, one, torch.tensor([6], dtype=torch.int32), 1, out)
    assert out.tolist() == [[0, 2]]


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_all_selected_is_plain_latent_attention_bit_by_bit(instruction_set: str, dtype: torch.dtype) -> None:
    lengths, queries, heads, latent = [700, 40, 1], [5, 40, 1], 70, 48
    cache, table = paged(lengths, latent + 8, 16, dtype)
    q = torch.randn(sum(queries), heads, latent + 8)
    parts = q[..., :latent], q[..., latent:]
    common = {"latent_dim": latent, "rotary_dim": 8, "kernel_page_size": 16, "kv_dtype": dtype}
    plain, chosen = torch.full((2, sum(queries), heads, latent), torch.nan)
    seq_lens, starts = torch.tensor(lengths, dtype=torch.int32), starts_of(queries)
    bind_mla_read("mla_extend", **common).fn(*parts, cache, table, starts, seq_lens, 0.2, plain)  # type: ignore[arg-type]
    selected = torch.full((sum(queries), 800), -1, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        for index in range(count):
            seen = length - count + index + 1
            selected[int(starts[row]) + index, :seen] = torch.arange(seen)
    bind_mla_selected(**common).fn(*parts, cache, table, starts, selected, 0.2, chosen, None)  # type: ignore[arg-type]
    assert torch.equal(plain, chosen)
