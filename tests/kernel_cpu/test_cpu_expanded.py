"""Latent attention with expanded keys and values: the reference's numbers, the absorbed form's, and the same bits
however queries are cut into calls, ranges and threads."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

import tokenspeed_kernel_cpu
from tokenspeed_kernel.gguf_blocks import BLOCK_ELEMENTS
from tokenspeed_kernel.ops import bind_head_linear, bind_mla_extend_expanded, bind_mla_read
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_cpu.registration import WEIGHTS

KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
SCALE = 0.2
RandomWeight = Callable[[str, int, int], QuantizedTensor]


@dataclass
class Layer:
    """An up-projection, and a cache that is NaN wherever no sequence has written, in shuffled blocks."""

    up: QuantizedTensor
    heads: int
    plain: int
    cache: torch.Tensor
    table: torch.Tensor

    @property
    def latent(self) -> int:
        return self.up.shape[1]

    @property
    def rotary(self) -> int:
        return self.cache.shape[3] - self.latent

    @property
    def value(self) -> int:
        return self.up.shape[0] // self.heads - self.plain

    def queries(self, tokens: int) -> torch.Tensor:
        """Rows of a wider buffer."""
        width = self.heads * (self.plain + self.rotary)
        return torch.randn(tokens, width + 5)[:, :width].view(tokens, self.heads, self.plain + self.rotary)

    def expanded(
        self,
        q: torch.Tensor,
        starts: list[int],
        lengths: list[int],
        *,
        override: str | None = None,
        activations: str = "float32",
    ) -> torch.Tensor:
        bound = bind_mla_extend_expanded(
            self.up,
            self.heads,
            rotary_dim=self.rotary,
            plain_dim=self.plain,
            kernel_page_size=self.cache.shape[2],
            kv_dtype=self.cache.dtype,
            activations=activations,
            override=override,
        )
        assert bound is not None
        rounded = "_bf16" if activations == "bfloat16" else ""
        assert override or bound.spec.name == "cpu_attention_mla_extend_expanded" + rounded
        out = torch.full((q.shape[0], self.heads, self.value), torch.nan)
        ends = (torch.tensor(values, dtype=torch.int32) for values in (starts, lengths))
        bound.fn(q, self.cache, self.table, *ends, SCALE, out)
        return out

    def absorbed(self, q: torch.Tensor, starts: list[int], lengths: list[int]) -> torch.Tensor:
        rows = self.up.dequantize().view(self.heads, -1, self.latent)
        keys = rows[:, : self.plain].transpose(1, 2).reshape(-1, self.plain).contiguous()
        q_latent, attended = torch.empty(2, q.shape[0], self.heads, self.latent)
        out = torch.full((q.shape[0], self.heads, self.value), torch.nan)
        ends = (torch.tensor(each, dtype=torch.int32) for each in (starts, lengths))
        extend = bind_mla_read(
            "mla_extend",
            latent_dim=self.latent,
            rotary_dim=self.rotary,
            kernel_page_size=self.cache.shape[2],
            kv_dtype=self.cache.dtype,
            activations="float32",
        )
        bind_head_linear(QuantizedTensor.from_dense(keys, "keys"), self.heads).fn(q[..., : self.plain], q_latent)
        extend.fn(q_latent, q[..., self.plain :], self.cache, self.table, *ends, SCALE, attended)
        bind_head_linear(self.up, self.heads, skipped=self.plain).fn(attended, out)
        return out


def _layer(
    random_weight: RandomWeight,
    lengths: list[int],
    *,
    heads: int = 3,
    sizes: tuple[int, int, int, int] = (40, 8, 20, 12),
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    weights: str = "float32",
) -> Layer:
    """``sizes``: latent, rotary, plain, value."""
    latent, rotary, plain, value = sizes
    pages = [-(-length // page_size) for length in lengths]
    blocks = torch.randperm(sum(pages)) + 1
    arena = torch.full((sum(pages) + 1, 3, page_size, latent + rotary), torch.nan, dtype=dtype)
    table = torch.full((len(lengths), max(pages, default=0) + 2), -0x70000000, dtype=torch.int32)
    used = 0
    for row, length in enumerate(lengths):
        table[row, : pages[row]] = blocks[used : used + pages[row]]
        used += pages[row]
        positions = torch.arange(length)
        block = table[row, positions // page_size].long()
        arena[block, 1, positions % page_size] = torch.randn(length, latent + rotary).to(dtype)
    up = random_weight(weights, heads * (plain + value), latent)
    if weights not in BLOCK_ELEMENTS:
        up = QuantizedTensor.from_dense((up.plane.float() * latent**-0.5).to(up.plane.dtype), up.source)
    return Layer(up, heads, plain, arena[:, 1:2], table)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("heads", "sizes", "page_size"),
    [(3, (64, 16, 32, 24), 16), (2, (31, 6, 5, 7), 7), (1, (48, 2, 17, 33), 1)],
)
def test_it_agrees_with_the_reference_and_with_the_absorbed_form(
    random_weight: RandomWeight,
    instruction_set: str,
    dtype: torch.dtype,
    heads: int,
    sizes: tuple[int, int, int, int],
    page_size: int,
) -> None:
    """Rows of one query, of seven, with a prefix and without, empty ones; two rows of q belong to none."""
    lengths, queries = [1, 65, 0, 200, 17, 7, 300], [1, 65, 0, 3, 0, 7, 170]
    starts = torch.tensor([0, *queries]).cumsum(0).tolist()
    layer = _layer(random_weight, lengths, heads=heads, sizes=sizes, page_size=page_size, dtype=dtype)
    q = layer.queries(starts[-1] + 2)
    out = layer.expanded(q, starts, lengths)
    reference = layer.expanded(q, starts, lengths, override="reference")
    torch.testing.assert_close(out[:-2], reference[:-2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[:-2], layer.absorbed(q, starts, lengths)[:-2], rtol=1e-4, atol=1e-5)
    assert out[-2:].isnan().all()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_weight_format(random_weight: RandomWeight, instruction_set: str, weights: str) -> None:
    sizes = (BLOCK_ELEMENTS.get(weights, 72), 6, 9, 11)
    layer = _layer(random_weight, [90], sizes=sizes, dtype=torch.bfloat16, weights=weights)
    q = layer.queries(33)
    out, reference = (layer.expanded(q, [0, 33], [90], override=override) for override in (None, "reference"))
    torch.testing.assert_close(out, reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max()))


@pytest.mark.parametrize("rounded", [False, True])
def test_bits_depend_on_the_position_only(random_weight: RandomWeight, instruction_set: str, rounded: bool) -> None:
    """One prompt: whole, in chunks, token by token, beside others, on several threads."""
    if rounded and instruction_set != "avx512_bf16":
        pytest.skip("this instruction set does not round")
    activations = "bfloat16" if rounded else "float32"
    length = 600
    layer = _layer(random_weight, [length, 40], dtype=torch.bfloat16, weights="bfloat16")
    q = layer.queries(length)
    whole = layer.expanded(q, [0, length, length], [length, 0], activations=activations)
    before = tokenspeed_kernel_cpu.num_threads()
    try:
        for threads in (1, 2, 9):  # nine threads have ranges of a head each
            for begin, end in pairwise([0, 1, 64, 65, 300, 301, 600] if threads < 9 else [0, 600]):
                both = torch.cat([q[begin:end], layer.queries(20)])
                tokenspeed_kernel_cpu.set_num_threads(threads)
                chunk = layer.expanded(both, [0, end - begin, end - begin + 20], [end, 40], activations=activations)
                assert torch.equal(chunk[: end - begin], whole[begin:end]), f"chunk {begin} to {end}"
    finally:
        tokenspeed_kernel_cpu.set_num_threads(before)


def test_more_queries_than_an_item_takes(random_weight: RandomWeight) -> None:
    layer = _layer(random_weight, [4200], heads=2, sizes=(16, 4, 6, 5))
    q = layer.queries(4200)
    out, absorbed = layer.expanded(q, [0, 4200], [4200]), layer.absorbed(q, [0, 4200], [4200])
    torch.testing.assert_close(out, absorbed, rtol=1e-4, atol=1e-5)


def test_what_a_call_left_in_its_memory_and_broken_entries_reach_nobody(
    random_weight: RandomWeight, instruction_set: str
) -> None:
    """A call over broken latents leaves NaN in every piece of the memory that the next one works in; and a broken entry
    in the middle reaches the queries from there on, and no earlier one."""
    layer = _layer(random_weight, [400], sizes=(64, 8, 33, 40))
    q = layer.queries(390)
    clean = layer.expanded(q, [0, 390], [400])
    entry = layer.table[0, 200 // 16].long(), 0, 200 % 16
    kept = layer.cache[entry].clone()
    layer.cache[entry] = torch.nan
    broken = layer.expanded(q, [0, 390], [400])
    assert torch.equal(broken[:190], clean[:190])
    assert broken[190:].isnan().all()
    assert layer.expanded(torch.full_like(q, torch.nan), [0, 390], [400])[1:].isnan().all()
    layer.cache[entry] = kept
    assert torch.equal(layer.expanded(q, [0, 390], [400]), clean)


@pytest.mark.parametrize("weights", ["bfloat16", "float16"])
def test_rounding_is_that_of_bfloat16(random_weight: RandomWeight, weights: str) -> None:
    if "avx512_bf16" not in tokenspeed_kernel_cpu.available_instruction_sets():
        pytest.skip("this machine has no AVX-512 BF16")
    lengths, starts = [170, 333], [0, 170, 210]
    layer = _layer(random_weight, lengths, sizes=(96, 10, 40, 24), dtype=torch.bfloat16, weights=weights)
    q = layer.queries(210)
    with tokenspeed_kernel_cpu.use_instruction_set("avx512_bf16"):
        exact = layer.expanded(q, starts, lengths)
        out = layer.expanded(q, starts, lengths, activations="bfloat16")
    size = float(exact.abs().max())
    assert 1e-5 * size < float((out - exact).abs().max()) < 2e-2 * size
    with (
        tokenspeed_kernel_cpu.use_instruction_set("avx512"),
        pytest.raises(RuntimeError, match="instruction set avx512 has no attention with rounded activations"),
    ):
        layer.expanded(q, starts, lengths, activations="bfloat16")


def test_empty_calls(random_weight: RandomWeight, instruction_set: str) -> None:
    layer = _layer(random_weight, [])
    assert layer.expanded(layer.queries(0), [0], []).shape == (0, 3, 12)


DEBUG_CALLS = """
import torch
from tokenspeed_kernel.ops import bind_mla_extend_expanded
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_cpu.checks import KernelArgumentError
f, i = torch.zeros, lambda *values: torch.tensor(values, dtype=torch.int32)
fn = bind_mla_extend_expanded(QuantizedTensor.from_dense(f(2 * 7, 8), "up"), 2, rotary_dim=4, plain_dim=5,
                              kernel_page_size=4, kv_dtype=torch.float32).fn
