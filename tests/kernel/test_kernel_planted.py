"""Every operation has cases that notice a wrong kernel: a planted error in each, and mistakes that people make."""

import dataclasses
import itertools

import pytest
import torch

from tokenspeed_kernel.numerics import verify_kernel
from tokenspeed_kernel.numerics.__main__ import main
from tokenspeed_kernel.numerics.cases import cases_for
from tokenspeed_kernel.ops.activation import GatedActivation, reference_clamped_swiglu
from tokenspeed_kernel.ops.attention import reference_decode, reference_extend, reference_gqa_prologue
from tokenspeed_kernel.ops.gemm import make_reference_head_linear
from tokenspeed_kernel.ops.merge import reference_merge_partials
from tokenspeed_kernel.ops.mla import (
    reference_mla_decode,
    reference_mla_decode_partial,
    reference_mla_extend,
    reference_mla_prologue,
)
from tokenspeed_kernel.ops.moe import experts_signature, make_reference_experts, make_reference_route
from tokenspeed_kernel.ops.paged_reference import ScoreRules, attend_row
from tokenspeed_kernel.ops.quantize import reference_restore, reference_rows
from tokenspeed_kernel.ops.ragged import reference_ragged
from tokenspeed_kernel.ops.rotary import reference_apply
from tokenspeed_kernel.registry import Band, RegisteredKernel, global_registry, use_registry
from tokenspeed_kernel.signature import BFLOAT16
from tokenspeed_kernel.traits import OneOf

OUTPUT_ARGUMENT = {
    "activation.add": 1,
    "activation.clamped_silu": 3,
    "activation.clamped_swiglu": 4,
    "activation.sigmoid_gate": 2,
    "activation.gelu_tanh_and_mul": 2,
    "activation.scale_rows": 3,
    "activation.silu_and_mul": 2,
    "attention.apply_sinks": 0,
    "attention.compress": 9,
    "attention.decode": 7,
    "attention.extend": 8,
    "attention.gqa_prologue": 8,
    "attention.index_prologue": 7,
    "attention.index_select": 7,
    "attention.merge_partials": 2,
    "attention.mla_decode": 6,
    "attention.mla_decode_partial": 6,
    "attention.mla_extend": 7,
    "attention.mla_extend_expanded": 6,
    "attention.mla_prologue": 6,
    "attention.mla_selected": 7,
    "attention.ragged": 6,
    "attention.write": 1,
    "embedding.lookup": 1,
    "gemm.head_linear": 1,
    "gemm.linear": 1,
    "hyper.begin": 1,
    "hyper.collapse": 6,
    "hyper.mix": 9,
    "hyper.spread": 3,
    "moe.experts": 3,
    "moe.route": 2,
    "moe.table_route": 5,
    "norm.fused_add_rms": 4,
    "norm.gated_rms": 5,
    "norm.rms": 3,
    "quantize.restore": 3,
    "quantize.rows": 3,
    "recurrent.causal_conv": 7,
    "recurrent.gated_delta": 12,
    "rotary.apply": 0,
    "sampling.apply_penalties": 0,
    "sampling.apply_token_mask": 0,
    "sampling.has_nan": 1,
    "sampling.logprobs": 3,
    "sampling.sample": 8,
    "sampling.verify": 5,
    "sampling.verify_proposals": 13,
}
"""Where an output stands in the call of each operation."""

OPERATIONS = [operation.name for operation in global_registry().operations()]


def reference_of(operation):
    return global_registry().reference(*operation.split("."))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_has_cases_for_every_format_and_every_choice(operation):
    """Every signature of its reference, and of each trait that is a choice every value that the reference takes."""
    spec = reference_of(operation).spec
    choices = {name: set(bound.values) for name, bound in spec.traits.items() if isinstance(bound, OneOf)}
    for signature in spec.signatures:
        cases = cases_for(operation, signature, 0)
        assert len(cases) >= 1
        for name, values in choices.items():
            choices[name] = values - {case.traits[name] for case in cases if name in case.traits}
    assert not any(choices.values()), choices


