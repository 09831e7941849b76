"""hyper.begin, hyper.mix, hyper.spread and hyper.collapse: hyper-connections whose mixing matrix is doubly stochastic.

Manifold-constrained hyper-connections (Xie et al., 2025; DeepSeek-V4): instead of one residual stream a token has N.
Before a block they are mixed into one input; behind it they are mixed with each other, and each gets a share of the
output. The shares come from the streams themselves.

Common to all
    streams float32 [T, N, H], contiguous. All others contiguous too; nothing overlaps unless said. T may be 0.
    z = projection @ (x / sqrt(mean(x²) + eps)) for x, a token's N * H numbers; sums in float32 at least.

begin
    ``fn(x, streams) -> None``: every stream becomes x float32 [T, H].

mix
    ``fn(streams, projection, base, scale, eps, floor, rounds, post, comb, out) -> None``
    projection float32 [(2 + N) * N, N * H], base float32 [(2 + N) * N], scale float32 [3]; eps and floor Python floats,
    rounds a Python int above 0. Of z, and of base, the first N numbers are for "pre", the next N for "post", the others
    for "comb", row by row.
    pre = sigmoid(z * scale[0] + base) + floor; out float32 [T, H] = sum over the streams of pre * stream.
    post float32 [T, N] = 2 * sigmoid(z * scale[1] + base).
    comb float32 [T, N, N]: the softmax of z * scale[2] + base over each row, + floor; its columns divided by their sum
    + floor; then, rounds - 1 times, its rows by their sum + floor, and its columns likewise.

spread
    ``fn(x, post, comb, streams) -> None``
    streams, in place: stream k becomes post[k] * x + the sum over j of comb[j, k] * stream j; x float32 [T, H].

collapse
    ``fn(streams, projection, base, scale, eps, floor, out) -> None``
    projection float32 [N, N * H], base float32 [N], scale float32 [1]: out as in mix.

Roles: input, output. Traits: streams (N).
"""

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.ops.activation import ACTIVATION_SIGNATURE
from tokenspeed_kernel.registry import Band, KernelSpec, Operation, declare_operation, register_kernel
from tokenspeed_kernel.traits import Range, size_trait


def _declare(mode: str, arguments: str) -> Operation:
    return declare_operation(
        Operation(
            family="hyper",
            mode=mode,
            roles=ACTIVATION_SIGNATURE.roles,
            traits={"streams": size_trait("residual streams of a token", 4)},
            arguments=arguments,
        )
    )


BEGIN = _declare("begin", "x [T, H], streams [T, N, H]")
MIX = _declare("mix", "streams, projection, base, scale, eps, floor, rounds, post, comb, out")
SPREAD = _declare("spread", "x [T, H], post [T, N], comb [T, N, N], streams [T, N, H] in/out")
COLLAPSE = _declare("collapse", "streams, projection, base, scale, eps, floor, out")


def _reference_spec(mode: str) -> KernelSpec:
    return KernelSpec(
        name=f"reference_hyper_{mode}",
        family="hyper",
        mode=mode,
        solution="reference",
        signatures=frozenset({ACTIVATION_SIGNATURE}),
        traits={"streams": Range(1)},
        band=Band.REFERENCE,
        tags=frozenset({"deterministic", "row_invariant"}),
    )


def _projected(streams: torch.Tensor, projection: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 [T, outputs]: z. Elementwise products and a sum, in an order that does not hang on T as a matrix
    product's does."""
    flat = streams.flatten(1)
    normed = flat * torch.rsqrt(flat.square().mean(dim=1, keepdim=True) + eps)
    out = flat.new_empty(flat.shape[0], projection.shape[0])
    for place, row in enumerate(projection):
        torch.sum(normed * row, dim=1, out=out[:, place])
    return out


def _gathered(streams: torch.Tensor, shares: torch.Tensor, out: torch.Tensor) -> None:
    """The weighed sum of the streams; shares [T, N]."""
    out.copy_((streams * shares.unsqueeze(2)).sum(dim=1))


@register_kernel(_reference_spec("begin"))
def reference_begin(x: torch.Tensor, streams: torch.Tensor) -> None:
    """hyper.begin by PyTorch."""
    streams.copy_(x.unsqueeze(1).expand_as(streams))


@register_kernel(_reference_spec("mix"))
def reference_mix(
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
    """hyper.mix by PyTorch."""
    count = streams.shape[1]
    before, after, mixing = slice(0, count), slice(count, 2 * count), slice(2 * count, None)
    z = _projected(streams, projection, eps)
    _gathered(streams, torch.sigmoid(z[:, before] * scale[0] + base[before]) + floor, out)
    post.copy_(2.0 * torch.sigmoid(z[:, after] * scale[1] + base[after]))
    matrix = torch.softmax((z[:, mixing] * scale[2] + base[mixing]).view(comb.shape), dim=2) + floor
    matrix = matrix / (matrix.sum(dim=1, keepdim=True) + floor)
    for _ in range(rounds - 1):
        matrix = matrix / (matrix.sum(dim=2, keepdim=True) + floor)
        matrix = matrix / (matrix.sum(dim=1, keepdim=True) + floor)
    comb.copy_(matrix)


@register_kernel(_reference_spec("spread"))
def reference_spread(x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, streams: torch.Tensor) -> None:
    """hyper.spread by PyTorch."""
    mixed = post.unsqueeze(2) * x.unsqueeze(1)
    for stream in range(streams.shape[1]):
        mixed += comb[:, stream].unsqueeze(2) * streams[:, stream].unsqueeze(1)
    streams.copy_(mixed)


@register_kernel(_reference_spec("collapse"))
def reference_collapse(
    streams: torch.Tensor,
    projection: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    floor: float,
    out: torch.Tensor,
) -> None:
    """hyper.collapse by PyTorch."""
    _gathered(streams, torch.sigmoid(_projected(streams, projection, eps) * scale + base) + floor, out)


def bind_hyper(mode: str, *, streams: int, override: str | None = None) -> Bound:
    """Chooses the kernel of ``mode``: "begin", "mix", "spread" or "collapse"; raises ValueError for another."""
    if mode not in ("begin", "mix", "spread", "collapse"):
        raise ValueError(f"{mode!r} is no operation on streams; use begin, mix, spread or collapse")
    return bind("hyper", mode, ACTIVATION_SIGNATURE, {"streams": streams}, override=override)
