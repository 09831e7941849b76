"""Caches of 8 bits by Triton's interpreter: every element is read exactly, every number written as the nearest, by
devices that have the type and by those that take its bits."""

import pytest
import torch

from tokenspeed_kernel.numerics.stored import as_stored
from tokenspeed_kernel.numerics.weights import random_weight
from tokenspeed_kernel.ops.attention import reference_decode, reference_extend, reference_gqa_prologue
from tokenspeed_kernel.ops.compressed import reference_compress
from tokenspeed_kernel.ops.mla import reference_mla_decode, reference_mla_extend, reference_mla_prologue
from tokenspeed_kernel.ops.mla_expanded import make_reference_mla_extend_expanded
from tokenspeed_kernel.ops.sparse import reference_index_prologue, reference_index_select, reference_mla_selected
from tokenspeed_kernel_triton import attention, entries, expanded, rotary, sparse
from tokenspeed_kernel_triton.configs import WITHOUT_E4M3
from tokenspeed_kernel_triton.device import compiling_for, loadable

E4M3, PAGE = torch.float8_e4m3fn, 4
KINDS = ("sm_90", "gfx942")
"""One architecture that has the type, one that takes bits."""


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20261130)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def same(found, expected):
    """Bit by bit, but that a NaN is a NaN."""
    nan = expected.float().isnan()
    assert torch.equal(found.float().isnan(), nan)
    assert torch.equal(found.view(torch.uint8)[~nan], expected.view(torch.uint8)[~nan])


def paged(*fields, rows=2, pages=12):
    """A cache of random elements for each width in ``fields``, strided, NaN in the null block, and a page table."""
    table = 1 + torch.randperm(rows * pages).view(rows, pages).to(torch.int32)
    caches = []
    for heads, width in fields:
        whole = torch.randn(rows * pages + 1, 2, heads, PAGE, width).to(E4M3)
        whole.view(torch.uint8)[0] = 127
        caches.append(whole[:, 1])
    return *caches, table


def test_one_of_the_architectures_takes_bits():
    assert [kind in WITHOUT_E4M3 for kind in KINDS] == [False, True]
    cache = torch.empty(2, dtype=E4M3)
    for kind, dtype in zip(KINDS, (E4M3, torch.uint8), strict=True):
        with compiling_for(kind):
            assert loadable(cache).dtype is dtype


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize("kernel", [attention.decode, attention.rounded_decode])
def test_every_element_is_read_as_the_number_it_is(architecture, kernel):
    """A row of one key gives its value: all 256 elements, both zeros and both NaN among them."""
    cache = torch.zeros(2, 2, 1, PAGE, 256, dtype=E4M3)
    values = torch.arange(256, dtype=torch.uint8)
    cache.view(torch.uint8)[1, 1, 0, 0] = values
    out = torch.empty(1, 1, 256)
    with compiling_for(architecture):
        kernel(torch.randn(1, 1, 256), cache[:, 0], cache[:, 1], ints(1)[None], ints(1), 1.0, 0, out)
    torch.testing.assert_close(out[0, 0], values.view(E4M3).float(), rtol=0.0, atol=0.0, equal_nan=True)
    assert bool(out[0, 0, [127, 255]].isnan().all())


@pytest.mark.parametrize("architecture", KINDS)
def test_every_number_is_written_as_the_nearest_element(architecture):
    """Every element, every middle of two, the numbers beside both, of both signs; what is beyond 448; NaN."""
    elements = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    points = torch.cat([elements, (elements[1:] + elements[:-1]) / 2])
    up, down = (torch.nextafter(points, torch.tensor(far)) for far in (torch.inf, -torch.inf))
    beyond = torch.tensor([448.1, 464.0, 470.0, 1e30, torch.inf, torch.nan, 1e-45, 2.0**-30])
    x = torch.cat([points, up, down, beyond, torch.randn(2000) * torch.logspace(-5, 3, 2000)])
    x = torch.cat([x, -x])[None]
    cache = torch.zeros(2, 1, 1, x.shape[1], dtype=E4M3)
    with compiling_for(architecture):
        entries.write(x, cache, torch.tensor([1]))
    same(cache[1, 0, 0], as_stored(x[0], E4M3))


@pytest.mark.parametrize("architecture", KINDS)
def test_prologues_write_what_the_references_write(architecture):
    qkv, norms = torch.randn(3, 6, 20) * 90.0, torch.randn(2, 20)
    compressed, latents, norm = torch.randn(3, 20), torch.randn(3, 2, 26), torch.randn(14) * 200.0
    qkv[0, 5, :4] = torch.tensor([1e4, -470.0, torch.inf, torch.nan])
    positions, slots, angles = ints(0, 7, 3), torch.tensor([9, -1, 18]), torch.randn(8, 6)
    grouped = torch.zeros(2, 2, 5, 1, PAGE, 20).to(E4M3)
    latent, index = torch.zeros(2, 2, 5, 1, PAGE, 20).to(E4M3)
    calls = (
        (reference_gqa_prologue, reference_mla_prologue, reference_index_prologue),
        (rotary.gqa_prologue, rotary.mla_prologue, entries.index_prologue),
    )
    for place, (gqa, mla, indexed) in enumerate(calls):
        own = qkv.clone()
        with compiling_for(architecture):
            caches = grouped[place]
            gqa(own[:, :4], own[:, 4:5], own[:, 5:], positions, angles, *norms, 1e-5, caches[0], caches[1], slots)
            mla(latents.clone(), compressed.clone(), positions, angles, norm, 1e-6, latent[place], slots)
            indexed(latents[..., :20].clone(), qkv[:, 0].clone(), positions, angles, *norms, 1e-5, index[place], slots)
    for found in (grouped[:, 0], grouped[:, 1], latent, index):
        same(found[1, 1:], found[0, 1:])
        assert bool(found[1, 2].float().any()) and not found[1, 1].float().any()
    assert grouped[1, 1, 2, 0, 1, :3].tolist() == [448.0, -448.0, 448.0]
    assert bool(grouped[1, 1, 2, 0, 1, 3].isnan())