def with_a_small_error(fn, place):
    """``fn`` with two per cent added to the last column of an output (integers: 1, truth values: the other)."""

    def planted(*arguments):
        fn(*arguments)
        column = arguments[place][..., -1]
        if column.dtype is torch.bool:
            column.logical_not_()
        elif column.dtype.is_floating_point:
            column.copy_((column.float() * 1.02).to(column.dtype))
        else:
            column += 1

    return planted


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_error_planted_in_any_operation_makes_the_command_fail(operation, capsys):
    reference = reference_of(operation)
    fn, place = reference.fn, OUTPUT_ARGUMENT[operation]
    planted = with_a_small_error(fn, place)
    if global_registry().operation(*operation.split(".")).bound:
        planted = lambda **values: with_a_small_error(fn(**values), place)  # noqa: E731
    few = frozenset(sorted(reference.spec.signatures, key=str)[:1])
    spec = dataclasses.replace(reference.spec, name="planted", solution="planted", band=Band.PLUGIN, signatures=few)
    registry = global_registry().copy()
    registry.register(spec, planted, "test")
    with use_registry(registry):
        status = main(["--kernel", "planted"])
    printed = capsys.readouterr().out
    assert status == 1
    assert "planted  WRONG in " in printed
    assert "got " in printed and "expected " in printed


# ---------------------------------------------------------------- mistakes that people make


def decode_without_its_sinks(q, k, v, table, lens, scale, window, out, sinks=None, cap=0.0):
    reference_decode(q, k, v, table, lens, scale, window, out, None, cap)


def decode_that_caps_before_it_scales(q, k, v, table, lens, scale, window, out, sinks=None, cap=0.0):
    reference_decode(q, k, v, table, lens, scale, window, out, sinks, cap / scale)


def extend_with_a_sink_for_the_wrong_head(q, k, v, table, starts, lens, scale, window, out, sinks=None, cap=0.0):
    turned = None if sinks is None else sinks.roll(1)
    reference_extend(q, k, v, table, starts, lens, scale, window, out, turned, cap)


def prologue_that_rotates_the_end_of_a_head(q, k, v, positions, cos_sin, q_norm, k_norm, eps, kc, vc, slots):
    if cos_sin.shape[1] < q.shape[2]:
        q, k = q.flip(2), k.flip(2)
    reference_gqa_prologue(q, k, v, positions, cos_sin, q_norm, k_norm, eps, kc, vc, slots)


def latent_prologue_without_the_weight_of_its_norm(q, compressed, positions, cos_sin, norm, eps, cache, slots):
    reference_mla_prologue(q, compressed, positions, cos_sin, torch.ones_like(norm), eps, cache, slots)


def latent_prologue_that_rotates_the_front(q, compressed, positions, cos_sin, norm, eps, cache, slots):
    front = q.flip(2).contiguous()
    reference_mla_prologue(front, compressed, positions, cos_sin, norm, eps, cache, slots)
    q.copy_(front.flip(2))


def latent_prologue_that_norms_the_key_too(q, compressed, positions, cos_sin, norm, eps, cache, slots):
    key = compressed[:, norm.shape[0] :]
    key *= torch.rsqrt(key.square().mean(dim=1, keepdim=True) + eps)
    reference_mla_prologue(q, compressed, positions, cos_sin, norm, eps, cache, slots)


def latent_decode_without_the_rotary_part(q_latent, q_rope, cache, table, lens, scale, out, lse):
    reference_mla_decode(q_latent, q_rope * 0.0, cache, table, lens, scale, out, lse)


def latent_decode_with_lse_to_the_base_two(q_latent, q_rope, cache, table, lens, scale, out, lse):
    reference_mla_decode(q_latent, q_rope, cache, table, lens, scale, out, lse)
    if lse is not None:
        lse /= 0.6931471805599453


