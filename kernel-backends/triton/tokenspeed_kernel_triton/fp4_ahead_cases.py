"""The launches of four bits that are compiled ahead of time; ahead_cases.py has the others."""

from collections.abc import Iterator

import torch

from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel_triton import fp4
from tokenspeed_kernel_triton.loading import Launch

ARCHITECTURES: dict[int, tuple[str, ...]] = {16: ("sm_100", "sm_120"), 32: ("sm_100", "sm_120", "gfx950")}
"""Elements under a scale (16: NVFP4, 32: MXFP4) to the architectures that multiply them."""


def _of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches(group: int) -> Iterator[tuple[str, Launch]]:
    """A weight of 8192 outputs and 4096 inputs for one token, 64 and 512; 256 experts of which 8 compute, hidden 7168
    and intermediate 2048, for 256 tokens; and inputs that no step divides."""
    device = torch.device("meta")
    for tokens, inputs in ((1, 4096), (64, 4096), (512, 4096), (512, 2880)):
        x = fp4.empty_rows(tokens, inputs, group, device)
        yield f"quantise, {tokens} x {inputs}", fp4.quantise_of(_of(tokens, inputs), x)
        weight = fp4.empty_rows(8192, inputs, group, device)
        for launch in fp4.linear_of(x, weight, None, _of(tokens, 8192)):
            yield f"{launch.function}, {tokens} x {inputs}", launch
    tokens, experts, top_k = 256, 256, 8
    pairs = tokens * top_k
    order, starts = _of(pairs, dtype=torch.int32), _of(experts + 1, dtype=torch.int32)
    down = fp4.Fp4Experts(fp4.empty_rows(experts * 7168, 2048, group, device), None, experts)
    x = fp4.empty_rows(pairs, 2048, group, device)
    inner = _of(pairs, 2 * 2048)
    for activation in (GatedActivation("silu"), GatedActivation("clamped_swiglu", 1.7, 7.0)):
        gate = fp4.Gate(inner[:, 2048:], activation)
        yield f"quantise behind {activation.kind}", fp4.quantise_of(inner[:, :2048], x, gate)
    yield "experts", down.launch(x, _of(pairs), order, starts, _of(pairs, 7168), top_k)
