"""What activations of four bits stand for, in float64 and by tables; fp4_rows.py has the rules."""

import itertools

import torch

from tokenspeed_kernel.gguf_blocks import split_last

FP4_SUMS = 2.0**-12
"""What sums of products of four bits may be off by, as a share of the sum of the terms' absolute values."""

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
_E4M3 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
_LEAST = 2.0**-100


def _nearest(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The entry of an ascending table that is nearest to each x >= 0; at a middle the one of even place."""
    middles = (table[1:] + table[:-1]) / 2.0
    low, high = (torch.bucketize(x, middles, right=right) for right in (False, True))
    return table[torch.where(low % 2 == 0, low, high)]


def _power_not_below(x: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.exp2(exponent.double() - (mantissa == 0.5).double())


def _block_scales(largest: torch.Tensor, row_largest: torch.Tensor, group: int) -> torch.Tensor:
    """The scales of blocks whose largest magnitudes are given [T, blocks], in rows whose largest are [T, 1]."""
    if group == 16:
        whole = _power_not_below(row_largest / 2688.0)
        scale = _nearest(largest / (6.0 * whole), _E4M3) * whole
        return torch.where(row_largest >= _LEAST, scale, 0.0)
    mantissa, exponent = torch.frexp(largest)  # from 0.5 to 1
    power = torch.exp2(exponent.double() - (mantissa < 0.875).double())
    return torch.where(largest >= _LEAST, power / 4.0, 0.0)


def _rounded(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    spread = scales.unsqueeze(-1)
    quotient = torch.where(spread == 0.0, 0.0, blocks.abs() / spread)
    return _nearest(quotient, _E2M1) * spread * blocks.sign()


def fp4_inputs(x: torch.Tensor, group: int, error: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Finite x float64 [T, K] under scales of 16 (NVFP4) or 32 (MXFP4), as products take it: values and slack [T, K].

    ``error``: by how much each x may be off. The slack then covers what any x within it may become, where an element, a
    scale or a row's power of two lies at the middle of two.
    """
    blocks = split_last(x, -1, group)
    off = torch.zeros_like(blocks) if error is None else split_last(error, -1, group)
    low, high = blocks - off, blocks + off
    smallest, largest = (blocks.abs() - off).clamp(min=0.0).amax(dim=-1), (blocks.abs() + off).amax(dim=-1)
    found = []
    for of_block, of_row in itertools.product((smallest, largest), repeat=2):
        scales = _block_scales(of_block, of_row.amax(dim=-1, keepdim=True), group)
        found += [_rounded(part, scales) for part in (low, high)]
    least, most = torch.stack(found).amin(dim=0), torch.stack(found).amax(dim=0)
    return ((least + most) / 2.0).flatten(1), ((most - least) / 2.0).flatten(1)
