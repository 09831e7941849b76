"""Cases of hyper.begin, hyper.mix, hyper.spread and hyper.collapse."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from tokenspeed_kernel.numerics.cases import (
    UNIT_ROUNDOFF,
    Buffers,
    Case,
    Close,
    Exact,
    Expectation,
    Outputs,
    register_cases,
)
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import FormatSignature

_FLOAT32 = torch.float32
_ROUNDOFF = UNIT_ROUNDOFF[_FLOAT32]


@dataclass(frozen=True)
class _Shares:
    """streams float32 [T, N, H], projection [rows, N * H], base [rows], scale."""

    streams: torch.Tensor
    projection: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    eps: float = 1e-6
    floor: float = 1e-6

    def held(self, buffers: Buffers) -> list[torch.Tensor]:
        return [buffers.read_only(name, getattr(self, name)) for name in ("streams", "projection", "base", "scale")]

    def exact(self, first: int, count: int, scale: int) -> Close:
        """z * scale + base of ``count`` shares, [T, count]."""
        x, rows = self.streams.flatten(1).double(), self.projection[first : first + count].double()
        normed = x * (x.square().mean(dim=1, keepdim=True) + self.eps).rsqrt()
        factor, base = self.scale[scale].double(), self.base[first : first + count].double()
        size = normed.abs() @ rows.abs().T * factor.abs() + base.abs()
        return Close(normed @ rows.T * factor + base, _ROUNDOFF * (x.shape[1] ** 0.5 + 24.0) * size)

    def gathered(self) -> Close:
        """The streams in one, [T, H]."""
        shares, streams = self.exact(0, self.streams.shape[1], 0), self.streams.double()
        pre = torch.sigmoid(shares.value) + self.floor
        error = 0.25 * shares.bound + _ROUNDOFF * (streams.shape[1] + 16.0) * pre
        value = torch.einsum("tn,tnh->th", pre, streams)
        return Close(value, torch.einsum("tn,tnh->th", error, streams.abs()))


def _shares(rows: int, streams: int, width: int, generator: torch.Generator, *, collapse: bool) -> _Shares:
    outputs = streams if collapse else (2 + streams) * streams
    return _Shares(
        torch.randn(rows, streams, width, generator=generator),
        torch.randn(outputs, streams * width, generator=generator) * (streams * width) ** -0.5,
        torch.randn(outputs, generator=generator),
        torch.rand(1 if collapse else 3, generator=generator) + 0.5,
    )


_SIZES = ((5, 4, 96), (0, 2, 32), (1, 1, 7), (9, 3, 33))


def _mix_case(name: str, shares: _Shares, rounds: int) -> Case:
    tokens, count, width = shares.streams.shape

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        streams, *weights = shares.held(buffers)
        post = buffers.output("post", (tokens, count), _FLOAT32)
        comb = buffers.output("comb", (tokens, count, count), _FLOAT32)
        out = buffers.output("out", (tokens, width), _FLOAT32)
        for start in range(0, max(1, tokens), max(1, step)):
            part = slice(start, start + step)
            fn(streams[part], *weights, shares.eps, shares.floor, rounds, post[part], comb[part], out[part])
        return {"post": post, "comb": comb, "out": out}

    def expect() -> dict[str, Expectation]:
        after = shares.exact(count, count, 1)
        post = 2.0 * torch.sigmoid(after.value)
        mixing = shares.exact(2 * count, count * count, 2)
        matrix = torch.softmax(mixing.value.view(tokens, count, count), dim=2) + shares.floor
        for index in range(2 * rounds - 1):
            matrix = matrix / (matrix.sum(dim=1 + index % 2, keepdim=True) + shares.floor)
        # Normalising takes the logarithms no further apart than they are; each time rounds once more.
        widest = mixing.bound.amax(dim=1) if tokens else mixing.bound.sum(dim=1)
        relative = 8.0 * widest + _ROUNDOFF * (16.0 * rounds * count + 64.0)
        return {
            "post": Close(post, 0.5 * after.bound + 16.0 * _ROUNDOFF * post),
            "comb": Close(matrix, relative.view(-1, 1, 1) * matrix),
            "out": shares.gathered(),
        }

    traits = {"streams": count}
    return Case(name, traits, partial(run, step=tokens), expect, split=partial(run, step=1))


def mix_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Several streams and one, odd widths, no tokens, one round and many."""
    for (rows, streams, width), rounds in zip(_SIZES, (20, 3, 1, 2), strict=True):
        shares = _shares(rows, streams, width, generator, collapse=False)
        yield _mix_case(f"{rows} x {streams} streams of {width}, {rounds} rounds", shares, rounds)


