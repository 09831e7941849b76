"""hyper.begin, mix, spread and collapse on the device; contracts in tokenspeed_kernel.ops.hyper.

The projection of a token's streams is gemm.linear's product, split over its many inputs; the norm, which scales a
whole token, is applied to what comes out.
"""

import torch

from tokenspeed_kernel_triton.linear import multiply
from tokenspeed_kernel_triton.loading import Launch, power_of_two
from tokenspeed_kernel_triton.planes import Planes

STRETCH = 1024
"""Elements of a stream that one block takes, or takes at a time."""

MAX_STREAMS = 8
"""Of a token, that a block holds a stretch of."""


def begin_of(x: torch.Tensor, streams: torch.Tensor) -> Launch:
    """The launch that makes every stream x."""
    tokens, count, width = streams.shape
    constants = {"STREAMS": count, "BLOCK": STRETCH}
    return Launch("hyper", "begin", (tokens, -(-width // STRETCH)), (x, streams, width), constants)


def begin(x: torch.Tensor, streams: torch.Tensor) -> None:
    """hyper.begin."""
    if x.shape[0]:
        begin_of(x, streams).run()


def mix_of(
    streams: torch.Tensor,
    z: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    floor: float,
    rounds: int,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    out: torch.Tensor,
) -> Launch:
    """The launch of what follows the projection; without ``post`` and ``comb`` that of hyper.collapse."""
    tokens, count, width = streams.shape
    shares = (z if post is None else post, z if comb is None else comb)
    arguments = (streams, z, base, scale, float(eps), float(floor), rounds, *shares, out, width)
    constants = {"STREAMS": count, "BLOCK_STREAMS": power_of_two(count), "BLOCK": STRETCH, "MIXING": comb is not None}
    return Launch("hyper", "mix", (tokens,), arguments, constants)


def _projected(streams: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """float32 [T, outputs]: the projection of every token's streams, not normed."""
    z = torch.empty(streams.shape[0], projection.shape[0], dtype=torch.float32, device=streams.device)
    shape = (projection.shape[0], projection.shape[1])
    multiply(streams.flatten(1), Planes("dense", 0, shape, projection), None, z, rounded=False)
    return z


def mix(
    streams: torch.Tensor,
    projection: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    floor: float,
    rounds: int,
    post: torch.Tensor,
    comb: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """hyper.mix."""
    if streams.shape[0]:
        z = _projected(streams, projection)
        mix_of(streams, z, base, scale, eps, floor, rounds, post, comb, out).run()


def collapse(
    streams: torch.Tensor,
    projection: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    floor: float,
    out: torch.Tensor,
) -> None:
    """hyper.collapse."""
    if streams.shape[0]:
        mix_of(streams, _projected(streams, projection), base, scale, eps, floor, 1, None, None, out).run()


def spread_of(x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, streams: torch.Tensor) -> Launch:
    """The launch that mixes the streams with each other and x."""
    tokens, count, width = streams.shape
    constants = {"STREAMS": count, "BLOCK_STREAMS": power_of_two(count), "BLOCK": STRETCH}
    return Launch("hyper", "spread", (tokens, -(-width // STRETCH)), (x, post, comb, streams, width), constants)


def spread(x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, streams: torch.Tensor) -> None:
    """hyper.spread."""
    if streams.shape[0]:
        spread_of(x, post, comb, streams).run()
