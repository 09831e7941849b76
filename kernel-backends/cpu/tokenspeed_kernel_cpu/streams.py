"""hyper.begin, hyper.mix, hyper.spread and hyper.collapse; contracts in tokenspeed_kernel.ops.hyper."""

import torch

from tokenspeed_kernel_cpu import _native
from tokenspeed_kernel_cpu.checks import checked, expect

_hyper_begin = _native.hyper_begin
_hyper_mix = _native.hyper_mix
_hyper_spread = _native.hyper_spread
_hyper_collapse = _native.hyper_collapse


def _check_shares(
    streams: torch.Tensor, projection: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, rows: int, scales: int
) -> None:
    _, count, width = streams.shape
    expect("streams", streams, torch.float32, streams.shape)
    expect("projection", projection, torch.float32, (rows, count * width))
    expect("base", base, torch.float32, (rows,))
    expect("scale", scale, torch.float32, (scales,))


def _check_begin(x: torch.Tensor, streams: torch.Tensor) -> None:
    expect("streams", streams, torch.float32, streams.shape)
    expect("x", x, torch.float32, (streams.shape[0], streams.shape[2]))


def _check_mix(
    streams: torch.Tensor,
    projection: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    _eps: float,
    _floor: float,
    _rounds: int,
    post: torch.Tensor,
    comb: torch.Tensor,
    out: torch.Tensor,
) -> None:
    tokens, count, width = streams.shape
    _check_shares(streams, projection, base, scale, (2 + count) * count, 3)
    expect("post", post, torch.float32, (tokens, count))
    expect("comb", comb, torch.float32, (tokens, count, count))
    expect("out", out, torch.float32, (tokens, width))


def _check_spread(x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, streams: torch.Tensor) -> None:
    tokens, count, width = streams.shape
    expect("x", x, torch.float32, (tokens, width))
    expect("post", post, torch.float32, (tokens, count))
    expect("comb", comb, torch.float32, (tokens, count, count))
    expect("streams", streams, torch.float32, streams.shape)


def _check_collapse(
    streams: torch.Tensor,
    projection: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    _eps: float,
    _floor: float,
    out: torch.Tensor,
) -> None:
    _check_shares(streams, projection, base, scale, streams.shape[1], 1)
    expect("out", out, torch.float32, (streams.shape[0], streams.shape[2]))


@checked(_check_begin)
def begin(x: torch.Tensor, streams: torch.Tensor) -> None:
    """Every stream is x."""
    _hyper_begin(x.data_ptr(), streams.data_ptr(), *streams.shape)


@checked(_check_mix)
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
    """One stream of several, and how they are to be spread again."""
    tokens, count, width = streams.shape
    _hyper_mix(
        streams.data_ptr(),
        tokens,
        count,
        width,
        projection.data_ptr(),
        base.data_ptr(),
        scale.data_ptr(),
        eps,
        floor,
        rounds,
        post.data_ptr(),
        comb.data_ptr(),
        out.data_ptr(),
    )


@checked(_check_spread)
def spread(x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, streams: torch.Tensor) -> None:
    """Mixes the streams with each other and adds each one's share of x, in place."""
    tokens, count, width = streams.shape
    _hyper_spread(x.data_ptr(), post.data_ptr(), comb.data_ptr(), streams.data_ptr(), tokens, count, width)


@checked(_check_collapse)
def collapse(
    streams: torch.Tensor,
    projection: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    floor: float,
    out: torch.Tensor,
) -> None:
    """One stream of several."""
    tokens, count, width = streams.shape
    _hyper_collapse(
        streams.data_ptr(),
        tokens,
        count,
        width,
        projection.data_ptr(),
        base.data_ptr(),
        scale.data_ptr(),
        eps,
        floor,
        out.data_ptr(),
    )
