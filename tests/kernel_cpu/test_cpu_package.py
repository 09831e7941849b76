"""Registration, the choice of the instruction set, threads, and the checks of debug mode."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

import tokenspeed_kernel_cpu
from tokenspeed.layers.kernel_choice import OPERATIONS
from tokenspeed_kernel.ops import bind_attention_decode, bind_linear
from tokenspeed_kernel.platform import current_platform, features_up_to, override_platform
from tokenspeed_kernel.plugins import load_plugins
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.records import read_records
from tokenspeed_kernel.registry import Band, active_registry
from tokenspeed_kernel.selection import SelectionError
from tokenspeed_kernel_cpu import _native
from tokenspeed_kernel_cpu.instruction_sets import follow_platform
from tokenspeed_kernel_cpu.registration import RECORDS, SOLUTION


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_the_operations_of_dense_decoders_have_native_kernels() -> None:
    load_plugins()
    registry = active_registry()
    ours = {kernel.spec.operation: kernel for kernel in registry.kernels() if kernel.spec.solution == SOLUTION}
    assert set(ours) >= set(OPERATIONS)
    for kernel in ours.values():
        assert kernel.spec.band is Band.PERFORMANT
        assert kernel.spec.tags >= {"deterministic", "row_invariant"}
        assert kernel.origin.startswith("tokenspeed-appliance-kernel-cpu")


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("scalar", "portable"),
        ("avx2", "avx2"),
        ("avx512", "avx512"),
        ("avx512_vnni", "avx512_vnni"),
        ("avx512_bf16", "avx512_bf16"),
    ],
)
def test_the_platform_chooses_the_instruction_set(level: str, expected: str) -> None:
    if expected not in tokenspeed_kernel_cpu.available_instruction_sets():
        pytest.skip(f"this machine has no {expected}")
    platform = replace(current_platform(), isa=level, features=features_up_to(level))
    with override_platform(platform), tokenspeed_kernel_cpu.use_instruction_set("portable"):
        follow_platform()
        assert tokenspeed_kernel_cpu.instruction_set() == expected


def test_where_an_accelerator_computes_the_set_is_still_the_processors() -> None:
    before = tokenspeed_kernel_cpu.instruction_set()
    gpu = replace(current_platform(), vendor="nvidia", isa="sm_90", features=frozenset({"sm_90"}))
    with tokenspeed_kernel_cpu.use_instruction_set("portable"):
        with override_platform(gpu):
            follow_platform()
        assert tokenspeed_kernel_cpu.instruction_set() == before


def test_a_set_that_is_not_there_is_refused() -> None:
    before = tokenspeed_kernel_cpu.instruction_set()
    with (
        pytest.raises(ValueError, match="'avx9000' is not in this build"),
        tokenspeed_kernel_cpu.use_instruction_set("avx9000"),
    ):
        pytest.fail("not reached")
    assert tokenspeed_kernel_cpu.instruction_set() == before


def test_threads_follow_torch_when_a_weight_is_bound() -> None:
    weight = QuantizedTensor.from_dense(torch.randn(8, 8), "small")
    before = torch.get_num_threads()
    try:
        for count in (1, 3, before):
            torch.set_num_threads(count)
            bind_linear(weight, None)
            assert tokenspeed_kernel_cpu.num_threads() == count
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ValueError, match="at least 1"):
        tokenspeed_kernel_cpu.set_num_threads(0)


def test_calls_from_several_threads_at_once() -> None:
    """The pool serves one caller at a time; the others work alone. Small and large calls, and a changing limit."""
    weight = QuantizedTensor.from_dense(torch.randn(576, 160), "shared")
    fn = bind_linear(weight, None).fn
    inputs = [torch.randn(tokens, 160) for tokens in (1, 3, 9, 40)]
    expected = []
    for x in inputs:
        expected.append(torch.empty(x.shape[0], 576))
        fn(x, expected[-1])
    before = tokenspeed_kernel_cpu.num_threads()
    wrong: list[int] = []

    def work(index: int) -> None:
        out = torch.empty_like(expected[index])
        for round_number in range(60):
            tokenspeed_kernel_cpu.set_num_threads(1 + (index + round_number) % 4)
            out.fill_(torch.nan)
            fn(inputs[index], out)
            if not torch.equal(out, expected[index]):
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    tokenspeed_kernel_cpu.set_num_threads(before)
    assert not wrong


def test_kernels_work_in_a_forked_child() -> None:
    """A child has the pool's books and none of its threads: its kernels run on the calling thread."""
    fn = bind_linear(QuantizedTensor.from_dense(torch.randn(576, 160), "forked"), None).fn
    x, expected, out = torch.randn(40, 160), torch.empty(40, 576), torch.full((40, 576), torch.nan)
    fn(x, expected)
    child = os.fork()
    if child == 0:
        fn(x, out)
        os._exit(0 if torch.equal(out, expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_heads_that_do_not_fit_are_refused_by_selection() -> None:
    with pytest.raises(SelectionError, match="head_dim"):
        bind_attention_decode(
            head_dim=_native.MAX_HEAD_DIM + 2,
            q_per_kv=1,
            kernel_page_size=16,
            kv_dtype=torch.float32,
            override="cpu_native",
        )


def test_the_native_matrix_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(ValueError, match="gguf_q9_9"):
        _native.Matrix("gguf_q9_9", 1, 32, 0, 0)
    with pytest.raises(ValueError, match="33 columns do not divide"):
        _native.Matrix("gguf_q8_0", 1, 33, 0, 0)


DEBUG_CALLS = """
import torch
from tokenspeed_kernel.ops import *
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_cpu.checks import KernelArgumentError
f, i = torch.zeros, lambda *s: torch.zeros(*s, dtype=torch.int32)
linear = bind_linear(QuantizedTensor.from_dense(f(4, 8), "w"), None).fn
blocks = torch.zeros(4, 34, dtype=torch.uint8)
packed = bind_linear(QuantizedTensor("gguf_q8_0", (4, 32), {"blocks": blocks}, "w"), None, activations="int8").fn
lookup = bind_embedding(QuantizedTensor.from_dense(f(4, 8), "w")).fn
heads = dict(head_dim=8, q_per_kv=2, kv_dtype=torch.float32)
decode = bind_attention_decode(**heads, kernel_page_size=4).fn
prologue = bind_gqa_prologue(**heads, qk_norm=False).fn
cache = f(3, 1, 4, 8)
lengths, table = torch.tensor([5], dtype=torch.int32), torch.tensor([[1, 2]], dtype=torch.int32)
beyond = torch.tensor([[99, 0]], dtype=torch.int32)
wrong = [
    (linear, (f(2, 9), f(2, 4))),
    (linear, (f(8, 2).T, f(2, 4))),
    (linear, (f(2, 8).double(), f(2, 4))),
    (packed, (f(2, 31), f(2, 4))),
    (packed, (f(2, 32), f(3, 4))),
    (lookup, (i(2) + 4, f(2, 8))),
    (bind_rms_norm().fn, (f(2, 8), f(7), 1e-5, f(2, 8))),
    (bind_fused_add_rms_norm().fn, (f(2, 8), f(3, 8), f(8), 1e-5, f(2, 8))),
    (bind_silu_and_mul().fn, (f(2, 8), f(8, 2).T, f(2, 8))),
    (decode, (f(1, 2, 8), cache, cache, table + 1, lengths, 1.0, 0, f(1, 2, 8))),
    (decode, (f(1, 2, 8), cache, cache, table - table, lengths - 9, 1.0, 3, f(1, 2, 8))),
    (decode, (f(1, 2, 8), cache, cache, table + beyond, lengths, 1.0, 2, f(1, 2, 8))),
    (decode, (f(1, 2, 8), cache, cache, table, lengths, 1.0, -1, f(1, 2, 8))),
    (decode, (f(1, 2, 8), cache, cache, table, lengths + 4, 1.0, 0, f(1, 2, 8))),
    (prologue, (f(1, 2, 8), f(1, 1, 8), f(1, 1, 8), i(1) + 6, f(6, 8), None, None, 1e-5, cache, cache, i(1).long())),
    (prologue, (f(1, 2, 8), f(1, 1, 8), f(1, 1, 8), i(1), f(6, 8), None, None, 1e-5, cache, cache, i(1).long() + 12)),
    (bind_logprobs().fn, (f(2, 5), i(2) + 5, 0, f(2), i(2, 0), f(2, 0))),
    (bind_has_nan().fn, (f(2, 5), i(2))),
    (bind_apply_token_mask().fn, (f(2, 33), i(3, 1), i(2))),
    (bind_apply_token_mask().fn, (f(2, 33), i(3, 2), i(2) + 3)),
]
for fn, arguments in wrong:
    try:
        fn(*arguments)
    except KernelArgumentError as error:
        print(error)
    else:
        raise SystemExit(f"let pass: {fn} {arguments}")
decode(f(1, 2, 8), cache, cache, table, lengths, 1.0, 0, f(1, 2, 8))
decode(f(1, 2, 8), cache, cache, table + beyond, lengths, 1.0, 1, f(1, 2, 8))
linear(f(2, 8), f(2, 4))
"""


def test_debug_mode_checks_arguments() -> None:
    result = _run(DEBUG_CALLS, TOKENSPEED_KERNEL_DEBUG="1")
    assert result.returncode == 0, result.stdout + result.stderr
    messages = result.stdout.splitlines()
    assert len(messages) == 20
    assert messages[0] == "x has shape [2, 9]; it must be [2, 8]"
    assert "page_table holds values from 2 to 3; they must lie in [0, 3)" in messages
    assert "page_table holds values from 2 to 100; they must lie in [0, 3)" in messages
    assert "window is -1; it must be an int, 0 for none or the positions a query sees" in messages


@pytest.mark.parametrize("instruction_set", ["scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16"])
def test_a_record_of_every_kernels_verification_ships_with_it(instruction_set: str) -> None:
    load_plugins()
    versions = {
        kernel.spec.name: kernel.spec.version
        for kernel in active_registry().kernels()
        if kernel.spec.solution.startswith(SOLUTION)
        and kernel.spec.capability.features <= features_up_to(instruction_set)
    }
    records = [r for r in read_records(RECORDS) if r.platform == f"cpu-x86_64-{instruction_set}"]
    assert {record.kernel: record.version for record in records} == versions
    assert all(record.passed for record in records)


def test_what_the_records_say_still_holds_here() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tokenspeed_kernel.numerics"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
