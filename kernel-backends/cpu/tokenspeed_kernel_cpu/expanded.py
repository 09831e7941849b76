"""attention.mla_extend_expanded; contract in tokenspeed_kernel.ops.mla_expanded."""

import torch

from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_cpu import _native
from tokenspeed_kernel_cpu.attention import KV_TYPES
from tokenspeed_kernel_cpu.checks import Kernel, KernelArgumentError, checked, expect, expect_range
from tokenspeed_kernel_cpu.latent import check_latent_cache
from tokenspeed_kernel_cpu.threads import follow_torch


def _make(weight: QuantizedTensor, heads: int, *, rounded: bool) -> Kernel:
    follow_torch()
    rows, latent = weight.shape
    attend = _native.UpProjection(weight.format, rows, latent, weight.plane.data_ptr(), heads).attend

    def check(
        q: torch.Tensor,
        latent_cache: torch.Tensor,
        page_table: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        _scale: float,
        out: torch.Tensor,
    ) -> None:
        rotary, batch = latent_cache.shape[3] - latent, seq_lens.shape[0]
        plain = q.shape[2] - rotary
        if rotary < 0 or not 0 < plain < rows // heads:
            raise KernelArgumentError(
                f"q has heads of {q.shape[2]} elements and latent_cache entries of {latent_cache.shape[3]}; with "
                f"latents of {latent} that leaves {plain} for the plain part, and a head has {rows // heads} rows for "
                "it and a value"
            )
        check_latent_cache(latent_cache, latent + rotary)
        expect("q", q, torch.float32, (q.shape[0], heads, plain + rotary), strided_rows=True)
        expect("out", out, torch.float32, (q.shape[0], heads, rows // heads - plain))
        expect("query_start", query_start, torch.int32, (batch + 1,))
        expect_range("query_start", query_start, 0, q.shape[0] + 1)
        if bool((query_start.diff() < 0).any()):
            raise KernelArgumentError(f"query_start must not descend, got {query_start.tolist()}")
        expect("page_table", page_table, torch.int32, (batch, page_table.shape[1]), strided_rows=True)
        expect("seq_lens", seq_lens, torch.int32, (batch,))
        page_size = latent_cache.shape[2]
        expect_range("seq_lens", seq_lens, 0, page_table.shape[1] * page_size + 1)
        read = torch.arange(page_table.shape[1]) < (seq_lens.unsqueeze(1) + page_size - 1) // page_size
        expect_range("page_table", page_table[read], 0, latent_cache.shape[0])

    @checked(check)
    def mla_extend_expanded(
        q: torch.Tensor,
        latent_cache: torch.Tensor,
        page_table: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        _alive: object = weight,
    ) -> None:
        rotary = latent_cache.size(3) - latent
        attend(
            q.data_ptr(),
            q.stride(0),
            q.size(2) - rotary,
            rotary,
            KV_TYPES[latent_cache.dtype],
            latent_cache.data_ptr(),
            latent_cache.stride(0),
            latent_cache.stride(2),
            latent_cache.size(2),
            page_table.data_ptr(),
            page_table.stride(0),
            query_start.data_ptr(),
            seq_lens.data_ptr(),
            seq_lens.size(0),
            scale,
            rounded,
            out.data_ptr(),
        )

    return mla_extend_expanded


def make_mla_extend_expanded(weight: QuantizedTensor, heads: int) -> Kernel:
    """``fn(q, latent_cache, page_table, query_start, seq_lens, scale, out)``. Keeps the weight alive; no copy of it."""
    return _make(weight, heads, rounded=False)


def make_rounded_mla_extend_expanded(weight: QuantizedTensor, heads: int) -> Kernel:
    """The same with queries, keys, values and weights of the softmax rounded to bfloat16, over a bfloat16 cache;
    RuntimeError where an instruction set other than avx512_bf16 was put in force meanwhile."""
    return _make(weight, heads, rounded=True)
