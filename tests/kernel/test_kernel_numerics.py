"""Numerics: every kernel of this machine is right, and the comparison catches kernels that are not."""

import dataclasses

import pytest
import torch

from tokenspeed_kernel.numerics import AnyOf, Close, Exact, verify_kernel
from tokenspeed_kernel.numerics.__main__ import main
from tokenspeed_kernel.numerics.cases import Buffers, cases_for, register_cases
from tokenspeed_kernel.numerics.verify import compare
from tokenspeed_kernel.ops.activation import reference_silu_and_mul
from tokenspeed_kernel.ops.attention import reference_decode, reference_extend, reference_gqa_prologue
from tokenspeed_kernel.ops.gemm import make_reference_linear
from tokenspeed_kernel.ops.norm import reference_fused_add_rms, reference_rms
from tokenspeed_kernel.ops.sampling import reference_logprobs, reference_sample
from tokenspeed_kernel.oracle import SelectionOracle
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.plugins.loading import loaded_registry
from tokenspeed_kernel.records import RecordError, load_records, read_records, write_records
from tokenspeed_kernel.registry import Band, RegisteredKernel, global_registry

REFERENCES = sorted(k.spec.name for k in global_registry().kernels() if k.spec.band is Band.REFERENCE)


@pytest.mark.parametrize("name", REFERENCES)
def test_every_reference_keeps_the_bounds(name):
    registry = global_registry()
    spec = registry.kernel(name).spec
    report = verify_kernel(registry.kernel(name), registry)
    cases = [case for signature in spec.signatures for case in cases_for(spec.operation, signature, 0)]
    taken = "fp4" if name.endswith("_fp4") else "float32"  # a reference rounds nothing else
    others = [case for case in cases if case.traits.get("activations", "float32") != taken]
    assert report.failures == []
    assert report.cases > 0
    assert report.unfit == len(others)
    assert report.error <= 1.0


def test_every_kernel_that_plugins_brought_keeps_the_bounds_and_its_promises():
    registry = loaded_registry()
    brought = [k for k in registry.kernels() if k.spec.name not in REFERENCES]
    reports = [verify_kernel(kernel, registry) for kernel in brought]
    assert [(r.kernel, r.failures) for r in reports if r.failures] == []
    assert [r.kernel for r in reports if r.skipped is None and r.cases == 0] == []


def test_decode_and_extend_of_one_solution_give_the_same_bits():
    registry = loaded_registry()
    promised = "row_invariant"
    for decode in registry.kernels("attention", "decode"):
        twins = [e for e in registry.kernels("attention", "extend") if e.spec.solution == decode.spec.solution]
        if promised not in decode.spec.tags or decode.spec.capability.refusal(current_platform()) is not None:
            continue
        for extend in twins:
            for signature in sorted(decode.spec.signatures & extend.spec.signatures, key=str):
                _compare_decode_with_extend(decode.fn, extend.fn, getattr(torch, signature["kv"].storage_dtype))


