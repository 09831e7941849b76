"""Sinks, soft caps and partial rotary: what the models that have them compute, and what a cap of none leaves alone."""

import dataclasses
import types

import pytest
import torch

from tokenspeed_kernel.ops.attention import (
    bind_attention_decode,
    bind_attention_extend,
    bind_gqa_prologue,
    reference_decode,
    reference_extend,
)
from tokenspeed_kernel.ops.rotary_tables import rotary_table
from tokenspeed_kernel.registry import Band, use_registry
from tokenspeed_kernel.selection import SelectionError

HEADS, PER_KV, WIDTH, PAGE, LENGTH, CHUNK = 2, 3, 16, 4, 29, 6


@pytest.fixture
def row():
    """One row of LENGTH positions in pages: keys and values [heads, L, D], caches and a page table; CHUNK queries."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, HEADS, LENGTH, WIDTH, generator=generator)
    k_cache, v_cache = torch.full((2, 10, HEADS, PAGE, WIDTH), torch.nan)
    table = (torch.randperm(8, generator=generator) + 1).to(torch.int32)[None]
    for p in range(LENGTH):
        k_cache[table[0, p // PAGE], :, p % PAGE] = keys[:, p]
        v_cache[table[0, p // PAGE], :, p % PAGE] = values[:, p]
    q = torch.randn(CHUNK, HEADS * PER_KV, WIDTH, generator=generator)
    return types.SimpleNamespace(keys=keys, values=values, caches=(k_cache, v_cache), table=table, q=q)


def extend(row, window=0, **more):
    out = torch.full_like(row.q, torch.nan)
    starts, lens = torch.tensor([0, CHUNK], dtype=torch.int32), torch.tensor([LENGTH], dtype=torch.int32)
    reference_extend(row.q, *row.caches, row.table, starts, lens, 0.3, window, out, **more)
    again = torch.full_like(row.q, torch.nan)
    reference_decode(row.q, *row.caches, row.table, lens, 0.3, window, again, **more)
    assert torch.equal(again, out)
    return out


def of_transformers(row, forward, window=0, sinks=None, **more):
    position, key = torch.arange(LENGTH - CHUNK, LENGTH).unsqueeze(1), torch.arange(LENGTH)
    hidden = key > position
    if window:
        hidden |= key <= position - window
    mask = torch.zeros(1, 1, CHUNK, LENGTH).masked_fill(hidden, -torch.inf)
    module = types.SimpleNamespace(num_key_value_groups=PER_KV, sinks=sinks, training=False)
    tensors = (row.q.transpose(0, 1)[None], row.keys[None], row.values[None])
    return forward(module, *tensors, mask, scaling=0.3, dropout=0.0, **more)[0][0]


@pytest.mark.parametrize("window", [0, 5, 11])
def test_sinks_are_those_of_gpt_oss(row, window):
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    sinks = torch.randn(HEADS * PER_KV) * 3.0
    expected = of_transformers(row, eager_attention_forward, window, sinks)
    torch.testing.assert_close(extend(row, window, sinks=sinks), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_caps_are_those_of_gemma_2(row, cap):
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    expected = of_transformers(row, eager_attention_forward, softcap=cap)
    torch.testing.assert_close(extend(row, soft_cap=cap), expected, rtol=1e-5, atol=1e-6)


def test_a_sink_takes_weight_from_all_keys_alike_and_is_not_capped(row):
    plain = extend(row, soft_cap=2.0)
    sinks = torch.full((HEADS * PER_KV,), 100.0)
    sinks[0] = -torch.inf
    found = extend(row, soft_cap=2.0, sinks=sinks)
    assert torch.equal(found[:, 0], plain[:, 0])
    assert bool((found[:, 1:].abs() < 1e-30).all())  # a capped sink of at most 2 would leave some


def test_no_sinks_and_no_cap_change_no_bit(row):
    plain = extend(row)
    assert torch.equal(extend(row, sinks=None, soft_cap=0.0), plain)
    assert torch.equal(extend(row, sinks=torch.full((HEADS * PER_KV,), -torch.inf)), plain)


def test_a_row_without_keys_is_zero_whatever_its_sinks():
    out = torch.full((2, 2, 8), torch.nan)
    caches = torch.full((2, 3, 1, 4, 8), torch.nan)
    table, lens = torch.full((2, 1), -9, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    reference_decode(torch.randn(2, 2, 8), *caches, table, lens, 1.0, 0, out, torch.tensor([1.0, 2.0]), 0.0)
    assert bool((out == 0.0).all())


@pytest.mark.parametrize("flag", ["sinks", "soft_cap"])
@pytest.mark.parametrize("bind", [bind_attention_decode, bind_attention_extend])
def test_a_kernel_that_never_heard_of_it_is_not_chosen(registry_of_one_old_kernel, bind, flag):
    """A kernel written before the trait existed takes the default only."""
    sizes = {"head_dim": 64, "q_per_kv": 1, "kernel_page_size": 16, "kv_dtype": torch.float32}
    assert bind(**sizes).spec.name.startswith("old_")
    assert bind(**sizes, **{flag: True}).spec.name.startswith("reference_")
    with pytest.raises(SelectionError, match=f"{flag} is True"):
        bind(**sizes, **{flag: True}, override="old")


@pytest.fixture
def registry_of_one_old_kernel(reference_registry):
    for mode in ("decode", "extend"):
        reference = reference_registry.reference("attention", mode)
        traits = {n: b for n, b in reference.spec.traits.items() if n not in ("sinks", "soft_cap")}
        changes = {"name": f"old_{mode}", "solution": "old", "band": Band.PORTABLE, "traits": traits}
        reference_registry.register(dataclasses.replace(reference.spec, **changes), reference.fn, "test")
    with use_registry(reference_registry):
        yield


def test_partial_rotary_is_that_of_phi():
    """The first half of a head turns, the rest goes into the cache as it is."""
    from transformers.models.phi.modeling_phi import apply_rotary_pos_emb

    tokens, rotary = 5, 8
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(tokens, HEADS * PER_KV, WIDTH, generator=generator)
    k, v = torch.randn(2, tokens, HEADS, WIDTH, generator=generator)
    positions = torch.tensor([3, 0, 20, 7, 11])
    table = rotary_table(10000.0, rotary, 32)
    cos, sin = (part[positions].repeat(1, 2)[None] for part in table.chunk(2, dim=1))
    heads = [whole[..., :rotary].transpose(0, 1)[None] for whole in (q, k)]
    turned = [part[0].transpose(0, 1) for part in apply_rotary_pos_emb(*heads, cos, sin)]
    expected = [torch.cat([part, whole[..., rotary:]], dim=-1) for part, whole in zip(turned, (q, k), strict=True)]
    k_cache, v_cache = torch.zeros(2, 3, HEADS, PAGE, WIDTH)
    slots = torch.arange(PAGE, PAGE + tokens)
    bound = bind_gqa_prologue(
        head_dim=WIDTH,
        q_per_kv=PER_KV,
        qk_norm=False,
        partial_rotary=True,
        kv_dtype=torch.float32,
        override="reference",
    )
    bound(q, k, v, positions.int(), table, None, None, 1e-6, k_cache, v_cache, slots)
    torch.testing.assert_close(q, expected[0], rtol=1e-6, atol=1e-6)
    cached = k_cache[1:].transpose(1, 2).reshape(-1, HEADS, WIDTH)[:tokens]
    torch.testing.assert_close(cached, expected[1], rtol=1e-6, atol=1e-6)
