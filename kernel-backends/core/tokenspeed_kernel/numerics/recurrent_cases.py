"""Cases of recurrent.causal_conv and recurrent.gated_delta."""

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
from tokenspeed_kernel.numerics.state_rows import BLOCKS, ROWS, StateCase, state_case
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import FormatSignature

_ROUNDOFF = UNIT_ROUNDOFF[torch.float32]
_SMALLEST = 1e-35  # below this, float32 exponentials lose their relative precision
_EPS = 1e-6


@dataclass(frozen=True)
class ConvInputs:
    """One call of the convolution; x float32 [T, C]."""

    rows: StateCase
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def run(self, fn: KernelFunction, buffers: Buffers, *, split: bool) -> Outputs:
        tokens, channels = self.x.shape
        arena, state = self.rows.arena(buffers, self.weight.shape[0] - 1)
        out = buffers.output("out", (tokens, channels), torch.float32)
        x = buffers.read_only("x", torch.cat([self.x, torch.full((tokens, 3), torch.nan)], dim=1))[:, :channels]
        weight = buffers.read_only("weight", self.weight)
        bias = None if self.bias is None else buffers.read_only("bias", self.bias)
        self.rows.calls(
            buffers,
            lambda span, starts, sources, targets: fn(
                x[span], weight, bias, state, starts, sources, targets, out[span]
            ),
            split=split,
        )
        return {"out": out, "state": arena[:, 3:].clone()}

    def expect(self) -> dict[str, Expectation]:
        width, channels = self.weight.shape
        value, size = (torch.zeros(self.x.shape, dtype=torch.float64) for _ in range(2))
        blocks = self.rows.blocks.clone()
        for first, stop, source, target in self.rows.rows():
            if first == stop:
                continue
            before = self.rows.blocks[source].view(width - 1, channels) if source else torch.zeros(width - 1, channels)
            inputs = torch.cat([before, self.x[first:stop]])
            terms = inputs.double().unfold(0, width, 1) * self.weight.double().T
            value[first:stop], size[first:stop] = terms.sum(-1), terms.abs().sum(-1)
            if target:
                blocks[target] = inputs[stop - first :].flatten()
        if self.bias is not None:
            value, size = value + self.bias.double(), size + self.bias.double().abs()
        silu = value * torch.sigmoid(value)
        bound = 1.2 * _ROUNDOFF * (width + 4.0) * size + 64.0 * _ROUNDOFF * silu.abs() + _SMALLEST
        return {"out": Close(silu, bound), "state": Exact(blocks)}


def conv_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Every kind of row, with and without bias; odd channels, and a width beyond a row's tokens."""
    for (name, rows), channels, width, biased in (
        *((item, 67, 4, False) for item in ROWS.items()),
        (("rows of all kinds", ROWS["rows of all kinds"]), 1, 2, True),
        (("rows of all kinds", ROWS["rows of all kinds"]), 160, 7, True),
    ):
        case = state_case(rows, BLOCKS, (width - 1) * channels, generator)
        inputs = ConvInputs(
            case,
            torch.randn(case.tokens, channels, generator=generator) * 2.0,
            torch.randn(width, channels, generator=generator),
            torch.randn(channels, generator=generator) if biased else None,
        )
        yield Case(
            f"{name}, {channels} channels, width {width}",
            {"width": width, "biased": biased},
            partial(inputs.run, split=False),
            inputs.expect,
            split=partial(inputs.run, split=True),
        )


@dataclass(frozen=True)
class _Row:
    """A head's state in float64, [Dk, Dv] a head, and a bound of the length of its error, a column each [heads, Dv]."""

    state: torch.Tensor
    error: torch.Tensor


