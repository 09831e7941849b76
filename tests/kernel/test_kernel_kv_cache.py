"""What a cache of 8 bits holds, and that the cases find kernels that write or read it otherwise."""

import dataclasses
import itertools
import math

import pytest
import torch

from tokenspeed_kernel.numerics import verify_kernel
from tokenspeed_kernel.numerics.cases import Close
from tokenspeed_kernel.numerics.stored import as_stored, stored
from tokenspeed_kernel.ops import kv_cache
from tokenspeed_kernel.ops.attention import reference_decode, reference_extend, reference_gqa_prologue
from tokenspeed_kernel.ops.compressed import reference_write
from tokenspeed_kernel.ops.kv_cache import attention_signature, row_dtype, to_cached
from tokenspeed_kernel.ops.mla import reference_mla_extend, reference_mla_prologue
from tokenspeed_kernel.ops.sparse import reference_index_prologue
from tokenspeed_kernel.plugins.cli import main
from tokenspeed_kernel.registry import Band, RegisteredKernel
from tokenspeed_kernel.signature import FormatError

E4M3 = torch.float8_e4m3fn


def elements():
    """The 127 numbers that are not negative, out of their bits: one sign, four bits of exponent, three of fraction."""
    return [
        math.ldexp(bits & 7, -9) if bits < 8 else math.ldexp(8 + (bits & 7), (bits >> 3) - 10) for bits in range(127)
    ]


def test_what_is_stored_is_the_nearest_element():
    """Exhaustive: every element, every middle of two (the even one of them), and a little beside both."""
    numbers = elements()
    assert to_cached(torch.tensor(numbers), E4M3).view(torch.uint8).tolist() == list(range(127))
    for bits, (low, high) in enumerate(itertools.pairwise(numbers)):
        middle = torch.tensor((low + high) / 2)
        around = torch.stack([torch.nextafter(middle, torch.tensor(0.0)), middle, torch.nextafter(middle, middle * 2)])
        even = bits if bits % 2 == 0 else bits + 1
        assert to_cached(around, E4M3).view(torch.uint8).tolist() == [bits, even, bits + 1]
        assert to_cached(-around, E4M3).view(torch.uint8).tolist() == [128 + bits, 128 + even, 129 + bits]


def test_what_is_too_large_becomes_the_largest_and_nan_stays():
    beyond = torch.tensor([448.0, 460.0, 464.0, 480.0, 1e30, torch.inf])
    assert to_cached(beyond, E4M3).float().tolist() == [448.0] * 6
    assert to_cached(-beyond, E4M3).float().tolist() == [-448.0] * 6
    assert bool(to_cached(torch.tensor([torch.nan, -torch.nan]), E4M3).isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_wider_caches_are_rounded_as_ever(dtype):
    x = torch.tensor([1e6, -3.14159, torch.inf, 2.0**-30])
    assert torch.equal(to_cached(x, dtype), x.to(dtype))


def test_the_truth_of_the_cases_rounds_alike_in_another_way():
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-5, 4, 200_000)
    assert torch.equal(as_stored(x, E4M3).view(torch.uint8), to_cached(x, E4M3).view(torch.uint8))


def test_a_bound_of_what_is_stored_is_as_small_as_can_be():
    """One element where no middle of two lies within the bound of the number, else those on both sides."""
    exact = Close(torch.tensor([1.05, 1.0625, 500.0]).double(), torch.tensor([1e-3, 1e-6, 9.0]).double())
    found = stored(exact, E4M3)
    assert found.value.tolist() == [1.0, 1.0625, 448.0]
    assert found.bound.tolist() == [0.0, 0.0625, 0.0]


def test_formats_of_a_cache():
    assert str(attention_signature(E4M3)) == "input=float32, kv=float8_e4m3fn"
    with pytest.raises(FormatError, match="cannot be stored as 'float8_e5m2'"):
        attention_signature(torch.float8_e5m2)
    assert row_dtype(E4M3) is torch.bfloat16
    assert row_dtype(torch.float32) is torch.float32


def test_the_command_line_knows_the_format(capsys):
    main(["explain", "attention.extend", "--format", "kv=float8_e4m3fn"])
    assert "formats    input=float32, kv=float8_e4m3fn" in capsys.readouterr().out


# ---------------------------------------------------------------- kernels that are wrong


