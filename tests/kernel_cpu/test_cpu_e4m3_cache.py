"""A cache of 8 bits: every element is read for the number that it is, by whatever path, on every instruction set."""

import pytest
import torch

from tokenspeed_kernel.ops import bind_attention_extend, bind_compress, bind_write
from tokenspeed_kernel.ops.mla import bind_mla_read
from tokenspeed_kernel.ops.mla_expanded import bind_mla_extend_expanded
from tokenspeed_kernel.ops.sparse import bind_index_select
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.quantized import QuantizedTensor

E4M3 = torch.float8_e4m3fn
PAGE = 4


def every_element(width: int) -> torch.Tensor:
    """[blocks, PAGE, width], behind a null block: all 256 elements, in order, then again."""
    count = -(-256 // (PAGE * width))
    codes = torch.arange(count * PAGE * width) % 256
    held = torch.full((count + 1, PAGE, width), 0x7F, dtype=torch.uint8)
    held[1:] = codes.to(torch.uint8).view(count, PAGE, width)
    return held.view(E4M3)


def same(found: torch.Tensor, elements: torch.Tensor) -> None:
    expected = elements.double().float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.fixture(params=["float32", "bfloat16"])
def activations(request: pytest.FixtureRequest, instruction_set: str) -> str:
    if request.param == "bfloat16" and instruction_set != "avx512_bf16":
        pytest.skip("rounds nowhere else")
    if request.param == "bfloat16" and "avx512_bf16" not in current_platform().features:
        pytest.skip("the platform chosen has no AVX-512 BF16")
    return str(request.param)


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("group", [1, 3, 9])
@pytest.mark.parametrize("width", [64, 46, 6])
def test_grouped_attention_to_one_key_gives_its_value(activations: str, group: int, width: int, numbers: bool) -> None:
    """A window of one position: the weight is 1. Groups of 9 have their values widened beforehand; keys and values that
    are numbers all are widened in a way of their own."""
    values = every_element(width).unsqueeze(1)
    if numbers:
        values = torch.where(values.float().isnan(), 0.0, values.float()).to(E4M3)
    keys = torch.zeros_like(values.float()).to(E4M3)
    tokens = (values.shape[0] - 1) * PAGE
    table = torch.arange(1, values.shape[0], dtype=torch.int32).unsqueeze(0)
    bound = bind_attention_extend(
        head_dim=width, q_per_kv=group, kernel_page_size=PAGE, windowed=True, kv_dtype=E4M3, activations=activations
    )
    assert bound.spec.name == "cpu_attention_extend" + ("_bf16" if activations == "bfloat16" else "")
    out, ends = torch.empty(tokens, group, width), torch.tensor([tokens], dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    bound.fn(torch.randn(tokens, group, width), keys, values, table, starts, ends, 0.3, 1, out)
    for head in range(group):
        same(out[:, head], values[1:, 0].reshape(tokens, width))


@pytest.mark.parametrize("width", [64, 46])
def test_scores_are_those_of_the_keys(activations: str, width: int) -> None:
    """One key a row and its value 1: a key that is no number makes the output none; lse is the score itself."""
    entries = every_element(width + 2).unsqueeze(1)
    bound = bind_mla_read(
        "mla_decode", latent_dim=width, rotary_dim=2, kernel_page_size=1, kv_dtype=E4M3, activations=activations
    )
    flat = entries[1:].reshape(-1, 1, 1, width + 2)
    rows = flat.shape[0]
    cache = torch.cat([flat[:1], flat])
    table, ones = torch.arange(1, rows + 1, dtype=torch.int32).unsqueeze(1), torch.ones(rows, dtype=torch.int32)
    q = torch.randint(-3, 4, (rows, 2, width + 2)).float()
    out, lse = torch.empty(rows, 2, width), torch.empty(rows, 2)
    bound.fn(q[..., :width], q[..., width:], cache, table, ones, 1.0, out, lse)
    keys = flat[:, 0, 0].double()
    scores = torch.einsum("rhd,rd->rh", q.double(), keys)
    size = torch.einsum("rhd,rd->rh", q.double().abs(), keys.abs())
    sound = ~keys.isnan().any(dim=1)
    assert 0 < int((~sound).sum()) < rows
    assert bool(((lse.double() - scores).abs()[sound] <= 1e-5 * size[sound]).all())
    assert bool(lse[~sound].isnan().all())
    same(out[sound][:, 1], flat[sound][:, 0, 0, :width])


def test_one_key_that_is_none_shows_where_it_is_seen_only(instruction_set: str) -> None:
    """Among thousands of numbers, in the last byte of the last key of a tile: queries before it are as they were."""
    length, width = 200, 48
    cache = torch.randn(1 + length // PAGE, 2, 1, PAGE, width).to(E4M3)
    table, starts = torch.arange(1, 51, dtype=torch.int32).unsqueeze(0), torch.tensor([0, length], dtype=torch.int32)
    bound = bind_attention_extend(head_dim=width, q_per_kv=2, kernel_page_size=PAGE, kv_dtype=E4M3)
    q, ends = torch.randn(length, 2, width), torch.tensor([length], dtype=torch.int32)
    outs = []
    for broken in (0x00, 0xFF):
        cache.view(torch.uint8)[32, :, 0, 3, width - 1] = broken  # position 127
        outs.append(torch.empty(length, 2, width))
        bound.fn(q, cache[:, 0], cache[:, 1], table, starts, ends, 0.1, 0, outs[-1])
    assert torch.equal(outs[0][:127], outs[1][:127])
    assert bool(outs[1][127:].isnan().all()) and not outs[0].isnan().any()


def test_an_indexer_scores_the_numbers_that_lie_there(instruction_set: str) -> None:
    """Of entries that are alike but for one element, each chosen in turn: the largest first, NaN before all."""
    cache = torch.zeros(257, 1, 1, 24).to(E4M3)
    cache[1:, 0, 0, 9] = torch.arange(256).to(torch.uint8).view(E4M3)
    table, starts = torch.arange(1, 257, dtype=torch.int32).unsqueeze(0), torch.tensor([0, 1], dtype=torch.int32)
    lengths = torch.tensor([256], dtype=torch.int32)
    q, weights = torch.ones(1, 1, 24), torch.ones(1, 1)
    bound = bind_index_select(index_dim=24, index_heads=1, kernel_page_size=1, kv_dtype=E4M3)
    assert bound.spec.name == "cpu_attention_index_select"
    for count in (2, 3, 40, 128):
        selected = torch.empty(1, count, dtype=torch.int32)
        bound.fn(q, weights, cache, table, starts, lengths, 1, selected)
        assert selected.tolist() == [[*range(0x7F - (count - 2), 0x80), 0xFF]]


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_expanded_keys_and_values_are_made_of_them(activations: str, weights: str) -> None:
    """An up-projection of ones and zeros: values are elements of the latent."""
    latent, rotary = 60, 4
    entries = every_element(latent + rotary)
    entries = torch.where(entries.float().isnan(), 0.0, entries.float()).to(E4M3).unsqueeze(1)
    picks = torch.arange(latent).roll(7)
    up = torch.cat([torch.zeros(2, latent), torch.eye(latent)[picks]]).to(getattr(torch, weights))
    bound = bind_mla_extend_expanded(
        QuantizedTensor.from_dense(up, "picks"),
        1,
        rotary_dim=rotary,
        plain_dim=2,
        kernel_page_size=PAGE,
        kv_dtype=E4M3,
        activations=activations,
    )
    assert bound is not None and bound.spec.solution.startswith("cpu_native")
    tokens = (entries.shape[0] - 1) * PAGE
    table = torch.arange(1, entries.shape[0], dtype=torch.int32).unsqueeze(0)
    for token in range(tokens):
        page = entries[1 + token // PAGE : 2 + token // PAGE].roll(-(token % PAGE), 2)
        out = torch.empty(1, 1, latent)
        ends = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        bound.fn(torch.randn(1, 1, 2 + rotary), torch.cat([page, page]), table[:, :1], *ends, 0.1, out)
        same(out[0, 0], page[0, 0, 0, :latent][picks])


def test_every_element_is_written_as_itself(instruction_set: str) -> None:
    elements = every_element(31)
    slots = torch.arange(PAGE, elements.shape[0] * PAGE)
    cache = torch.zeros(elements.shape[0], 1, PAGE, 31, dtype=torch.uint8).view(E4M3)
    bound = bind_write(entry_dim=31, kv_dtype=E4M3)
    assert bound.spec.name == "cpu_attention_write"
    bound.fn(elements[1:].double().float().reshape(-1, 31), cache, slots)
    same(cache[1:, 0].double().float(), elements[1:])


def test_entries_are_made_of_rows_in_sixteen_bits(instruction_set: str) -> None:
    """A row that 8 bits could not hold makes its entry."""
    rows = torch.full((2, 2, 1, 4, 32), 1.015625, dtype=torch.bfloat16)
    rows[1, 0, 0, 3, 5] = 1000.0
    bound = bind_compress(entry_dim=32, overlapping=False, kernel_page_size=4, kv_dtype=E4M3)
    assert bound.spec.name == "cpu_attention_compress"
    entries, starts = torch.zeros(2, 1, 2, 32, dtype=torch.uint8).view(E4M3), torch.tensor([0, 1], dtype=torch.int32)
    table, length = torch.ones(1, 1, dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    shape = (torch.zeros(4, 32), torch.ones(32), 0.0, torch.tensor([[1.0, 0.0]]).repeat(8, 1), entries)
    bound.fn(rows[:, 0], rows[:, 1] * 0, table, starts, length, *shape, torch.tensor([2 * 4]), False)
    total = rows[1, 0, 0].double().mean(dim=0)
    expected = total * total.square().mean().rsqrt()
    same(entries[1, 0, 0].double().float(), expected.float().to(E4M3))
