"""Weights as the device's kernels take them: elements in one plane, scales in another, so that a tile reads both in
whole lines. What an element stands for stays exact.

Dense weights are taken as they lie. Of the others a weight is copied once, when it is bound, for all kernels that take
it; whoever binds it lets the original go. Elements of five and six bits have their high bits in a plane of their own,
so that they take no more memory than in the file; those of two and three bits take four.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from tokenspeed_kernel.gguf_blocks import five_bit_quants, split_last, take_k_blocks
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import WEIGHT_FORMATS
from tokenspeed_kernel_triton.device import loadable

DENSE = ("float32", "bfloat16", "float16")
QUANTISED = tuple(name for name in WEIGHT_FORMATS if name not in DENSE)

FLOAT4 = ("mxfp4", "nvfp4")
"""Kinds whose scales go with the elements."""

FLOAT4_STEP = 128
"""Inputs that a step of the loop takes where scales go with the elements: several groups."""

SLICE_BYTES = 256 << 20
"""Of the blocks that are taken apart at a time."""


@dataclass(frozen=True)
class Planes:
    """A weight [N, K] as the kernels take it.

    Attributes:
        kind: "dense"; "eight", elements of 8 bits; "quants", unsigned integers; "e2m1"; "mxfp4", e2m1 under powers of
            two, and "nvfp4", e2m1 under e4m3, which bfloat16 takes with them.
        group: elements under one scale; 0 for dense weights.
        elements: [N, K]; of "quants" and "e2m1" uint8 [N, K / 2], of which each ``half`` bytes hold, in their low
            nibbles, ``half`` elements, in their high ones the next; of these two each byte holds neighbours.
        half: see elements; a group, or half of one.
        zero: the quant that stands for 0.
        high_bits: of a quant above its nibble: 0, 1 or 2.
        high: those, uint8 [N, bytes]: byte i of each ``half`` holds, from the lowest bits on, those of the elements i,
            i + half, i + 2 half and so on.
        scales: [N, K / group], float32 or float16, or of 8 bits in units of ``units``; of "mxfp4" e8m0 as uint8, of
            "nvfp4" e4m3.
        minima: likewise, added to every element of a group.
        units, minimum_units: float32 or float16 [N, K / unit].
        unit: elements under one unit; 0 without units. Of "nvfp4" a row has one unit.
    """

    kind: str
    group: int
    shape: tuple[int, int]
    elements: torch.Tensor
    half: int = 0
    zero: int = 0
    high_bits: int = 0
    high: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    minima: torch.Tensor | None = None
    units: torch.Tensor | None = None
    minimum_units: torch.Tensor | None = None
    unit: int = 0

    @property
    def burden(self) -> str:
        """What a step has to hold: "dense" elements; "float4" ones with their scales; the "light" ones of a group;
        "heavy" ones, with minima, high bits or 128 of them; "pairs" of groups."""
        if self.kind == "dense":
            return "dense"
        if self.kind in FLOAT4:
            return "float4"
        if self.half == self.group:
            return "pairs"
        heavy = self.minima is not None or self.high is not None or self.group > 32
        return "heavy" if heavy else "light"

    def arguments(self, spare: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The planes in the kernels' order; ``spare`` stands in for those that are absent, and is not read."""
        planes = (self.elements, self.high, self.scales, self.minima, self.units, self.minimum_units)
        return tuple(spare if plane is None else loadable(plane) for plane in planes)

    def constants(self, depth: int) -> dict[str, Any]:
        """What kernels are compiled for; ``depth``: inputs of a step where the weight is dense."""
        group = self.group or depth
        return {
            "INPUTS": self.shape[1],
            "KIND": self.kind,
            "GROUP": group,
            "STEP": 2 * self.half if self.half else FLOAT4_STEP if self.kind in FLOAT4 else group,
            "ZERO": self.zero,
            "HIGH_BITS": self.high_bits,
            "HIGH_WIDTH": 0 if self.high is None else self.high.shape[1],
            "MINIMUM": self.minima is not None,
            "UNIT": self.unit,
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        planes = (self.elements, self.high, self.scales, self.minima, self.units, self.minimum_units)
        return sum(plane.numel() * plane.element_size() for plane in planes if plane is not None)


def take_apart(weight: QuantizedTensor) -> Planes:
    """The planes of a weight: a view of a dense one, else a copy, the same one as long as the weight is there."""
    found = _taken.get(weight)
    if found is None:
        found = _taken[weight] = _planes_of(weight)
    return found


_taken: "WeakKeyDictionary[QuantizedTensor, Planes]" = WeakKeyDictionary()


def _planes_of(weight: QuantizedTensor) -> Planes:
    name, shape = weight.format, weight.shape
    if name in DENSE:
        return Planes("dense", 0, shape, weight.plane)
    blocks = split_last(weight.plane, shape[1] // weight.block_elements, -1)
    if name.endswith("_k"):
        return _in_slices(lambda part: _of_k_blocks(name, part), blocks)
    if name == "nvfp4":
        return _of_nvfp4(blocks)
    if name == "fp8_blocks":
        scales = blocks[..., :4].contiguous().view(torch.float32).squeeze(-1)
        elements = blocks[..., 4:].contiguous().view(torch.float8_e4m3fn).view(shape)
        return Planes("eight", 128, shape, elements, scales=scales)
    if name == "gguf_q8_0":
        elements = blocks[..., 2:].contiguous().view(torch.int8).view(shape)
        return Planes("eight", 32, shape, elements, scales=_floats(blocks, 0))
    if name == "gguf_mxfp4":
        return _in_slices(_of_mxfp4, blocks)
    return _in_slices(lambda part: _of_thirty_two(name, part), blocks)


def _in_slices(take: Callable[[torch.Tensor], Planes], blocks: torch.Tensor) -> Planes:
    """``take`` of blocks [N, groups, bytes], SLICE_BYTES at a time: quants of a byte each would be twice the weight."""
    rows, step = blocks.shape[0], max(1, SLICE_BYTES // max(1, blocks[0:1].numel()))
    part = take(blocks[:step])
    if step >= rows:
        return part
    found = [(entry.name, getattr(part, entry.name)) for entry in fields(Planes)]
    whole: dict[str, Any] = {
        name: plane.new_empty(rows, plane.shape[1]) for name, plane in found if isinstance(plane, torch.Tensor)
    }
    for start in range(0, rows, step):
        part = part if not start else take(blocks[start : start + step])
        for name, plane in whole.items():
            plane[start : start + step] = getattr(part, name)
    return replace(part, shape=(rows, part.shape[1]), **whole)


def _of_thirty_two(name: str, blocks: torch.Tensor) -> Planes:
    """GGUF's blocks of 32 integers of four or five bits."""
    shape = (blocks.shape[0], blocks.shape[1] * 32)
    nibbles = blocks[..., -16:].contiguous().view(shape[0], shape[1] // 2)
    above = name.endswith("_1")
    five = name.startswith("gguf_q5")
    start = 4 if above else 2
    return Planes(
        "quants",
        32,
        shape,
        nibbles,
        16,
        zero=0 if above else 16 if five else 8,
        high_bits=1 if five else 0,
        high=_high_plane(five_bit_quants(blocks, start).view(shape), 16, 1) if five else None,
        scales=_floats(blocks, 0),
        minima=_floats(blocks, 2) if above else None,
    )


def _of_k_blocks(name: str, blocks: torch.Tensor) -> Planes:
    """A K format: groups of 16 or 32 under a scale in units of the block's."""
    found, shape = take_k_blocks(name, blocks), (blocks.shape[0], blocks.shape[1] * 256)
    group = 256 // found.scales.shape[-1]
    quants, high_bits = found.quants.view(shape), {"gguf_q5_k": 1, "gguf_q6_k": 2}.get(name, 0)
    minimum_units = found.minimum_unit
    return Planes(
        "quants",
        group,
        shape,
        _nibble_plane(quants, group),
        group,
        zero=found.zero,
        high_bits=high_bits,
        high=_high_plane(quants, group, high_bits) if high_bits else None,
        scales=found.scales.reshape(shape[0], -1),
        minima=None if found.minimums is None else found.minimums.reshape(shape[0], -1),
        units=found.unit.squeeze(-1).half(),  # which they are in the block
        minimum_units=None if minimum_units is None else -minimum_units.squeeze(-1).half(),
        unit=256,
    )


def _of_mxfp4(blocks: torch.Tensor) -> Planes:
    """Groups of 32 under a power of two."""
    shape = (blocks.shape[0], blocks.shape[1] * 32)
    return Planes("mxfp4", 32, shape, _neighbours(blocks[..., 1:], shape), scales=blocks[..., 0].contiguous())


def _of_nvfp4(blocks: torch.Tensor) -> Planes:
    """Groups of 16 under an e4m3 scale; the float32 over all is kept once a row where all blocks of a row agree."""
    units = blocks[..., :4].contiguous().view(torch.float32).squeeze(-1)
    return _in_slices(_of_matrices if bool((units == units[:, :1]).all()) else _of_mixed_rows, blocks)


def _of_matrices(blocks: torch.Tensor) -> Planes:
    """NVFP4 of which each row is one matrix's."""
    shape = (blocks.shape[0], blocks.shape[1] * 64)
    scales = blocks[..., 4:8].contiguous().view(torch.float8_e4m3fn).view(shape[0], -1)
    units = blocks[:, 0, :4].contiguous().view(torch.float32)
    nibbles = _neighbours(split_last(blocks[..., 8:], 2, 16).flatten(1, 2), shape)
    return Planes("nvfp4", 16, shape, nibbles, scales=scales, units=units, unit=shape[1])


def _of_mixed_rows(blocks: torch.Tensor) -> Planes:
    """NVFP4 of which a row has parts of several matrices."""
    shape = (blocks.shape[0], blocks.shape[1] * 64)
    units = blocks[..., :4].contiguous().view(torch.float32).squeeze(-1)
    scales = blocks[..., 4:8].contiguous().view(torch.float8_e4m3fn).view(shape[0], -1).float()
    nibbles = blocks[..., 8:].contiguous().view(shape[0], shape[1] // 2)
    return Planes("e2m1", 16, shape, nibbles, 16, scales=scales * units.repeat_interleave(4, dim=1))


def _floats(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte ``at`` of each block [N, groups, bytes], [N, groups]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _neighbours(nibbles: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Of nibbles [N, groups, 16], byte j of which holds the elements j and j + 16 of 32, uint8 [N, K / 2], byte j of
    which holds 2 j and 2 j + 1."""
    ordered = torch.cat([nibbles & 15, nibbles >> 4], dim=-1).view(shape[0], shape[1] // 2, 2)
    return ordered[..., 0] | (ordered[..., 1] << 4)


def _nibble_plane(quants: torch.Tensor, half: int) -> torch.Tensor:
    """The low nibbles of quants uint8 [N, K], uint8 [N, K / 2]; see Planes.elements."""
    low = split_last(quants & 15, -1, 2, half)
    return (low[:, :, 0] | (low[:, :, 1] << 4)).flatten(1)


def _high_plane(quants: torch.Tensor, half: int, bits: int) -> torch.Tensor:
    """What lies above the nibbles of quants uint8 [N, K]; see Planes.high. Its last bytes may be part empty."""
    rows, columns = quants.shape
    in_byte = 8 // bits
    padding = -columns % (half * in_byte)
    tiles = split_last(torch.nn.functional.pad(quants >> 4, (0, padding)), -1, in_byte, half)
    shifts = bits * torch.arange(in_byte, dtype=torch.uint8, device=quants.device).view(-1, 1)
    return (tiles << shifts).sum(dim=2, dtype=torch.uint8).view(rows, -1)