def truncated(x, _dtype):
    """To the element below in size, as by dropping bits."""
    small = (x.clamp(-448.0, 448.0).contiguous().view(torch.int32) & ~0xFFFFF).view(torch.float32)
    return small.to(E4M3)


def rounded_twice(x, _dtype):
    return x.clamp(-448.0, 448.0).bfloat16().to(E4M3)


def not_saturated(x, _dtype):
    return torch.where(x.abs() < 464.0, x, torch.nan).to(E4M3)


def without_nan(x, _dtype):
    return torch.nan_to_num(x, nan=0.0).clamp(-448.0, 448.0).to(E4M3)


def away_from_zero_at_ties(x, _dtype):
    return (x.clamp(-448.0, 448.0) * (1.0 + 2.0**-22)).to(E4M3)


def scaled(x, _dtype):
    return (x / 2.0).clamp(-448.0, 448.0).to(E4M3)


def verified(reference_registry, mode, fn):
    reference = reference_registry.reference("attention", mode)
    signatures = frozenset({attention_signature(E4M3)})
    spec = dataclasses.replace(reference.spec, name="planted", solution="planted", band=Band.PLUGIN)
    kernel = RegisteredKernel(dataclasses.replace(spec, signatures=signatures), fn, "test")
    return verify_kernel(kernel, reference_registry)


@pytest.mark.parametrize(
    ("mode", "reference"),
    [
        ("write", reference_write),
        ("gqa_prologue", reference_gqa_prologue),
        ("mla_prologue", reference_mla_prologue),
        ("index_prologue", reference_index_prologue),
    ],
)
@pytest.mark.parametrize("wrong", [truncated, scaled, rounded_twice])
def test_every_writer_that_rounds_otherwise_is_found(reference_registry, monkeypatch, mode, reference, wrong):
    monkeypatch.setitem(reference.__globals__, "to_cached", wrong)
    assert verified(reference_registry, mode, reference).failures
    monkeypatch.undo()
    assert verified(reference_registry, mode, reference).passed


@pytest.mark.parametrize("wrong", [not_saturated, without_nan, away_from_zero_at_ties])
@pytest.mark.parametrize(("mode", "reference"), [("write", reference_write), ("gqa_prologue", reference_gqa_prologue)])
def test_a_writer_that_is_wrong_at_the_ends_is_found(reference_registry, monkeypatch, mode, reference, wrong):
    monkeypatch.setitem(reference.__globals__, "to_cached", wrong)
    assert verified(reference_registry, mode, reference).failures


def read_with_flushed_small_numbers(cache):
    """As a conversion by shifting bits that takes numbers below the normal ones for zeros."""
    return torch.where(cache.float().abs() < 2.0**-6, 0.0, cache.float())


def decode_that_flushes(q, k_cache, v_cache, *rest):
    reference_decode(q, read_with_flushed_small_numbers(k_cache), read_with_flushed_small_numbers(v_cache), *rest)


def extend_that_scales(q, k_cache, v_cache, *rest):
    reference_extend(q, k_cache, v_cache.float() * 1.001, *rest)


def mla_extend_in_e5m2(q_latent, q_rope, latent_cache, *rest):
    reference_mla_extend(q_latent, q_rope, latent_cache.float().to(torch.float8_e5m2), *rest)


@pytest.mark.parametrize(
    ("mode", "fn"),
    [("decode", decode_that_flushes), ("extend", extend_that_scales), ("mla_extend", mla_extend_in_e5m2)],
)
def test_a_reader_that_takes_elements_for_others_is_found(reference_registry, mode, fn):
    assert verified(reference_registry, mode, fn).failures


def test_a_reader_reads_what_lies_there():
    """The same over the numbers in float32: to the bit, for the reference."""
    generator = torch.Generator().manual_seed(3)
    cache = to_cached(torch.randn(2, 4, 2, 16, 32, generator=generator), E4M3)
    q, tables, lengths = torch.randn(2, 6, 32, generator=generator), torch.tensor([[1, 2], [3, 0]]), [20, 9]
    outs = torch.empty(2, 2, 6, 32)
    for kind, out in zip((cache, cache.float()), outs, strict=True):
        reference_decode(q, *kind, tables.int(), torch.tensor(lengths, dtype=torch.int32), 0.2, 0, out)
    assert torch.equal(*outs)
    assert kv_cache.KV_FORMATS[-1].storage_dtype == "float8_e4m3fn"