def partial_that_cuts_within_pages(q_latent, q_rope, cache, table, lens, scale, out, lse):
    """Its splits are equal in tokens, not in pages."""
    q, splits, rows = torch.cat([q_latent, q_rope], dim=-1), out.shape[0], lens.shape[0]
    for split, (row, length) in itertools.product(range(splits), enumerate(lens.tolist())):
        share, queries = -(-length // splits), slice(row * len(q) // rows, (row + 1) * len(q) // rows)
        part = min(split * share, length), min((split + 1) * share, length)
        values = cache[..., : q_latent.shape[2]]
        found = attend_row(q[queries], cache, values, table[row], length, ScoreRules(scale), part)
        out[split, queries], lse[split, queries] = found


def partial_that_leaves_empty_splits(q_latent, q_rope, cache, table, lens, scale, out, lse):
    reference_mla_decode_partial(q_latent, q_rope, cache, table, lens, scale, out, lse)
    out[torch.isneginf(lse)] = torch.nan


def latent_extend_that_forgets_the_prefix(q_latent, q_rope, cache, table, starts, lens, scale, out):
    counts = starts.diff()
    reference_mla_extend(q_latent, q_rope, cache, table, starts, torch.minimum(lens, counts), scale, out)


def ragged_that_aligns_queries_with_the_first_keys(q, k, v, query_start, key_start, scale, out, lse, causal):
    counts, ends = query_start.diff(), key_start[1:]
    for row, (first, count) in enumerate(zip(query_start.tolist(), counts.tolist(), strict=False)):
        begin = int(key_start[row])
        keys = slice(begin, min(begin + count, int(ends[row])) if causal else int(ends[row]))
        if count and keys.start < keys.stop:
            here, starts = slice(first, first + count), torch.tensor([0, count], dtype=torch.int32)
            some = torch.tensor([0, keys.stop - keys.start], dtype=torch.int32)
            total = None if lse is None else lse[here]
            reference_ragged(q[here], k[keys], v[keys], starts, some, scale, out[here], total, causal)


def ragged_that_always_masks(q, k, v, query_start, key_start, scale, out, lse, causal):
    reference_ragged(q, k, v, query_start, key_start, scale, out, lse, True)


def merge_by_the_mean(partials, partial_lse, out, lse):
    reference_merge_partials(partials, torch.where(torch.isneginf(partial_lse), partial_lse, 0.0), out, lse)


def merge_that_multiplies_empty_parts_by_zero(partials, partial_lse, out, lse):
    reference_merge_partials(partials, partial_lse, out, lse)
    total = torch.logsumexp(partial_lse, dim=0)
    out.copy_((torch.exp(partial_lse - total).unsqueeze(-1) * partials).sum(dim=0))


def make_route_that_weighs_by_corrected_scores(routing, correction):
    exact = make_reference_route(routing, correction)

    def route(logits, ids, weights):
        exact(logits, ids, weights)
        if correction is not None:
            chosen = torch.sigmoid(logits).add(correction).gather(1, ids.long())
            weights.copy_(chosen / chosen.sum(dim=1, keepdim=True) * routing.scale)

    return route


def make_route_without_correction(routing, correction):
    return make_reference_route(routing, None if correction is None else correction * 0.0)


def make_route_that_forgets_groups(routing, correction):
    return make_reference_route(dataclasses.replace(routing, groups=1, top_groups=1), correction)


def make_route_with_groups_by_their_best(routing, correction):
    """Of a corrected routing, whose groups count two."""
    if correction is None or routing.groups == 1:
        return make_reference_route(routing, correction)
    return make_reference_route(dataclasses.replace(routing, corrected=False), correction)


def make_route_without_the_scale(routing, correction):
    return make_reference_route(dataclasses.replace(routing, scale=1.0), correction)


def make_route_that_always_renormalises(routing, correction):
    return make_reference_route(dataclasses.replace(routing, renormalise=True), correction)


def make_route_with_ties_to_the_higher_id(routing, correction):
    if correction is not None or routing.groups > 1:
        return make_reference_route(routing, correction)
    exact = make_reference_route(routing, None)

    def route(logits, ids, weights):
        exact(logits.flip(1), ids, weights)
        ids.copy_(logits.shape[1] - 1 - ids)

    return route


def make_experts_with_gate_and_up_exchanged(gate_up, down, gate_up_bias, down_bias, activation):
    width = down.shape[1]
    row = torch.arange(gate_up.shape[0])
    swapped = gate_up.select_rows(row - row % (2 * width) + (row + width) % (2 * width))
    bias = None if gate_up_bias is None else gate_up_bias.roll(width, 1)
    return make_reference_experts(swapped, down, bias, down_bias, activation)


def make_experts_without_the_last_bias(gate_up, down, gate_up_bias, down_bias, activation):
    return make_reference_experts(gate_up, down, gate_up_bias, None, activation)


def make_experts_that_wrap_around(gate_up, down, gate_up_bias, down_bias, activation):
    exact = make_reference_experts(gate_up, down, gate_up_bias, down_bias, activation)
    experts = down.shape[0] // gate_up.shape[1]
    return lambda x, ids, weights, out: exact(x, ids % experts, weights, out)


def make_experts_without_a_limit(gate_up, down, gate_up_bias, down_bias, activation):
    if activation.kind == "clamped_swiglu":
        activation = GatedActivation("clamped_swiglu", activation.alpha, 1e9)
    return make_reference_experts(gate_up, down, gate_up_bias, down_bias, activation)


def clamped_swiglu_without_the_one(gate, up, alpha, limit, out):
    reference_clamped_swiglu(gate, up, alpha, limit, out)
    gated = torch.empty_like(out)
    reference_clamped_swiglu(gate, torch.zeros_like(up), alpha, limit, gated)
    out -= gated


def clamped_swiglu_that_clamps_gates_below(gate, up, alpha, limit, out):
    reference_clamped_swiglu(gate.clamp(min=-limit), up, alpha, limit, out)


def rotary_that_pairs_halves(x, positions, axes, cos_sin, interleaved):
    reference_apply(x, positions, axes, cos_sin, False)


def rotary_of_the_first_axis(x, positions, axes, cos_sin, interleaved):
    reference_apply(x, positions[:1], None, cos_sin, interleaved)


def rotary_that_rotates_backwards(x, positions, axes, cos_sin, interleaved):
    half = cos_sin.shape[1] // 2
    back = torch.cat([cos_sin[:, :half], -cos_sin[:, half:]], dim=1)
    reference_apply(x, positions, axes, back, interleaved)


def rows_that_truncate(x, block, out, scales):
    reference_rows(x, block, out, scales)
    spread = scales.repeat_interleave(block, dim=1)[:, : x.shape[1]]
    quotient = x / torch.where(spread == 0.0, 1.0, spread)
    step = 1.0 if out.dtype is torch.int8 else torch.exp2(quotient.abs().clamp(min=2.0**-6).log2().floor() - 3.0)
    out.copy_(((quotient / step).trunc() * step).to(out.dtype))


def rows_with_one_scale_for_all(x, block, out, scales):
    reference_rows(x, x.shape[1], out, scales[:, :1])
    scales.copy_(scales[:, :1].expand_as(scales))


def restore_with_a_wrong_block(q, scales, block, out):
    reference_restore(q, scales, (block[0], block[1] * 2), out)


def restore_in_bfloat16(q, scales, block, out):
    reference_restore(q, scales, block, out)
    out.copy_(out.bfloat16())


def make_head_linear_of_other_heads(weight, heads, skipped):
    exact = make_reference_head_linear(weight, heads, skipped)
    return lambda x, out: exact(x.roll(1, 1), out)


@pytest.mark.parametrize(
    ("operation", "fn", "message"),
    [
        ("attention.decode", decode_without_its_sinks, "elements wrong"),
        ("attention.decode", decode_that_caps_before_it_scales, "elements wrong"),
        ("attention.extend", extend_with_a_sink_for_the_wrong_head, "elements wrong"),
        ("attention.gqa_prologue", prologue_that_rotates_the_end_of_a_head, "elements wrong"),
        ("attention.mla_prologue", latent_prologue_without_the_weight_of_its_norm, "latent_cache: "),
        ("attention.mla_prologue", latent_prologue_that_rotates_the_front, "q: "),
        ("attention.mla_prologue", latent_prologue_that_norms_the_key_too, "latent_cache: "),
        ("attention.mla_decode", latent_decode_without_the_rotary_part, "elements wrong"),
        ("attention.mla_decode", latent_decode_with_lse_to_the_base_two, "lse: "),
        ("attention.mla_decode_partial", partial_that_cuts_within_pages, "elements wrong"),
        ("attention.mla_decode_partial", partial_that_leaves_empty_splits, "got nan, expected 0.0"),
        ("attention.mla_extend", latent_extend_that_forgets_the_prefix, "elements wrong"),
        ("attention.ragged", ragged_that_aligns_queries_with_the_first_keys, "elements wrong"),
        ("attention.ragged", ragged_that_always_masks, "all keys"),
        ("attention.merge_partials", merge_by_the_mean, "elements wrong"),
        ("attention.merge_partials", merge_that_multiplies_empty_parts_by_zero, "got nan, expected"),
        ("moe.route", make_route_that_weighs_by_corrected_scores, "weights: "),
        ("moe.route", make_route_without_correction, "ids: "),
        ("moe.route", make_route_that_forgets_groups, "ids: "),
        ("moe.route", make_route_with_groups_by_their_best, "ids: "),
        ("moe.route", make_route_without_the_scale, "weights: "),
        ("moe.route", make_route_that_always_renormalises, "weights: "),
        ("moe.route", make_route_with_ties_to_the_higher_id, "ids: "),
        ("moe.experts", make_experts_with_gate_and_up_exchanged, "elements wrong"),
        ("moe.experts", make_experts_without_the_last_bias, "elements wrong"),
        ("moe.experts", make_experts_that_wrap_around, "expected 0.0"),
        ("moe.experts", make_experts_without_a_limit, "elements wrong"),
        ("activation.clamped_swiglu", clamped_swiglu_without_the_one, "elements wrong"),
        ("activation.clamped_swiglu", clamped_swiglu_that_clamps_gates_below, "elements wrong"),
        ("rotary.apply", rotary_that_pairs_halves, "neighbours"),
        ("rotary.apply", rotary_of_the_first_axis, "3 axes"),
        ("rotary.apply", rotary_that_rotates_backwards, "rotated: "),
        ("quantize.rows", rows_that_truncate, "out: "),
        ("quantize.rows", rows_with_one_scale_for_all, "scales: "),
        ("quantize.restore", restore_with_a_wrong_block, "elements wrong"),
        ("quantize.restore", restore_in_bfloat16, "elements wrong"),
        ("gemm.head_linear", make_head_linear_of_other_heads, "elements wrong"),
    ],
)
def test_a_mistake_is_caught(reference_registry, operation, fn, message):
    spec = reference_of(operation).spec
    few = spec.signatures if operation != "moe.experts" else frozenset({experts_signature(BFLOAT16, BFLOAT16)})
    wrong = dataclasses.replace(spec, name="wrong", solution="wrong", band=Band.PLUGIN, signatures=few)
    report = verify_kernel(RegisteredKernel(wrong, fn, "test"), reference_registry)
    lines = [line for failure in report.failures for line in (failure.case, *failure.details)]
    assert message in "\n".join(lines)
    assert not any("raised" in line for line in lines), lines


def test_a_full_run_takes_more_seeds_and_the_slow_cases(reference_registry):
    kernel = reference_registry.reference("attention", "gqa_prologue")
    one = frozenset(sorted(kernel.spec.signatures, key=str)[:1])
    kernel = dataclasses.replace(kernel, spec=dataclasses.replace(kernel.spec, signatures=one))
    usual, full = (verify_kernel(kernel, reference_registry, full=full) for full in (False, True))
    assert full.passed
    assert full.cases > 2 * usual.cases
    signature = next(iter(one))
    slow = [case.name for case in cases_for("attention.gqa_prologue", signature, 0, full=True)]
    assert "large offsets" in slow
    assert "large offsets" not in [case.name for case in cases_for("attention.gqa_prologue", signature, 0)]
