"""The MLA package on a machine without a GPU: its own host code, what was compiled of it
run by ptx_host, and its kernels' PTX by ptx_machine."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import ptx_host
import torch
from ptx_host import HostFunction
from ptx_memory import Memory

from tokenspeed_kernel.platform import PlatformInfo, override_platform
from tokenspeed_mla import decode, prefill
from tokenspeed_mla.addressing import EXPANDED, LATENT, TILE_ROWS, VALUE, WIDTH, ceil_div
from tokenspeed_mla.compilation import decode_variant, merge_variant, prefill_variant

PROCESSORS = 132


def gpu(architecture: str) -> PlatformInfo:
    """The machine that it passes for, of an architecture such as "sm_90a"."""
    number = int(architecture.removeprefix("sm_").removesuffix("a"))
    return PlatformInfo(
        vendor="nvidia",
        machine="x86_64",
        isa=f"sm_{number}",
        architecture=(number // 10, number % 10),
        driver=(580, 0),
        cores=8,
        memory_bytes=1 << 37,
    )


@cache
def decode_runner(
    architecture: str,
    element: torch.dtype,
    output: torch.dtype,
    page: int,
    tile_rows: int = TILE_ROWS,
    cached: torch.dtype | None = None,
) -> HostFunction:
    """What compile_decode returns, for addresses in this process."""

    def lend(
        q: int,
        entries: int,
        table: int,
        lengths: int,
        out: int,
        lse: int,
        batch: int,
        groups: int,
        fold: int,
        heads: int,
        splits: int,
        pages: int,
        block_stride: int,
        token_stride: int,
        table_stride: int,
        out_group: int,
        out_split: int,
        lse_group: int,
        lse_split: int,
        *_: object,
    ) -> Memory:
        rows, size = fold * heads, output.itemsize
        memory = Memory()
        memory.lend(q, batch * groups * rows * WIDTH * 2)
        last = (pages - 1) * block_stride + (page - 1) * token_stride + WIDTH
        memory.lend(entries, last * (cached or element).itemsize)
        memory.lend(lengths, batch * 4)
        for row, seq_len in enumerate(memory.locate(lengths, batch * 4).view("i4")):
            # Table entries behind a row's length are not there to read.
            memory.lend(table + row * table_stride * 4, ceil_div(int(seq_len), page) * 4)
        for split in range(splits):
            for group in range(batch * groups):
                memory.lend(out + (split * out_split + group * out_group) * size, rows * LATENT * size)
                memory.lend(lse + (split * lse_split + group * lse_group) * 4, rows * 4)
        return memory

    return HostFunction(decode_variant(architecture, element, output, page, tile_rows, cached), lend)


@cache
def _merge_runner(architecture: str, output: torch.dtype) -> HostFunction:
    """What compile_merge returns, for addresses in this process."""

    def lend(
        partials: int,
        partial_lse: int,
        out: int,
        lse: int,
        groups: int,
        rows: int,
        splits: int,
        group_stride: int,
        split_stride: int,
        lse_group: int,
        lse_split: int,
        *_: object,
    ) -> Memory:
        memory = Memory()
        for split in range(splits):
            for group in range(groups):
                memory.lend(partials + (split * split_stride + group * group_stride) * 4, rows * LATENT * 4)
                memory.lend(partial_lse + (split * lse_split + group * lse_group) * 4, rows * 4)
        memory.lend(out, groups * rows * LATENT * output.itemsize)
        memory.lend(lse, groups * rows * 4)
        return memory

    return HostFunction(merge_variant(architecture, output), lend)


@cache
def prefill_runner(architecture: str, element: torch.dtype, output: torch.dtype, causal: bool) -> HostFunction:
    """What compile_prefill returns, for addresses in this process."""

    def lend(
        q: int,
        k: int,
        v: int,
        query_start: int,
        key_start: int,
        out: int,
        lse: int,
        queries: int,
        keys: int,
        heads: int,
        rows: int,
        q_stride: int,
        q_head_stride: int,
        k_stride: int,
        k_head_stride: int,
        v_stride: int,
        v_head_stride: int,
        *_: object,
    ) -> Memory:
        memory = Memory()
        memory.lend(q, ((queries - 1) * q_stride + (heads - 1) * q_head_stride + EXPANDED) * 2)
        memory.lend(k, ((keys - 1) * k_stride + (heads - 1) * k_head_stride + EXPANDED) * 2)
        memory.lend(v, ((keys - 1) * v_stride + (heads - 1) * v_head_stride + VALUE) * 2)
        for starts in (query_start, key_start):
            memory.lend(starts, (rows + 1) * 4)
        memory.lend(out, queries * heads * VALUE * output.itemsize)
        memory.lend(lse, queries * heads * 4)
        return memory

    return HostFunction(prefill_variant(architecture, element, output, causal), lend)


def _address(tensor: torch.Tensor, alignment: int = 4) -> int:
    assert tensor.data_ptr() % alignment == 0
    return tensor.data_ptr()


@contextmanager
def on_machine(architecture: str, late: tuple[str, ...] = ()) -> Iterator[None]:
    """Within the block, the package takes the CPU for a GPU of this architecture: tensors of this process, kernels run
    by the machine. ``late``: as in ptx_machine.Block."""
    stand_ins: dict[str, Any] = {
        "compile_decode": decode_runner,
        "compile_merge": _merge_runner,
        "address_of": _address,
        "stream_of": lambda device: None,
        "architecture_of": lambda device: architecture,
        "processors_of": lambda device: PROCESSORS,
    }
    prefills = {name: stand_ins[name] for name in ("address_of", "stream_of", "architecture_of")}
    with ExitStack() as patches:
        patches.enter_context(patch.multiple(decode, **stand_ins))
        patches.enter_context(patch.multiple(prefill, compile_prefill=prefill_runner, **prefills))
        patches.enter_context(patch.object(ptx_host, "late_blocks", [late]))
        patches.enter_context(override_platform(gpu(architecture)))
        yield