def _compare_decode_with_extend(decode, extend, dtype):
    generator = torch.Generator().manual_seed(5)
    heads, per_kv, width, granularity, length, chunk = 2, 3, 64, 16, 150, 37
    k_cache, v_cache = torch.randn(2, 12, heads, granularity, width, generator=generator).to(dtype)
    table = (torch.randperm(11, generator=generator) + 1).to(torch.int32).reshape(1, 11)
    q = torch.randn(chunk, heads * per_kv, width, generator=generator)
    together, alone = torch.empty(2, chunk, heads * per_kv, width)
    starts, lengths = torch.tensor([0, chunk], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    for window in (0, 20, 130):
        extend(q, k_cache, v_cache, table, starts, lengths, 0.125, window, together)
        for index in range(chunk):
            at = torch.tensor([length - chunk + index + 1], dtype=torch.int32)
            decode(q[index : index + 1], k_cache, v_cache, table, at, 0.125, window, alone[index : index + 1])
        assert torch.equal(together, alone), window


# ---------------------------------------------------------------- kernels that are wrong


def rms_one_ulp_of_a_half_off(x, weight, eps, out):
    reference_rms(x, weight.half().float(), eps, out)


def rms_that_forgets_the_last_column(x, weight, eps, out):
    reference_rms(x, weight, eps, out)
    if out.numel():
        out[-1, -1] = torch.nan


def rms_that_writes_beyond(x, weight, eps, out):
    reference_rms(x, weight, eps, out)
    out.as_strided((out.numel() + 1,), (1,))[-1] = 0.0


def rms_that_writes_before(x, weight, eps, out):
    reference_rms(x, weight, eps, out)
    out.as_strided((1,), (1,), out.storage_offset() - 1)[0] = 0.0


def rms_that_changes_its_weight(x, weight, eps, out):
    reference_rms(x, weight, eps, out)
    weight *= 1.5


def rms_that_raises(x, weight, eps, out):
    raise MemoryError("too small")


def fused_add_that_leaves_the_residual(x, residual, weight, eps, out):
    reference_fused_add_rms(x, residual.clone(), weight, eps, out)


def silu_in_half(gate, up, out):
    reference_silu_and_mul(gate.half().float(), up, out)


def make_linear_of_rounded_rows(weight, bias):
    exact = make_reference_linear(weight, bias)
    return lambda x, out: exact(x.bfloat16().float(), out)


def make_linear_that_drops_the_bias(weight, bias):
    return make_reference_linear(weight, None)


def decode_that_reads_a_key_too_many(q, k_cache, v_cache, page_table, seq_lens, scale, window, out):
    reference_decode(q, k_cache, v_cache, page_table, (seq_lens + 1) * (seq_lens > 0), scale, window, out)


def decode_that_leaves_empty_rows(q, k_cache, v_cache, page_table, seq_lens, scale, window, out):
    if bool((seq_lens > 0).all()):
        reference_decode(q, k_cache, v_cache, page_table, seq_lens, scale, window, out)


def extend_that_sees_the_future(q, k_cache, v_cache, page_table, query_start, seq_lens, scale, window, out):
    for row in range(seq_lens.shape[0]):
        for index in range(int(query_start[row]), int(query_start[row + 1])):
            one = torch.tensor([0, 1], dtype=torch.int32)
            where = slice(row, row + 1)
            part = slice(index, index + 1)
            reference_extend(
                q[part], k_cache, v_cache, page_table[where], one, seq_lens[where], scale, window, out[part]
            )


def extend_that_fills_foreign_rows(q, k_cache, v_cache, page_table, query_start, seq_lens, scale, window, out):
    out.zero_()
    reference_extend(q, k_cache, v_cache, page_table, query_start, seq_lens, scale, window, out)


def decode_with_a_window_one_short(q, k_cache, v_cache, page_table, seq_lens, scale, window, out):
    reference_decode(q, k_cache, v_cache, page_table, seq_lens, scale, window - (window > 1), out)


def decode_that_forgets_the_window(q, k_cache, v_cache, page_table, seq_lens, scale, window, out):
    reference_decode(q, k_cache, v_cache, page_table, seq_lens, scale, 0, out)


def extend_that_masks_what_lies_before_the_window(
    q, k_cache, v_cache, page_table, query_start, seq_lens, scale, window, out
):
    table = page_table.where(page_table >= 0, 0)
    reference_extend(q, k_cache, v_cache, table, query_start, seq_lens, scale, 0, out)


def prologue_that_pairs_neighbours(q, k, v, positions, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, slots):
    def shuffle(x):
        return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)

    shuffled = shuffle(q)
    reference_gqa_prologue(shuffled, shuffle(k), v, positions, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, slots)
    q.copy_(shuffled)


def prologue_that_truncates(q, k, v, positions, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, slots):
    if v_cache.dtype is torch.bfloat16:
        v = (v.contiguous().view(torch.int32) & -65536).view(torch.float32)
    reference_gqa_prologue(q, k, v, positions, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, slots)


def sample_with_another_seed(logits, temperature, top_k, top_p, min_p, seed, choice, position, out):
    reference_sample(logits, temperature, top_k, top_p, min_p, seed + 1, choice, position, out)


def sample_without_min_p(logits, temperature, top_k, top_p, min_p, seed, choice, position, out):
    reference_sample(logits, temperature, top_k, top_p, min_p * 0, seed, choice, position, out)


def logprobs_with_ties_to_the_higher_id(logits, ids, k, out_logprob, top_ids, top_logprobs):
    reference_logprobs(logits, ids, k, out_logprob, top_ids, top_logprobs)
    flipped = torch.empty_like(top_ids)
    reference_logprobs(logits.flip(1), ids, k, torch.empty_like(out_logprob), flipped, top_logprobs)
    top_ids.copy_(logits.shape[1] - 1 - flipped)


