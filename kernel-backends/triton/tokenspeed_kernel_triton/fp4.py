"""gemm.linear and moe.experts with weights and activations of four bits.

Contracts are in tokenspeed_kernel.ops, how x is rounded in tokenspeed_kernel.fp4_rows.

A weight is taken apart when it is bound: codes as instructions read them (neighbours in a byte), scales in a plane of
their own, and for NVFP4 the float32 of a matrix once a row, for rows of several matrices may have been put together.
Activations are quantised by a launch of their own before each product.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from tokenspeed_kernel.fp4_rows import FP4_GROUP
from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.quantized import QuantizedTensor, WeightError
from tokenspeed_kernel_triton import planes
from tokenspeed_kernel_triton.configs import row_blocks
from tokenspeed_kernel_triton.device import architecture_of, processors_of
from tokenspeed_kernel_triton.loading import Launch
from tokenspeed_kernel_triton.moe import by_expert, combine_of

STRETCH = 1024
"""Elements of a row that a program quantises at a time."""


@dataclass(frozen=True)
class Fp4Tile:
    """How a product is cut.

    Attributes:
        tokens, outputs: of a tile.
        depth: inputs of a step of the loop.
        warps: of a block.
        stages: of the loop's pipeline.
    """

    tokens: int
    outputs: int
    depth: int
    warps: int
    stages: int


OUTPUTS = 128
"""Of a tile, everywhere: the rows that tcgen05.mma takes."""

FEW_TOKENS, MOST_SPLITS = 32, 8
"""Up to so many tokens a product is cut along its inputs, into so many parts: what they write and read again stays
small beside the weight."""

_MOST_TOKENS: Mapping[str, int] = MappingProxyType({"sm_100": 128, "sm_120": 64, "gfx950": 128})
_DEPTH: Mapping[str, int] = MappingProxyType({"sm_100": 256, "sm_120": 128, "gfx950": 256})
_STAGES: Mapping[str, int] = MappingProxyType({"sm_100": 4, "sm_120": 3, "gfx950": 2})


def fp4_tile(architecture: str, tokens: int) -> Fp4Tile:
    """The tile of a product of ``tokens`` rows. None of these figures was measured; see configs.py."""
    known = architecture if architecture in _DEPTH else "sm_100"  # the interpreter has no architecture of its own
    block = row_blocks(tokens, _MOST_TOKENS[known])
    return Fp4Tile(block, OUTPUTS, _DEPTH[known], 8 if block > 64 else 4, _STAGES[known])


@dataclass(frozen=True)
class Fp4Planes:
    """A weight, or quantised rows, as the kernels take them.

    Attributes:
        group: elements under one scale: 16 (NVFP4) or 32 (MXFP4).
        shape: (rows, columns) in elements.
        codes: uint8 [rows, columns / 2]: the elements 2j and 2j + 1 in the low and the high half of byte j.
        scales: uint8 [rows, columns / group], each an e4m3 (NVFP4) or an e8m0.
        whole: float32 [rows], what all of a row is multiplied by; None for MXFP4.
    """

    group: int
    shape: tuple[int, int]
    codes: torch.Tensor
    scales: torch.Tensor
    whole: torch.Tensor | None


def take_apart(weight: QuantizedTensor) -> Fp4Planes:
    """The planes of an nvfp4 or gguf_mxfp4 weight, copies. Raises WeightError for other formats, and where the blocks
    of a row have not all the same float32."""
    if weight.format not in FP4_GROUP:
        raise WeightError(f"{weight.source}: {weight.format} is none of {', '.join(sorted(FP4_GROUP))}")
    taken = planes.take_apart(weight)
    if taken.kind not in planes.FLOAT4:
        raise WeightError(f"{weight.source}: the blocks of a row have several float32 scales; put rows together only")
    assert taken.scales is not None, "both formats have them"
    whole = None if taken.units is None else taken.units.view(-1)
    return Fp4Planes(taken.group, weight.shape, taken.elements, taken.scales.view(torch.uint8), whole)


def empty_rows(rows: int, columns: int, group: int, device: torch.device) -> Fp4Planes:
    """Memory for quantised rows."""
    return Fp4Planes(
        group,
        (rows, columns),
        torch.empty(rows, columns // 2, dtype=torch.uint8, device=device),
        torch.empty(rows, columns // group, dtype=torch.uint8, device=device),
        torch.empty(rows, dtype=torch.float32, device=device) if group == 16 else None,
    )


@dataclass(frozen=True)
class Gate:
    """What rows are made of before they are quantised: activation(x) * up."""

    up: torch.Tensor
    activation: GatedActivation


def quantise_of(x: torch.Tensor, rows: Fp4Planes, gate: Gate | None = None) -> Launch:
    """The launch that quantises x float32, which may be row-strided, or what a gate makes of it, into ``rows``.

    Many rows are a program each, few are cut.
    """
    count, width = rows.shape
    stretches = -(-width // STRETCH)
    programs = 1 if count >= processors_of(x.device) else stretches
    up, kind, alpha, limit = x, "none", 0.0, 0.0
    if gate is not None:
        up, kind = gate.up, gate.activation.kind
        alpha, limit = float(gate.activation.alpha), float(gate.activation.limit)
    whole = rows.scales if rows.whole is None else rows.whole
    strides = (x.stride(0), up.stride(0))
    arguments = (x, up, rows.codes, rows.scales, whole, *strides, stretches // programs, alpha, limit)
    constants = {"WIDTH": width, "GROUP": rows.group, "KIND": kind, "BLOCK": STRETCH}
    return Launch("fp4", "quantise", (count, programs), arguments, constants)


def quantised(x: torch.Tensor, group: int, gate: Gate | None = None) -> Fp4Planes:
    """x float32 [T, K], or what a gate makes of it, in four bits, on its device."""
    rows = empty_rows(x.shape[0], x.shape[1], group, x.device)
    quantise_of(x, rows, gate).run()
    return rows


def _wholes(rows: Fp4Planes, weight: Fp4Planes) -> tuple[torch.Tensor, torch.Tensor]:
    """Both float32 scales; MXFP4 has none, and its kernels read none."""
    if rows.whole is None or weight.whole is None:
        return rows.scales, weight.scales
    return rows.whole, weight.whole


def splits_of(tiles: int, tokens: int, steps: int, processors: int) -> int:
    """Into how many parts the inputs of a product are cut: one for many tokens, and for as many tiles as processors."""
    if tokens > FEW_TOKENS or not tiles:
        return 1
    return max(1, min(MOST_SPLITS, steps, round(processors / tiles)))


def linear_of(x: Fp4Planes, weight: Fp4Planes, bias: torch.Tensor | None, out: torch.Tensor) -> list[Launch]:
    """The launches of out = x @ weight.T + bias: one, or the parts' and that of their sum."""
    tokens, outputs = out.shape
    inputs = weight.shape[1]
    tile = fp4_tile(architecture_of(out.device), tokens)
    tiles = (-(-outputs // tile.outputs), -(-tokens // tile.tokens))
    steps = -(-inputs // tile.depth)
    share = -(-steps // splits_of(tiles[0] * tiles[1], tokens, steps, processors_of(out.device)))
    splits = -(-steps // share)
    parts = out if splits == 1 else torch.empty(splits, tokens, outputs, dtype=torch.float32, device=out.device)
    x_whole, weight_whole = _wholes(x, weight)
    some_bias = out if bias is None else bias
    arguments = (
        x.codes,
        x.scales,
        x_whole,
        weight.codes,
        weight.scales,
        weight_whole,
        some_bias,
        parts,
        tokens,
        outputs,
        share,
    )
    constants = {
        "INPUTS": inputs,
        "GROUP": weight.group,
        "BIASED": bias is not None and splits == 1,
        "SPLIT": splits > 1,
        "BLOCK_M": tile.tokens,
        "BLOCK_N": tile.outputs,
        "DEPTH": tile.depth,
    }
    launch = Launch("fp4", "linear", (*tiles, splits), arguments, constants, tile.warps, tile.stages)
    if splits == 1:
        return [launch]
    added = (parts, some_bias, out, outputs, out.numel(), splits)
    constants = {"BIASED": bias is not None, "BLOCK": STRETCH}
    return [launch, Launch("fp4", "add_splits", (-(-out.numel() // STRETCH),), added, constants)]


def make_linear(weight: QuantizedTensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """gemm.linear with x in four bits."""
    planes = take_apart(weight)

    def linear(x: torch.Tensor, out: torch.Tensor) -> None:
        if out.numel():
            for launch in linear_of(quantised(x, planes.group), planes, bias, out):
                launch.run()

    return linear


@dataclass(frozen=True)
class Fp4Experts:
    """One of the two products of all experts; see moe.Grouped.

    Attributes:
        planes: of the weight [experts * outputs, inputs].
        bias: float32 [experts, outputs] or None.
    """

    planes: Fp4Planes
    bias: torch.Tensor | None
    experts: int

    def launch(
        self,
        x: Fp4Planes,
        factors: torch.Tensor | None,
        order: torch.Tensor,
        starts: torch.Tensor,
        out: torch.Tensor,
        top_k: int,
    ) -> Launch:
        """Of x [tokens, inputs], whose rows the order gathers, without ``factors``; with them of x [pairs, inputs] in
        the order."""
        pairs, planes = order.shape[0], self.planes
        outputs = planes.shape[0] // self.experts
        tile = fp4_tile(architecture_of(out.device), -(-pairs // self.experts))
        x_whole, weight_whole = _wholes(x, planes)
        arguments = (
            x.codes,
            x.scales,
            x_whole,
            planes.codes,
            planes.scales,
            weight_whole,
            out if self.bias is None else self.bias,
            out if factors is None else factors,
            order,
            starts,
            out,
            outputs,
            top_k,
        )
        constants = {
            "EXPERTS": self.experts,
            "INPUTS": planes.shape[1],
            "GROUP": planes.group,
            "BIASED": self.bias is not None,
            "GATHERED": factors is None,
            "BLOCK_M": tile.tokens,
            "BLOCK_N": tile.outputs,
            "DEPTH": tile.depth,
        }
        grid = (-(-outputs // tile.outputs), pairs // tile.tokens + self.experts)
        return Launch("fp4", "grouped", grid, arguments, constants, tile.warps, tile.stages)


def make_experts(
    gate_up: QuantizedTensor,
    down: QuantizedTensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: GatedActivation,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """moe.experts with what goes into both products in four bits."""
    hidden, intermediate = gate_up.shape[1], down.shape[1]
    experts = down.shape[0] // hidden
    first = Fp4Experts(take_apart(gate_up), gate_up_bias, experts)
    second = Fp4Experts(take_apart(down), down_bias, experts)
    group = first.planes.group

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        if not x.shape[0]:
            return
        top_k = ids.shape[1]
        order, starts = by_expert(ids, experts)
        inner, parts = (
            torch.empty(ids.numel(), width, dtype=torch.float32, device=x.device)
            for width in (2 * intermediate, hidden)
        )
        first.launch(quantised(x, group), None, order, starts, inner, top_k).run()
        middle = quantised(inner[:, :intermediate], group, Gate(inner[:, intermediate:], activation))
        second.launch(middle, weights, order, starts, parts, top_k).run()
        combine_of(parts, ids, out).run()

    return run
