"""Formats of safetensors checkpoints that pack column by column (AWQ, GPTQ) or hold floats of four bits (MXFP4, NVFP4),
by plain arithmetic; see quantised_checkpoints.py."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The neighbour that each field of a word of AWQ's holds, from the lowest bits on."""


@dataclass(frozen=True)
class Packed:
    """One weight: the tensors it is stored as, and the values that they stand for."""

    parts: Tensors
    values: torch.Tensor


Quantise = Callable[[torch.Tensor], Packed]


def _words(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned integers [..., per word] to int32 [...], the first in the lowest bits."""
    words = torch.zeros(fields.shape[:-1], dtype=torch.int64)
    for place in range(32 // bits):
        words |= fields[..., place].long() << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def awq_words(values: torch.Tensor) -> torch.Tensor:
    """Unsigned integers [n, columns] of 4 bits to int32 [n, columns / 8]."""
    eights = values.view(values.shape[0], -1, 8)
    return _words(eights[..., list(AWQ_ORDER)], 4)


def _short(scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounded to so many significant bits, so that its products with small integers are exact in float16."""
    fraction, exponent = torch.frexp(scale)
    return torch.ldexp(torch.round(fraction * 2**bits), exponent - bits)


def integers(
    weight: torch.Tensor, group_of: torch.Tensor, bits: int, *, zero_points: bool, scale_bits: int = 5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(quants [rows, columns], scales [rows, groups], zeros [rows, groups]) of a weight whose column c is in the group
    group_of[c]."""
    groups, most = int(group_of.max()) + 1, (1 << bits) - 1
    low, high = torch.zeros(2, weight.shape[0], groups)
    for group in range(groups):
        part = weight[:, group_of == group]
        low[:, group], high[:, group] = part.amin(dim=1).clamp(max=0), part.amax(dim=1).clamp(min=0)
    if zero_points:
        scales = _short((high - low) / most, scale_bits)
        zeros = torch.round(-low / scales).clamp(1, most)
    else:
        scales = _short(torch.maximum(-low, high) / (most // 2), scale_bits)
        zeros = torch.full_like(scales, (most + 1) // 2)
    quants = torch.round(weight / scales[:, group_of]) + zeros[:, group_of]
    return quants.clamp(0, most), scales, zeros


def _values(quants: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_of: torch.Tensor) -> torch.Tensor:
    return (quants - zeros[:, group_of]) * scales[:, group_of]


def awq(group: int, scale_bits: int = 5) -> Quantise:
    """AWQ in groups of so many columns; -1: a whole row."""

    def quantise(weight: torch.Tensor) -> Packed:
        columns = weight.shape[1]
        group_of = torch.arange(columns) // (columns if group == -1 else group)
        quants, scales, zeros = integers(weight, group_of, 4, zero_points=True, scale_bits=scale_bits)
        parts = {"qweight": awq_words(quants.T), "qzeros": awq_words(zeros.T), "scales": scales.T.half().contiguous()}
        return Packed(parts, _values(quants, scales.half().float(), zeros, group_of))

    return quantise


def gptq(
    bits: int,
    group: int,
    *,
    sym: bool = True,
    version: int = 1,
    desc_act: bool = False,
    to_bfloat16: bool = False,
    scale_bits: int = 5,
) -> Quantise:
    """GPTQ; zero points are stored less 1 in version 1. ``desc_act``: columns belong to groups in no order."""

    def quantise(weight: torch.Tensor) -> Packed:
        columns, per_word = weight.shape[1], 32 // bits
        group_of = torch.arange(columns) // (columns if group == -1 else group)
        if desc_act:
            group_of = group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        quants, scales, zeros = integers(weight, group_of, bits, zero_points=not sym, scale_bits=scale_bits)
        stored = zeros.T - (1 if version == 1 else 0)
        parts = {
            "qweight": _words(quants.T.reshape(-1, per_word, weight.shape[0]).transpose(1, 2), bits),
            "qzeros": _words(stored.reshape(stored.shape[0], -1, per_word), bits),
            "scales": scales.T.half().contiguous(),
            "g_idx": group_of.to(torch.int32),
        }
        values = _values(quants, scales, zeros, group_of)
        return Packed(parts, values.to(torch.bfloat16).float() if to_bfloat16 else values)

    return quantise


def e2m1(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest e2m1 of each value: as nibbles, and as numbers."""
    nearest = (values.abs().unsqueeze(-1) - E2M1).abs().argmin(dim=-1)
    numbers = torch.where(values < 0, -E2M1[nearest], E2M1[nearest])
    return nearest + 8 * (values < 0).long(), numbers


def pairs(nibbles: torch.Tensor) -> torch.Tensor:
    """Two neighbours in a byte, the first in its low half."""
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).to(torch.uint8)


def mxfp4(weight: torch.Tensor) -> Packed:
    """MXFP4 as compressed-tensors has it: groups of 32 under powers of two."""
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(dim=-1, keepdim=True).clamp(min=2.0**-100))) - 2
    nibbles, numbers = e2m1(groups / torch.exp2(exponents))
    scales = (exponents.squeeze(-1) + 127).to(torch.uint8)
    values = (numbers * torch.exp2(exponents)).reshape(weight.shape)
    return Packed({"weight_packed": pairs(nibbles).reshape(*weight.shape[:-1], -1), "weight_scale": scales}, values)


def nvfp4(*, modelopt: bool) -> Quantise:
    """NVFP4: groups of 16 under e4m3 scales, and a float32 scale that multiplies (modelopt) or divides. The values come
    from float64, and are those in bfloat16 where the columns are no whole blocks of 64."""

    def quantise(weight: torch.Tensor) -> Packed:
        groups = weight.reshape(*weight.shape[:-1], -1, 16)
        whole = weight.abs().max() / (6.0 * 448.0)
        scales = (groups.abs().amax(dim=-1) / 6.0 / whole).to(torch.float8_e4m3fn)
        stored = whole if modelopt else 1.0 / whole
        factor = scales.double() * (stored.double() if modelopt else 1.0 / stored.double())
        nibbles, numbers = e2m1(groups / factor.float().clamp(min=1e-30).unsqueeze(-1))
        values = (numbers.double() * factor.unsqueeze(-1)).reshape(weight.shape).float()
        if weight.shape[-1] % 64:
            values = values.to(torch.bfloat16).float()
        packed = pairs(nibbles).reshape(*weight.shape[:-1], -1)
        if modelopt:
            return Packed({"weight": packed, "weight_scale": scales, "weight_scale_2": stored.reshape(())}, values)
        return Packed(
            {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": stored.reshape(1)}, values
        )

    return quantise