@pytest.mark.parametrize(
    ("operation", "fn", "message"),
    [
        ("norm.rms", rms_one_ulp_of_a_half_off, "elements wrong"),
        ("norm.rms", rms_that_forgets_the_last_column, "got nan, expected"),
        ("norm.rms", rms_that_writes_beyond, "wrote beyond the tensor out"),
        ("norm.rms", rms_that_writes_before, "wrote before the tensor out"),
        ("norm.rms", rms_that_changes_its_weight, "changed its input weight"),
        ("norm.rms", rms_that_raises, "raised MemoryError: too small"),
        ("norm.fused_add_rms", fused_add_that_leaves_the_residual, "residual: "),
        ("activation.silu_and_mul", silu_in_half, "elements wrong"),
        ("gemm.linear", make_linear_of_rounded_rows, "elements wrong"),
        ("gemm.linear", make_linear_that_drops_the_bias, "elements wrong"),
        ("attention.decode", decode_that_reads_a_key_too_many, "elements wrong"),
        ("attention.decode", decode_that_leaves_empty_rows, "got nan, expected 0.0"),
        ("attention.decode", decode_with_a_window_one_short, "elements wrong"),
        ("attention.decode", decode_that_forgets_the_window, "raised IndexError"),
        ("attention.extend", extend_that_masks_what_lies_before_the_window, "got nan, expected"),
        ("attention.extend", extend_that_sees_the_future, "elements wrong"),
        ("attention.extend", extend_that_fills_foreign_rows, "got 0.0, expected nan"),
        ("attention.gqa_prologue", prologue_that_pairs_neighbours, "q: "),
        ("attention.gqa_prologue", prologue_that_truncates, "v_cache: "),
        ("sampling.sample", sample_with_another_seed, "elements wrong"),
        ("sampling.sample", sample_without_min_p, "elements wrong"),
        ("sampling.logprobs", logprobs_with_ties_to_the_higher_id, "top_ids: "),
    ],
)
def test_a_wrong_kernel_is_caught(reference_registry, operation, fn, message):
    spec = reference_registry.reference(*operation.split(".")).spec
    wrong = dataclasses.replace(spec, name="wrong", solution="wrong", band=Band.PLUGIN)
    report = verify_kernel(RegisteredKernel(wrong, fn, "test"), reference_registry)
    assert not report.passed
    assert message in "\n".join(line for failure in report.failures for line in failure.details)


class Drifting:
    """An RMS norm whose result depends on how often it was called, within the bound."""

    calls = 0

    def __call__(self, x, weight, eps, out):
        self.calls += 1
        reference_rms(x, weight, eps, out)
        out *= 1.0 + self.calls % 3 * 2.0**-23


def rms_that_depends_on_the_number_of_rows(x, weight, eps, out):
    reference_rms(x, weight, eps, out)
    out *= 1.0 + (x.shape[0] > 1) * 2.0**-23


@pytest.mark.parametrize(
    ("fn", "tags", "message"),
    [
        (Drifting(), {"deterministic"}, "tagged deterministic, but a second run differs"),
        (rms_that_depends_on_the_number_of_rows, {"row_invariant"}, "tagged row_invariant, but more calls differ"),
        (rms_that_depends_on_the_number_of_rows, {"deterministic"}, None),
    ],
)
def test_promises_are_tested_bit_by_bit(reference_registry, fn, tags, message):
    spec = reference_registry.reference("norm", "rms").spec
    promising = dataclasses.replace(spec, name="p", solution="p", band=Band.PLUGIN, tags=frozenset(tags))
    report = verify_kernel(RegisteredKernel(promising, fn, "test"), reference_registry)
    lines = "\n".join(line for failure in report.failures for line in failure.details)
    assert report.passed if message is None else message in lines


def test_a_kernel_that_cannot_run_here_is_skipped_with_the_reason(reference_registry, make_platform):
    kernel = reference_registry.reference("norm", "rms")
    needs = dataclasses.replace(kernel.spec.capability, features=frozenset({"avx512"}))
    demanding = RegisteredKernel(dataclasses.replace(kernel.spec, capability=needs), kernel.fn, "test")
    report = verify_kernel(demanding, reference_registry, platform=make_platform("avx2"))
    assert (report.skipped, report.cases, report.passed) == ("needs avx512; this cpu has avx2", 0, False)


def test_a_kernel_that_no_case_fits_is_not_verified(registry, toy_spec):
    registry.register(toy_spec("lonely"), lambda x, out: out.copy_(x), "test")
    report = verify_kernel(registry.kernel("lonely"), registry)
    assert (report.skipped, report.cases, report.passed) == (None, 0, False)