def collapse_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """The same sizes."""
    for rows, streams, width in _SIZES:
        shares = _shares(rows, streams, width, generator, collapse=True)

        def run(fn: KernelFunction, buffers: Buffers, step: int, shares: _Shares = shares) -> Outputs:
            held, *weights = shares.held(buffers)
            tokens, _, size = shares.streams.shape
            out = buffers.output("out", (tokens, size), _FLOAT32)
            for start in range(0, max(1, tokens), max(1, step)):
                part = slice(start, start + step)
                fn(held[part], *weights, shares.eps, shares.floor, out[part])
            return {"out": out}

        def expect(shares: _Shares = shares) -> dict[str, Expectation]:
            return {"out": shares.gathered()}

        name, traits = f"{rows} x {streams} streams of {width}", {"streams": streams}
        yield Case(name, traits, partial(run, step=rows), expect, split=partial(run, step=1))


def _spread_case(name: str, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, streams: torch.Tensor) -> Case:
    tokens, count = post.shape

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        changed = buffers.writable("streams", streams)
        held = buffers.read_only("x", x), buffers.read_only("post", post), buffers.read_only("comb", comb)
        for start in range(0, max(1, tokens), max(1, step)):
            part = slice(start, start + step)
            fn(*(tensor[part] for tensor in held), changed[part])
        return {"streams": changed}

    def expect() -> dict[str, Expectation]:
        parts = post.double(), x.double(), comb.double(), streams.double()
        value, size = (
            torch.einsum("tk,th->tkh", p, y) + torch.einsum("tjk,tjh->tkh", c, s)
            for p, y, c, s in (parts, [part.abs() for part in parts])
        )
        return {"streams": Close(value, _ROUNDOFF * (count + 4.0) * size)}

    traits = {"streams": count}
    return Case(name, traits, partial(run, step=tokens), expect, split=partial(run, step=1))


def spread_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """The same sizes; a matrix that is not symmetric."""
    for rows, streams, width in _SIZES:
        x, post = torch.randn(rows, width, generator=generator), torch.randn(rows, streams, generator=generator)
        comb = torch.randn(rows, streams, streams, generator=generator)
        yield _spread_case(
            f"{rows} x {streams} streams of {width}", x, post, comb,
            torch.randn(rows, streams, width, generator=generator),
        )  # fmt: skip


def begin_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """The same sizes."""
    for rows, streams, width in _SIZES:
        x = torch.randn(rows, width, generator=generator)

        def run(
            fn: KernelFunction, buffers: Buffers, step: int, x: torch.Tensor = x, streams: int = streams
        ) -> Outputs:
            out, held = (
                buffers.output("streams", (x.shape[0], streams, x.shape[1]), _FLOAT32),
                buffers.read_only("x", x),
            )
            for start in range(0, max(1, x.shape[0]), max(1, step)):
                fn(held[start : start + step], out[start : start + step])
            return {"streams": out}

        def expect(x: torch.Tensor = x, streams: int = streams) -> dict[str, Expectation]:
            return {"streams": Exact(torch.stack([x] * streams, dim=1))}

        name, traits = f"{rows} x {streams} streams of {width}", {"streams": streams}
        yield Case(name, traits, partial(run, step=rows), expect, split=partial(run, step=1))


register_cases("hyper.begin", begin_cases)
register_cases("hyper.mix", mix_cases)
register_cases("hyper.spread", spread_cases)
register_cases("hyper.collapse", collapse_cases)