@dataclass(frozen=True)
class DeltaInputs:
    """One call of the rule; decay [T, Hv] or [T, Hv, Dk] and beta [T, Hv] before their functions."""

    rows: StateCase
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    rate: torch.Tensor
    bias: torch.Tensor

    def run(self, fn: KernelFunction, buffers: Buffers, *, split: bool) -> Outputs:
        tokens, heads, value_dim = self.v.shape
        arena, state = self.rows.arena(buffers, heads)
        out = buffers.output("out", (tokens, heads, value_dim), torch.float32)
        q, k, v, decay, beta = self._side_by_side(buffers)
        rate, bias = buffers.read_only("rate", self.rate), buffers.read_only("bias", self.bias)
        self.rows.calls(
            buffers,
            lambda span, starts, sources, targets: fn(
                q[span], k[span], v[span], decay[span], beta[span], rate, bias, _EPS, state, starts, sources, targets,
                out[span],
            ),
            split=split,
        )  # fmt: skip
        return {"out": out, "state": arena[:, 3:].clone()}

    def _side_by_side(self, buffers: Buffers) -> list[torch.Tensor]:
        """The five inputs as views of one buffer, NaN between them, as projections leave them."""
        parts = [self.q, self.k, self.v, self.decay, self.beta]
        gap = torch.full((self.q.shape[0], 1), torch.nan)
        whole = buffers.read_only("q, k, v, decay, beta", torch.cat([x for p in parts for x in (p.flatten(1), gap)], 1))
        views, place = [], 0
        for part in parts:
            width = part.flatten(1).shape[1]
            views.append(whole[:, place : place + width].view(part.shape))
            place += width + 1
        return views

    def expect(self) -> dict[str, Expectation]:
        tokens, heads, value_dim = self.v.shape
        key_dim = self.k.shape[2]
        value = torch.zeros(tokens, heads, value_dim, dtype=torch.float64)
        bound = torch.zeros_like(value)
        blocks, limits = self.rows.blocks.double(), torch.zeros(self.rows.blocks.shape, dtype=torch.float64)
        for first, stop, source, target in self.rows.rows():
            if first == stop:
                continue
            begin = self.rows.blocks[source].double() if source else torch.zeros(heads * key_dim * value_dim).double()
            row = _Row(begin.view(heads, key_dim, value_dim), torch.zeros(heads, value_dim, dtype=torch.float64))
            for token in range(first, stop):
                row, value[token], bound[token] = self._step(row, token)
            if target:
                blocks[target] = row.state.flatten()
                limits[target] = row.error.unsqueeze(1).expand_as(row.state).flatten()
        return {"out": Close(value, bound + _SMALLEST), "state": Close(blocks, limits + _SMALLEST)}

    def _step(self, row: _Row, token: int) -> tuple[_Row, torch.Tensor, torch.Tensor]:
        """The state behind a token, its output [heads, Dv], and how far that may be off.

        With a key no longer than 1, beta between 0 and 1 and decays no larger than 1, what a token does to a state
        makes no error longer: an error's length is that of the one before and what this token adds.
        """
        heads, key_dim = self.v.shape[1], self.k.shape[2]
        repeat = heads // self.k.shape[1]
        q, k = (_unit(x[token].double()).repeat_interleave(repeat, dim=0) for x in (self.q, self.k))
        q = q * key_dim**-0.5
        rate = self.rate.double().view(-1, 1)
        raw = (self.decay[token] + self.bias).double().view(heads, -1)  # the sum is rounded to float32 by everybody
        power = -rate * torch.nn.functional.softplus(raw)
        decay, beta = torch.exp(power).unsqueeze(-1), torch.sigmoid(self.beta[token].double()).unsqueeze(-1)
        v = self.v[token].double()
        state = row.state * decay
        seen = torch.einsum("hk,hkv->hv", k, state)
        update = beta * (v - seen)
        state = state + k.unsqueeze(-1) * update.unsqueeze(1)
        out = torch.einsum("hk,hkv->hv", q, state)

        terms = 8.0 + key_dim**0.5
        length, before = state.norm(dim=1), (row.state * decay).norm(dim=1)
        decayed = ((4.0 + 12.0 * power.abs()).unsqueeze(-1) * decay * row.state).norm(dim=1)
        added = 4.0 * decayed + beta * (3.0 * terms * before + 16.0 * (v.abs() + seen.abs()))
        error = row.error + _ROUNDOFF * (added + terms * update.abs() + 2.0 * length)
        size = torch.einsum("hk,hkv->hv", q.abs(), state.abs())
        bound = key_dim**-0.5 * error + _ROUNDOFF * 3.0 * terms * size
        return _Row(state, error), out, bound


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.square().sum(dim=-1, keepdim=True) + _EPS)