def test_cases_repeat_for_a_seed_and_are_written_once(reference_registry):
    signature = next(iter(reference_registry.reference("norm", "rms").spec.signatures))
    one, other = (cases_for("norm.rms", signature, 3) for _ in range(2))
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left.expect()["out"].value, right.expect()["out"].value)
    with pytest.raises(ValueError, match=r"norm.rms has a case generator already"):
        register_cases("norm.rms", lambda signature, generator: iter(()))


# ---------------------------------------------------------------- comparing, buffers, records, command line


@pytest.mark.parametrize(
    ("output", "expectation", "error", "wrong"),
    [
        ([1.0, 2.0], Close(torch.tensor([1.0, 2.0]).double(), torch.tensor(0.5).double()), 0.0, 0),
        ([1.25, 2.0], Close(torch.tensor([1.0, 2.0]).double(), torch.tensor(0.5).double()), 0.5, 0),
        ([1.75, 2.0], Close(torch.tensor([1.0, 2.0]).double(), torch.tensor(0.5).double()), 1.5, 1),
        ([torch.nan], Close(torch.tensor([torch.nan]).double(), torch.tensor(0.0).double()), 0.0, 0),
        ([1.0], Close(torch.tensor([torch.nan]).double(), torch.tensor(0.0).double()), torch.inf, 1),
        ([torch.inf], Close(torch.tensor([1.0]).double(), torch.tensor(1.0).double()), torch.inf, 1),
        ([3.0, torch.nan], Exact(torch.tensor([3.0, torch.nan])), 0.0, 0),
        ([3.0, 0.0], Exact(torch.tensor([3.0, torch.nan])), torch.inf, 1),
        ([3, 4], AnyOf(torch.tensor([[2, 3], [2, 3]])), torch.inf, 1),
    ],
)
def test_compare(output, expectation, error, wrong):
    found, lines = compare(torch.tensor(output), expectation)
    assert found == error
    assert lines[0].startswith(f"{wrong} of ") if wrong else not lines


def test_compare_reports_a_wrong_shape_and_the_worst_elements():
    assert compare(torch.zeros(2, 3), Exact(torch.zeros(3, 2)))[1] == ["shape [2, 3], expected [3, 2]"]
    expected = Close(torch.zeros(3, 4).double(), torch.full((3, 4), 0.5).double())
    output = torch.zeros(3, 4)
    output[1, 2], output[2, 0] = 3.0, 7.0
    _, lines = compare(output, expected)
    assert lines == [
        "2 of 12 elements wrong",
        "at [2, 0]: got 7.0, expected 0.0, bound 0.5",
        "at [1, 2]: got 3.0, expected 0.0, bound 0.5",
    ]


def test_outputs_are_poisoned():
    buffers = Buffers()
    assert bool(torch.isnan(buffers.output("a", (2, 3), torch.bfloat16)).all())
    assert buffers.output("b", (2,), torch.int32).tolist() == [-(1 << 31)] * 2
    assert buffers.output("empty", (0, 7), torch.float32).shape == (0, 7)
    assert buffers.violations() == []


def test_the_command_prints_verdicts_writes_records_and_selection_reads_them(tmp_path, capsys):
    path = tmp_path / "records.json"
    assert main(["--kernel", "reference_norm_rms", "--kernel", "reference_sampling_has_nan", "--write", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "reference_norm_rms          right, error 0." in printed
    oracle = SelectionOracle()
    load_records(path, oracle)
    assert {name for _, name in oracle.verifications} == {"reference_norm_rms", "reference_sampling_has_nan"}
    records = read_records(path)
    assert all(record.passed and record.cases > 0 for record in records)
    write_records(tmp_path / "again.json", reversed(records))
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernel", "nothing"], "no kernel or operation 'nothing'"),
        (
            ["--kernel", "reference_norm_rms", "--operation", "gemm.linear"],
            "no kernel of that name does that operation",
        ),
    ],
)
def test_the_command_refuses_what_is_not_there(capsys, arguments, message):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a file of verification records"),
        ('{"format": 99, "records": []}', "not verification records of format 1"),
        ('{"format": 1, "records": [{"kernel": "x"}]}', "each record must have exactly the fields"),
    ],
)
def test_a_bad_record_file_is_named(tmp_path, text, message):
    path = tmp_path / "records.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=message):
        read_records(path)