q, cache, table, starts, lengths, out = f(1, 2, 9), f(3, 1, 4, 12), i(1, 2)[None], i(0, 1), i(5), f(1, 2, 2)
wrong = [
    (f(1, 2, 11), cache, table, starts, lengths, 1.0, out),
    (f(1, 3, 9), cache, table, starts, lengths, 1.0, out),
    (q, cache, table + 1, starts, lengths, 1.0, out),
    (q, cache, table, i(1, 0), lengths, 1.0, out),
    (q, cache, table, starts, lengths + 4, 1.0, out),
    (q, cache, table, starts, lengths, 1.0, f(1, 2, 3)),
]
for arguments in wrong:
    try:
        fn(*arguments)
    except KernelArgumentError as error:
        print(error)
    else:
        raise SystemExit(f"let pass: {arguments}")
fn(q, cache, table, starts, lengths, 1.0, out)
"""


def test_debug_mode_checks_arguments() -> None:
    result = subprocess.run(
        [sys.executable, "-c", DEBUG_CALLS],
        env={**os.environ, "TOKENSPEED_KERNEL_DEBUG": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    messages = result.stdout.splitlines()
    assert len(messages) == 6
    assert messages[0].startswith("q has heads of 11 elements and latent_cache entries of 12; with latents of 8")
    assert messages[5] == "out has shape [1, 2, 3]; it must be [1, 2, 2]"