def _delta_inputs(
    case: StateCase, heads: int, v_per_k: int, dims: tuple[int, int], decay: str, generator: torch.Generator
) -> DeltaInputs:
    key_dim, value_dim = dims

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(case.tokens, *shape, generator=generator)

    decayed = (heads, key_dim) if decay == "channel" else (heads,)
    return DeltaInputs(
        rows=case,
        q=random(heads // v_per_k, key_dim),
        k=random(heads // v_per_k, key_dim),
        v=random(heads, value_dim),
        decay=random(*decayed) * 2.0,
        beta=random(heads) * 2.0,
        rate=torch.rand(heads, generator=generator) * 2.0 + 0.05,
        bias=torch.randn(decayed, generator=generator) - 2.0,
    )


def delta_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Every kind of row with both decays; shared key heads, odd and real sizes, decays from none to all, zeros."""
    shapes = (
        *((item, 4, 2, (16, 16)) for item in ROWS.items()),
        (("rows of all kinds", ROWS["rows of all kinds"]), 3, 3, (7, 37)),
        (("rows of all kinds", ROWS["rows of all kinds"]), 1, 1, (1, 1)),
        (("a row that ends where it began", ROWS["a row that ends where it began"]), 2, 1, (128, 128)),
        (("a row that ends where it began", ROWS["a row that ends where it began"]), 2, 2, (33, 80)),
    )
    for decay in ("head", "channel"):
        for (name, rows), heads, v_per_k, dims in shapes:
            case = state_case(rows, BLOCKS, heads * dims[0] * dims[1], generator)
            inputs = _delta_inputs(case, heads, v_per_k, dims, decay, generator)
            yield _delta_case(f"{name}, {heads} heads of {dims[0]} x {dims[1]}", inputs)
        case = state_case([(12, 1, 2)], BLOCKS, 2 * 16 * 16, generator)
        inputs = _delta_inputs(case, 2, 1, (16, 16), decay, generator)
        inputs.decay.copy_(torch.linspace(-120.0, 120.0, inputs.decay.numel()).view_as(inputs.decay))
        inputs.beta.copy_(torch.linspace(-120.0, 120.0, inputs.beta.numel()).view_as(inputs.beta))
        inputs.k[3], inputs.q[4], inputs.v[5] = 0.0, 0.0, 0.0
        yield _delta_case("decays and betas from -120 to 120, zeros", inputs)


def long_delta_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Hundreds of tokens into states of the size that models have."""
    for decay in ("head", "channel"):
        case = state_case([(300, 1, 2), (37, 0, 3)], BLOCKS, 2 * 128 * 128, generator)
        inputs = _delta_inputs(case, 2, 2, (128, 128), decay, generator)
        yield _delta_case("hundreds of tokens, 2 heads of 128 x 128", inputs)


def _delta_case(name: str, inputs: DeltaInputs) -> Case:
    traits = {
        "key_dim": inputs.k.shape[2],
        "value_dim": inputs.v.shape[2],
        "v_per_k": inputs.v.shape[1] // inputs.k.shape[1],
        "decay": "channel" if inputs.decay.dim() == 3 else "head",
    }
    run = partial(inputs.run, split=False)
    return Case(
        f"{name}, a decay a {traits['decay']}", traits, run, inputs.expect, split=partial(inputs.run, split=True)
    )


register_cases("recurrent.causal_conv", conv_cases)
register_cases("recurrent.gated_delta", delta_cases, long_delta_cases)
