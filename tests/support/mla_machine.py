"""The MLA package on a machine without a GPU: its own host code, and its kernels' compiled PTX run by ptx_machine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from ptx_machine import Block, Memory, Program, TensorMap, packed

from tokenspeed_kernel.platform import PlatformInfo, override_platform
from tokenspeed_mla import decode
from tokenspeed_mla.addressing import LATENT, TILE_KEYS, TILE_ROWS, WIDTH, ceil_div
from tokenspeed_mla.ahead import compile_ahead
from tokenspeed_mla.compilation import HOPPER, Variant, decode_variant, merge_variant
from tokenspeed_mla.kernels.hopper_steps import COLUMNS, THREADS
from tokenspeed_mla.kernels.merge import LANES, WARPS

PROCESSORS = 132

GPU = PlatformInfo(
    vendor="nvidia",
    machine="x86_64",
    isa="sm_90",
    architecture=(9, 0),
    driver=(580, 0),
    cores=8,
    memory_bytes=1 << 37,
)
"""The machine that it passes for."""

shared_bytes_used = 0
"""The most that any block of a decode touched."""


@cache
def _program(variant: Variant) -> Program:
    return Program(compile_ahead(variant).ptx)


def _decode_runner(architecture: str, element: torch.dtype, output: torch.dtype, page: int) -> Callable[..., None]:
    """What compile_decode returns, for addresses in this process."""
    program = _program(decode_variant(architecture, element, output, page))
    size = output.itemsize

    def launch(
        q: int,
        cache_at: int,
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
        scale: float,
        stream: None,
    ) -> None:
        rows, all_groups = fold * heads, batch * groups
        memory = Memory()
        memory.lend(q, all_groups * rows * WIDTH * 2)
        memory.lend(cache_at, ((pages - 1) * block_stride + (page - 1) * token_stride + WIDTH) * 2)
        memory.lend(lengths, batch * 4)
        for row, seq_len in enumerate(memory.locate(lengths, batch * 4).view("i4")):
            # Table entries behind a row's length are not there to read.
            memory.lend(table + row * table_stride * 4, ceil_div(int(seq_len), page) * 4)
        for split in range(splits):
            for group in range(all_groups):
                memory.lend(out + (split * out_split + group * out_group) * size, rows * LATENT * size)
                memory.lend(lse + (split * lse_split + group * lse_group) * 4, rows * 4)
        q_strides = (2, WIDTH * 2, rows * WIDTH * 2)
        kv_strides = (2, token_stride * 2, block_stride * 2)
        parameters: list[bytes | TensorMap] = [
            TensorMap(q, 2, (WIDTH, rows, all_groups), q_strides, (COLUMNS, TILE_ROWS, 1)),
            packed("II", rows, all_groups),
            TensorMap(cache_at, 2, (WIDTH, page, pages), kv_strides, (COLUMNS, min(page, TILE_KEYS), 1)),
            packed("I", pages),
            packed("QIIQ", table, batch, pages, table_stride),
            packed("QII", lengths, batch, 0),
            packed("QIIIIQQ", out, rows, all_groups, splits, 0, out_group, out_split),
            packed("QIIIIQQ", lse, rows, all_groups, splits, 0, lse_group, lse_split),
            packed("B", 1),
            packed("B", 1),
            *(packed("I", number) for number in (groups, fold, heads, splits)),
            packed("f", scale),
        ]
        global shared_bytes_used
        for position in _blocks(ceil_div(rows, TILE_ROWS), all_groups, splits):
            block = Block(program, memory, parameters, position, THREADS)
            block.run()
            shared_bytes_used = max(shared_bytes_used, block.shared_used)

    return launch


def _merge_runner(architecture: str, output: torch.dtype) -> Callable[..., None]:
    """What compile_merge returns, for addresses in this process."""
    program = _program(merge_variant(architecture, output))

    def launch(
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
        stream: None,
    ) -> None:
        memory = Memory()
        for split in range(splits):
            for group in range(groups):
                memory.lend(partials + (split * split_stride + group * group_stride) * 4, rows * LATENT * 4)
                memory.lend(partial_lse + (split * lse_split + group * lse_group) * 4, rows * 4)
        memory.lend(out, groups * rows * LATENT * output.itemsize)
        memory.lend(lse, groups * rows * 4)
        parameters: list[bytes | TensorMap] = [
            packed("QIIIIQQ", partials, splits, groups, rows, 0, split_stride, group_stride),
            packed("QIIIIQQ", partial_lse, splits, groups, rows, 0, lse_split, lse_group),
            packed("QIIQ", out, groups, rows, rows * LATENT),
            packed("QIIQ", lse, groups, rows, rows),
            packed("I", rows),
            packed("I", splits),
        ]
        for position in _blocks(ceil_div(rows, WARPS), groups, 1):
            Block(program, memory, parameters, position, WARPS * LANES).run()

    return launch


def _blocks(x: int, y: int, z: int) -> Iterator[tuple[int, int, int]]:
    return ((i, j, k) for k in range(z) for j in range(y) for i in range(x))


def _address(tensor: torch.Tensor, alignment: int = 4) -> int:
    assert tensor.data_ptr() % alignment == 0
    return tensor.data_ptr()


@contextmanager
def on_machine() -> Iterator[None]:
    """Within the block, the package takes the CPU for a GPU: tensors of this process, kernels run by the machine."""
    stand_ins: dict[str, Any] = {
        "compile_decode": cache(_decode_runner),
        "compile_merge": cache(_merge_runner),
        "address_of": _address,
        "stream_of": lambda device: None,
        "architecture_of": lambda device: HOPPER,
        "processors_of": lambda device: PROCESSORS,
    }
    with patch.multiple(decode, **stand_ins), override_platform(GPU):
        yield
