"""Registers what reads weights or quantises activations, besides gemm.linear and moe.experts."""

from collections.abc import Callable

import torch

from tokenspeed_kernel.ops.activation import ACTIVATION_SIGNATURE
from tokenspeed_kernel.ops.embedding import lookup_signature
from tokenspeed_kernel.ops.gemm import linear_signature
from tokenspeed_kernel.ops.moe import ROUTE_SIGNATURE
from tokenspeed_kernel.ops.quantize import restore_signature, rows_signature
from tokenspeed_kernel.signature import WEIGHT_FORMATS
from tokenspeed_kernel.traits import Range, TraitBound
from tokenspeed_kernel_triton import embedding, hyper, linear, moe, quantize

_EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
_SIZES = (None, 32, 64, 128)


def register_weights(register: Callable[..., None]) -> None:
    """``register``: registration's, for one kernel of an operation."""
    weights = WEIGHT_FORMATS.values()
    register("embedding.lookup", embedding.make_lookup, frozenset(map(lookup_signature, weights)), by_row=True)
    sizes: dict[str, TraitBound] = {"n": Range(0), "k": Range(1)}
    register("gemm.head_linear", linear.make_head_linear, frozenset(map(linear_signature, weights)), sizes)
    register("moe.table_route", moe.table_route, frozenset({ROUTE_SIGNATURE}), by_row=True)
    rows = frozenset(rows_signature(dtype, size) for dtype in _EIGHT_BITS for size in _SIZES)
    register("quantize.rows", quantize.rows, rows, by_row=True)
    blocks = (None, *((1, size) for size in _SIZES if size is not None), (128, 128))
    restored = frozenset(restore_signature(dtype, block) for dtype in _EIGHT_BITS for block in blocks)
    register("quantize.restore", quantize.restore, restored, by_row=True)
    streams: dict[str, TraitBound] = {"streams": Range(1, hyper.MAX_STREAMS)}
    for mode, by_row in (("begin", True), ("mix", False), ("spread", True), ("collapse", False)):
        register(f"hyper.{mode}", getattr(hyper, mode), frozenset({ACTIVATION_SIGNATURE}), streams, by_row=by_row)
