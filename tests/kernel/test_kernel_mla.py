"""Latent attention: absorbed it is the attention of the model, splits merge to one whatever their number, folding is a
view."""

import itertools

import pytest
import torch

from tokenspeed_kernel.ops.gemm import bind_head_linear
from tokenspeed_kernel.ops.merge import reference_merge_partials
from tokenspeed_kernel.ops.mla import (
    bind_mla_prologue,
    bind_mla_read,
    reference_mla_decode,
    reference_mla_decode_partial,
    reference_mla_extend,
    reference_mla_prologue,
)
from tokenspeed_kernel.ops.mla_tiling import (
    fold_queries,
    fold_sq_factor,
    partial_workspace_bytes,
    split_count,
    tile_rows_padded,
)
from tokenspeed_kernel.ops.ragged import bind_attention_ragged
from tokenspeed_kernel.ops.rotary_tables import rotary_table
from tokenspeed_kernel.quantized import QuantizedTensor

HEADS, PLAIN, LATENT, ROTARY, VALUE, PAGE = 4, 12, 32, 8, 10, 4


def latent_cache(length, dtype=torch.float32, seed=0):
    """A cache with one row in shuffled pages, NaN around it; and its page table."""
    generator = torch.Generator().manual_seed(seed)
    pages = -(-length // PAGE)
    cache = torch.full((pages + 2, 1, PAGE, LATENT + ROTARY), torch.nan, dtype=dtype)
    table = (torch.randperm(pages, generator=generator) + 1).to(torch.int32)
    for position in range(length):
        entry = torch.randn(LATENT + ROTARY, generator=generator)
        cache[table[position // PAGE], 0, position % PAGE] = entry.to(dtype)
    return cache, table[None]


def lens(*values):
    return torch.tensor(values, dtype=torch.int32)


# ---------------------------------------------------------------- the whole of it


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_operations_together_are_the_attention_of_deepseek(interleaved):
    """Projections by hand, the rest by our operations, against transformers on the same weights: a prompt in two
    chunks, then a token."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=48,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=24,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROTARY,
        qk_nope_head_dim=PLAIN,
        v_head_dim=VALUE,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rope_interleave=interleaved,
        attention_bias=False,
    )
    config._attn_implementation = "eager"
    module, tokens = DeepseekV3Attention(config, 0).eval(), 15
    for norm in (module.q_a_layernorm, module.kv_a_layernorm):
        torch.nn.init.normal_(norm.weight)
    hidden = torch.randn(1, tokens, 48)
    angles = DeepseekV3RotaryEmbedding(config)(hidden, torch.arange(tokens)[None])
    mask = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        expected = module(hidden, angles, mask)[0][0]
        q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden[0]))).reshape(tokens, HEADS, PLAIN + ROTARY)
        compressed = module.kv_a_proj_with_mqa(hidden[0])
        up = module.kv_b_proj.weight.detach().reshape(HEADS, PLAIN + VALUE, LATENT)
        if interleaved:  # what a loader does to the rows of the two weights
            q = torch.cat([q[..., :PLAIN], q[..., PLAIN::2], q[..., PLAIN + 1 :: 2]], dim=-1)
            parts = compressed[:, :LATENT], compressed[:, LATENT::2], compressed[:, LATENT + 1 :: 2]
            compressed = torch.cat(parts, dim=-1)
        found = attention_by_operations(module, q.clone(), compressed, up)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def attention_by_operations(module, q, compressed, up):
    tokens = q.shape[0]
    to_latents = QuantizedTensor.from_dense(
        up[:, :PLAIN].transpose(1, 2).reshape(HEADS * LATENT, PLAIN).contiguous(), "uk"
    )
    to_values = QuantizedTensor.from_dense(up[:, PLAIN:].reshape(HEADS * VALUE, LATENT).contiguous(), "uv")
    cache = torch.full((6, 1, PAGE, LATENT + ROTARY), torch.nan)
    table = torch.tensor([[4, 1, 3, 2]], dtype=torch.int32)
    position = torch.arange(tokens)
    slots = table[0].long()[position // PAGE] * PAGE + position % PAGE
    norm = module.kv_a_layernorm
    sizes = {"latent_dim": LATENT, "rotary_dim": ROTARY, "kv_dtype": torch.float32, "override": "reference"}
    bind_mla_prologue(plain_dim=PLAIN, **sizes)(
        q,
        compressed,
        position.to(torch.int32),
        rotary_table(10000.0, ROTARY, 64),
        norm.weight.detach(),
        norm.variance_epsilon,
        cache,
        slots,
    )
    q_latent, out = torch.empty(2, tokens, HEADS, LATENT)
    bind_head_linear(to_latents, HEADS, override="reference")(q[..., :PLAIN], q_latent)
    q_rope, scale = q[..., PLAIN:], (PLAIN + ROTARY) ** -0.5
    extend = bind_mla_read("mla_extend", kernel_page_size=PAGE, **sizes)
    for first, last in ((0, 9), (9, 14)):
        part, starts = slice(first, last), lens(0, last - first)
        extend(q_latent[part], q_rope[part], cache, table, starts, lens(last), scale, out[part])
    decode = bind_mla_read("mla_decode", kernel_page_size=PAGE, **sizes)
    decode(q_latent[14:], q_rope[14:], cache, table, lens(15), scale, out[14:], None)
    values = torch.empty(tokens, HEADS, VALUE)
    bind_head_linear(to_values, HEADS, override="reference")(out, values)
    return module.o_proj(values.reshape(tokens, HEADS * VALUE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_goes_to_block_zero_and_entries_are_rounded_to_the_cache(dtype):
    tokens = 4
    cache = torch.zeros(3, 1, PAGE, LATENT + ROTARY, dtype=dtype)
    q, compressed = torch.randn(tokens, HEADS, PLAIN + ROTARY), torch.randn(tokens, LATENT + ROTARY)
    plain, key = q[..., :PLAIN].clone(), compressed[:, LATENT:].clone()
    slots = torch.tensor([4, -1, 9, 2])
    table, positions = rotary_table(10000.0, ROTARY, 8), torch.zeros(tokens, dtype=torch.int32)
    reference_mla_prologue(q, compressed, positions, table, torch.ones(LATENT), 1e-6, cache, slots)
    assert torch.equal(q[..., :PLAIN], plain)
    for token, place in ((0, (1, 0, 0)), (2, (2, 0, 1))):
        assert torch.equal(cache[place][LATENT:], key[token].to(dtype))  # position 0 does not turn
        length = cache[place][:LATENT].float().square().mean()
        torch.testing.assert_close(length, torch.tensor(1.0), rtol=2e-2, atol=0.0)
    cache[1, 0, 0], cache[2, 0, 1] = 0.0, 0.0
    assert bool((cache[1:] == 0).all())


# ---------------------------------------------------------------- splits


@pytest.mark.parametrize(("width", "lengths"), [(1, (1,)), (1, (0, 5, 61)), (3, (2, 61, 4)), (4, (33, 0, 8))])
def test_the_result_does_not_depend_on_the_number_of_splits(width, lengths):
    generator = torch.Generator().manual_seed(1)
    cache, table = latent_cache(max(lengths))
    rows = len(lengths)
    tables, seq_lens = table.repeat(rows, 1), lens(*lengths)
    q = torch.randn(rows * width, HEADS, LATENT + ROTARY, generator=generator)
    parts = q[..., :LATENT], q[..., LATENT:], cache, tables, seq_lens, 0.2
    whole, total = torch.full((rows * width, HEADS, LATENT), torch.nan), torch.full((rows * width, HEADS), torch.nan)
    reference_mla_decode(*parts, whole, total)
    for splits in (1, 2, 3, 7, 16, 40):
        partials = torch.full((splits, *whole.shape), torch.nan)
        lse = torch.full((splits, *total.shape), torch.nan)
        reference_mla_decode_partial(*parts, partials, lse)
        empty = torch.isneginf(lse)
        assert bool((partials[empty] == 0.0).all())
        assert not bool(torch.isnan(lse).any())
        merged, merged_lse = torch.empty_like(whole), torch.empty_like(total)
        reference_merge_partials(partials, lse, merged, merged_lse)
        torch.testing.assert_close(merged, whole, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(merged_lse, total, rtol=2e-6, atol=2e-6)
        if splits == 1:
            assert torch.equal(merged, whole)
            assert torch.equal(merged_lse, total)


def test_a_split_beyond_the_keys_is_empty_and_changes_no_bit():
    partials, lse = torch.randn(3, 5, 2, 8), torch.randn(3, 5, 2)
    out, total = torch.empty(5, 2, 8), torch.empty(5, 2)
    reference_merge_partials(partials, lse, out, total)
    for place in range(4):
        more = torch.cat([partials[:place], torch.full((1, 5, 2, 8), torch.nan), partials[place:]])
        more_lse = torch.cat([lse[:place], torch.full((1, 5, 2), -torch.inf), lse[place:]])
        again, again_total = torch.empty_like(out), torch.empty_like(total)
        reference_merge_partials(more, more_lse, again, again_total)
        assert torch.equal(again, out)
        assert torch.equal(again_total, total)


def test_extend_is_decode_of_each_query():
    cache, table = latent_cache(30, torch.bfloat16)
    q = torch.randn(9, HEADS, LATENT + ROTARY, generator=torch.Generator().manual_seed(2))
    parts = q[..., :LATENT], q[..., LATENT:]
    together, alone = torch.full((2, 9, HEADS, LATENT), torch.nan)
    reference_mla_extend(*parts, cache, table, lens(0, 9), lens(30), 0.2, together)
    for index in range(9):
        one = slice(index, index + 1)
        reference_mla_decode(parts[0][one], parts[1][one], cache, table, lens(22 + index), 0.2, alone[one], None)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def test_a_mode_that_reads_no_latents_is_named():
    with pytest.raises(
        ValueError, match=r"'decode' does not read a latent cache; use one of mla_decode, mla_decode_partial"
    ):
        bind_mla_read("decode", latent_dim=512, rotary_dim=64, kernel_page_size=64, kv_dtype=torch.bfloat16)


def test_a_prefix_in_parts_and_a_chunk_merge_to_the_absorbed_extend():
    """What prefill does: keys and values taken out of the latents, a part of the prefix at a time, then the chunk."""
    length, chunk, scale = 27, 6, 0.25
    cache, table = latent_cache(length)
    entries = cache[table[0].long()].reshape(-1, LATENT + ROTARY)[:length]
    generator = torch.Generator().manual_seed(3)
    up_key, up_value = torch.randn(2, HEADS, PLAIN, LATENT, generator=generator)
    q = torch.randn(chunk, HEADS, PLAIN + ROTARY, generator=generator)
    latents, keys = entries[:, :LATENT], entries[:, None, LATENT:].expand(-1, HEADS, -1)
    k = torch.cat([torch.einsum("sl,hpl->shp", latents, up_key), keys], dim=-1)
    v = torch.einsum("sl,hpl->shp", latents, up_value)
    partials, lse = torch.empty(4, chunk, HEADS, PLAIN), torch.empty(4, chunk, HEADS)
    for part, (first, last) in enumerate(((0, 10), (10, 21), (21, 21), (21, 27))):
        ends = lens(0, chunk), lens(0, last - first)
        bound = bind_attention_ragged(
            head_dim=PLAIN + ROTARY, value_dim=PLAIN, q_per_kv=1, causal=first == 21, override="reference"
        )
        bound(q, k[first:last], v[first:last], *ends, scale, partials[part], lse[part], first == 21)
    found = torch.empty(chunk, HEADS, PLAIN)
    reference_merge_partials(partials, lse, found, None)
    q_latent = torch.einsum("thp,hpl->thl", q[..., :PLAIN], up_key)
    out = torch.empty(chunk, HEADS, LATENT)
    reference_mla_extend(q_latent, q[..., PLAIN:], cache, table, lens(0, chunk), lens(length), scale, out)
    torch.testing.assert_close(found, torch.einsum("thl,hpl->thp", out, up_value), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- tiles


@pytest.mark.parametrize(
    ("heads", "q_len", "tile", "factor"),
    [
        (64, 4, 128, 2),  # 128 rows, 2 query groups
        (16, 4, 128, 4),
        (16, 6, 128, 6),
        (16, 9, 128, 3),
        (128, 4, 128, 1),
        (192, 4, 128, 1),  # even alone they do not fit
        (64, 3, 128, 1),  # 2 would fit, and does not divide 3
        (1, 1, 128, 1),
        (32, 8, 64, 2),
    ],
)
def test_fold_sq_factor(heads, q_len, tile, factor):
    assert fold_sq_factor(heads, q_len, tile) == factor


def test_fold_sq_factor_is_the_largest_divisor_that_fits():
    for heads, q_len, tile in itertools.product((1, 3, 16, 24, 64, 128), range(1, 13), (64, 128)):
        factor = fold_sq_factor(heads, q_len, tile)
        assert q_len % factor == 0
        larger = [f for f in range(factor + 1, q_len + 1) if q_len % f == 0]
        assert all(heads * f > tile for f in larger)
        assert factor == 1 or heads * factor <= tile


@pytest.mark.parametrize("arguments", [(0, 1, 128), (64, 0, 128), (64, 1, 0)])
def test_fold_sq_factor_refuses_nothing(arguments):
    with pytest.raises(ValueError, match="must be at least 1"):
        fold_sq_factor(*arguments)


@pytest.mark.parametrize(("batch", "heads", "q_len"), [(3, 64, 4), (1, 16, 6), (2, 128, 3), (0, 64, 4)])
def test_folding_is_a_view_and_no_head_of_a_token_moves(batch, heads, q_len):
    factor = fold_sq_factor(heads, q_len)
    q = torch.randn(batch * q_len, heads, 5)
    folded = fold_queries(q, q_len, factor)
    assert folded.shape == (batch, q_len // factor, factor * heads, 5)
    assert folded.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
    assert folded.data_ptr() == q.data_ptr()
    for row, token, head in itertools.product(range(batch), range(q_len), (0, heads - 1)):
        group, inside = divmod(token, factor)
        assert torch.equal(folded[row, group, inside * heads + head], q[row * q_len + token, head])
    if batch:
        folded[0, 0, 0, 0] = 7.0
        assert q[0, 0, 0] == 7.0


def test_folding_refuses_what_does_not_divide_and_what_is_no_view():
    q = torch.randn(8, 4, 5)
    for q_len, factor in ((4, 3), (3, 1), (4, 0), (0, 1)):
        with pytest.raises(ValueError, match="cannot be folded"):
            fold_queries(q, q_len, factor)
    with pytest.raises(RuntimeError, match="view"):
        fold_queries(torch.randn(4, 8, 5).transpose(0, 1), 4, 2)


def test_rows_splits_and_workspace():
    assert tile_rows_padded(64, 4) == 256  # two groups of a full tile
    assert tile_rows_padded(16, 1) == 128  # an eighth of a tile takes a tile
    assert tile_rows_padded(192, 2) == 512
    assert partial_workspace_bytes(8, 128, 1, 1) == 0
    assert partial_workspace_bytes(8, 128, 1, 4) == 8 * 128 * 4 * 513 * 4
    assert partial_workspace_bytes(2, 16, 4, 3, latent_dim=256) == 2 * 128 * 3 * 257 * 4
    assert split_count(1, 128, 1, pages=1000, processors=132) == 125
    assert split_count(8, 128, 1, pages=1000, processors=132) == 15
    assert split_count(200, 128, 1, pages=1000, processors=132) == 3
    assert split_count(1, 128, 1, pages=3, processors=132) == 3
    assert split_count(1, 128, 1, pages=0, processors=132) == 1
    assert split_count(0, 128, 1, pages=9, processors=4) == 1