@pytest.mark.parametrize("architecture", KINDS)
def test_entries_of_several_tokens_are_written_so_out_of_bfloat16(architecture):
    values, gates = torch.randn(2, 25, 1, PAGE, 11).bfloat16() * 30.0
    table = 1 + torch.randperm(24).view(2, 12).to(torch.int32)
    read = (values, gates, table, ints(0, 6, 10), ints(6, 23), torch.randn(3, 11), torch.randn(11) * 200.0, 1e-6)
    angles, caches = torch.randn(40, 6), torch.zeros(2, 5, 1, PAGE, 11, dtype=E4M3)
    with compiling_for(architecture):
        for fn, cache in ((reference_compress, caches[0]), (entries.compress, caches[1])):
            fn(*read, angles, cache, torch.arange(12, 22), False)
    same(caches[1, 1:], caches[0, 1:])
    assert bool(caches[1, 1:].float().any())


def compared(reference, kernel, inputs, more=(), shape=(4, 6, 20), bound=2e-6):
    """That both write the same within ``bound``, given ``inputs`` before the output and ``more`` behind it."""
    found, expected = torch.empty(2, *shape)
    reference(*inputs, expected, *more)
    kernel(*inputs, found, *more)
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    assert bool(expected.any())


@pytest.mark.parametrize(
    ("architecture", "rounded"),
    [
        ("sm_90", True),
        ("gfx942", False),
        pytest.param("sm_90", False, marks=pytest.mark.long),
        pytest.param("gfx942", True, marks=pytest.mark.long),
    ],
)
def test_readers_agree_with_the_references_over_the_same_bytes(architecture, rounded):
    """Windows, sinks, a soft cap, splits, rows with queries of their own number, selected entries."""
    k_cache, v_cache, table = paged((2, 20), (2, 20))
    cache, entry_table = paged((1, 38))
    q, latent, sinks, bound = torch.randn(4, 6, 20), torch.randn(4, 6, 38), torch.randn(6), 2e-2 if rounded else 2e-6
    starts, lens, parts = ints(0, 3, 4), ints(41, 17), (latent[..., :32], latent[..., 32:], cache, entry_table)
    selected = torch.full((4, 9), -1, dtype=torch.int32)
    for query, count in enumerate((9, 4, 1, 6)):
        selected[query, :count] = torch.randperm(17)[:count].sort().values.to(torch.int32)
    kernels = ("decode", "extend", "mla_decode", "mla_extend")
    decode, extend, mla_decode, mla_extend = (
        getattr(attention, f"rounded_{kernel}" if rounded else kernel) for kernel in kernels
    )
    mla_selected = sparse.rounded_mla_selected if rounded else sparse.mla_selected
    with compiling_for(architecture):
        grouped = (q, k_cache, v_cache, table)
        compared(reference_decode, decode, (*grouped, lens, 0.2, 9), (sinks,), bound=bound)
        compared(reference_extend, extend, (*grouped, starts, lens, 0.2, 0), (None, 5.0), bound=bound)
        wide = (4, 6, 32)
        compared(reference_mla_decode, mla_decode, (*parts, lens, 0.2), (None,), wide, bound)
        compared(reference_mla_extend, mla_extend, (*parts, starts, lens, 0.2), (), wide, bound)
        compared(reference_mla_selected, mla_selected, (*parts, starts, selected, 0.2), (None,), wide, bound)


@pytest.mark.parametrize("architecture", KINDS)
def test_an_indexer_chooses_the_same_entries(architecture):
    cache, table = paged((1, 16))
    cache.view(torch.uint8)[table[0, 0], 0, 2, 0] = 255  # a NaN, above every number
    read = (torch.randn(4, 3, 16), torch.randn(4, 3), cache, table, ints(0, 3, 4), ints(41, 17), 1)
    found, expected = torch.empty((2, 4, 5), dtype=torch.int32)
    reference_index_select(*read, expected)
    with compiling_for(architecture):
        sparse.index_select(*read, found)
    assert torch.equal(found, expected)
    assert bool((found[:3] == 2).any(1).all())


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize(
    ("name", "latent", "rounded"),
    [
        ("bfloat16", 24, True),
        pytest.param("float32", 17, False, marks=pytest.mark.long),
        pytest.param("gguf_q5_1", 32, True, marks=pytest.mark.long),
        pytest.param("gguf_mxfp4", 32, False, marks=pytest.mark.long),
        pytest.param("gguf_mxfp4", 32, True, marks=pytest.mark.long),
    ],
)
def test_latents_are_expanded_out_of_it(architecture, name, latent, rounded):
    """By each way in which a weight is read."""
    heads, plain, value, rotary = 2, 12, 20, 6
    weight = random_weight(name, heads * (plain + value), latent, torch.Generator().manual_seed(5)).weight
    cache, table = paged((1, latent + rotary))
    inputs = (torch.randn(4, heads, plain + rotary), cache, table, ints(0, 3, 4), ints(41, 17), 0.2)
    make = expanded.make_rounded_mla_extend_expanded if rounded else expanded.make_mla_extend_expanded
    with compiling_for(architecture):
        kernel = make(weight, heads)
        reference = make_reference_mla_extend_expanded(weight, heads)
        compared(reference, kernel, inputs, shape=(4, heads, value), bound=2e-2 if rounded else 3e-6)
