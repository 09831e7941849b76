"""Cases of the sampling operations. The oracle is plain Python over lists, one row at a time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tokenspeed_kernel.numerics.cases import (
    UNIT_ROUNDOFF,
    AnyOf,
    Buffers,
    Case,
    Close,
    Exact,
    Expectation,
    Outputs,
    register_cases,
)
from tokenspeed_kernel.ops.sampling import uniform
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import FormatSignature

_ROUNDOFF = UNIT_ROUNDOFF[torch.float32]
_EDGE = 1e-9  # a draw this close to a candidate's edge may fall on either side: exponentials differ in their last bit


@dataclass(frozen=True)
class Draw:
    """The parameters of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    position: int = 0


def acceptable_draws(logits: list[float], draw: Draw) -> list[int]:
    """The ids that ``draw`` may give for one row, by the words of ops/sampling.py: one, or a few at an edge."""
    return sorted({_drawn(kept_weights(logits, draw, shift), draw, shift) for shift in (-_EDGE, 0.0, _EDGE)})


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def kept_weights(logits: list[float], draw: Draw, shift: float) -> dict[int, float]:
    """The candidates that are kept, in order, and their weights, with every comparison shifted by a share of what it
    compares with."""
    if draw.top_k == 1:
        return {logits.index(max(logits)): 1.0}
    divided = (torch.tensor(logits) / torch.tensor(draw.temperature, dtype=torch.float32)).tolist()
    order = sorted(range(len(divided)), key=lambda token: (-divided[token], token))
    order = order[: draw.top_k] if draw.top_k else order
    weights = [math.exp(divided[token] - divided[order[0]]) for token in order]
    total, kept = math.fsum(weights), len(weights)
    if draw.top_p < 1.0:
        running, kept = 0.0, 0
        while kept < len(weights) and (kept == 0 or running < _float32(draw.top_p) * total * (1.0 + shift)):
            running += weights[kept]
            kept += 1
    if draw.min_p > 0.0:
        kept = max(1, sum(weight >= _float32(draw.min_p) * (1.0 + shift) for weight in weights[:kept]))
    return dict(zip(order[:kept], weights, strict=False))


def _drawn(kept: dict[int, float], draw: Draw, shift: float) -> int:
    """The drawn candidate of those that are kept."""
    target = uniform(draw.seed, draw.choice, draw.position) * math.fsum(kept.values()) * (1.0 + shift)
    running = 0.0
    for token, weight in kept.items():
        running += weight
        if running >= target:
            return token
    return list(kept)[-1]


def _sample_case(name: str, logits: torch.Tensor, draws: list[Draw]) -> Case:
    rows = logits.shape[0]

    def column(field: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(draw, field) for draw in draws], dtype=dtype)

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        out, held = buffers.output("out", (rows,), torch.int32), buffers.writable("logits", logits)
        columns = [
            buffers.read_only(field, column(field, dtype))
            for field, dtype in (
                ("temperature", torch.float32),
                ("top_k", torch.int32),
                ("top_p", torch.float32),
                ("min_p", torch.float32),
                ("seed", torch.int64),
                ("choice", torch.int32),
                ("position", torch.int32),
            )
        ]
        for start in range(0, max(1, rows), max(1, step)):
            part = slice(start, start + step)
            fn(held[part], *(values[part] for values in columns), out[part])
        return {"out": out}

    def expect() -> dict[str, Expectation]:
        accepted = [acceptable_draws(row, draw) for row, draw in zip(logits.tolist(), draws, strict=True)]
        widest = max((len(ids) for ids in accepted), default=1)
        padded = [ids + ids[-1:] * (widest - len(ids)) for ids in accepted]
        return {"out": AnyOf(torch.tensor(padded, dtype=torch.int32).reshape(rows, widest))}

    return Case(name, {}, lambda fn, b: run(fn, b, rows), expect, split=lambda fn, b: run(fn, b, 1))


def sample_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Greedy, every parameter alone and together, ties, masked tokens, extreme seeds, no rows, one token."""
    yield _sample_case("no rows", torch.empty(0, 11), [])
    yield _sample_case("one token", torch.zeros(1, 1), [Draw(seed=3)])
    for vocabulary in (17, 1000, 5003):
        logits = torch.randn(8, vocabulary, generator=generator) * 3.0
        draws = [
            Draw(top_k=1),
            Draw(seed=1),
            Draw(temperature=0.3, seed=2, position=7),
            Draw(top_k=5, seed=3, position=9),
            Draw(top_p=0.7, seed=-4, position=2),
            Draw(min_p=0.05, seed=5, choice=2),
            Draw(temperature=1.7, top_k=40, top_p=0.9, min_p=0.02, seed=-(1 << 63), position=100),
            Draw(top_k=vocabulary + 5, seed=(1 << 63) - 1, choice=(1 << 31) - 1, position=(1 << 31) - 1),
        ]
        yield _sample_case(f"vocabulary {vocabulary}", logits, draws)
    rounded = (torch.randn(24, 300, generator=generator) * 2.0).round()
    many = [Draw(top_k=k, top_p=p, seed=s, position=s) for s, (k, p) in enumerate([(0, 1.0), (7, 1.0), (0, 0.6)] * 8)]
    yield _sample_case("ties", rounded, many)
    yield _sample_case("greedy ties", torch.zeros(3, 50), [Draw(top_k=1, seed=s) for s in range(3)])
    masked = torch.full((6, 200), -torch.inf)
    masked[:, 11:200:9] = torch.randn(6, 21, generator=generator)
    some = [Draw(seed=s, top_k=0 if s % 2 else 30, min_p=s / 20) for s in range(6)]
    yield _sample_case("masked tokens", masked, some)
    tiny = torch.randn(4, 100, generator=generator)
    yield _sample_case("next to no mass kept", tiny, [Draw(top_p=1e-6, seed=s, min_p=0.999) for s in range(4)])
    hot = torch.randn(4, 400, generator=generator) * 1e4
    yield _sample_case("logits of tens of thousands", hot, [Draw(temperature=0.01 + s, seed=s) for s in range(4)])


def _penalty_case(name: str, rows: int, vocabulary: int, dtype: torch.dtype, generator: torch.Generator) -> Case:
    pool = rows + 3
    logits = torch.randn(rows, vocabulary, generator=generator) * 4.0
    counts = torch.randint(-6, 4, (pool, vocabulary), generator=generator, dtype=torch.int32).clamp(min=0)
    prompt = torch.randint(0, 2, (pool, vocabulary), generator=generator).to(dtype)
    index = torch.randperm(pool, generator=generator)[:rows].to(torch.int32)
    presence, frequency = torch.randn(2, rows, generator=generator)
    repetition = torch.rand(rows, generator=generator) + 0.5

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        out = buffers.writable("logits", logits)
        held_counts, held_prompt = buffers.read_only("counts", counts), buffers.read_only("prompt_mask", prompt)
        columns = [buffers.read_only(f"column {i}", c) for i, c in enumerate((index, presence, frequency, repetition))]
        for start in range(0, max(1, rows), max(1, step)):
            part = slice(start, start + step)
            fn(out[part], held_counts, held_prompt, *(values[part] for values in columns))
        return {"logits": out}

    def expect() -> dict[str, Expectation]:
        wide, count = logits.double(), counts[index.long()].double()
        seen = (count > 0) | prompt[index.long()].bool()
        factor = repetition.double().unsqueeze(1)
        repeated = torch.where(seen, torch.where(wide > 0, wide / factor, wide * factor), wide)
        frequent = frequency.double().unsqueeze(1) * count
        present = presence.double().unsqueeze(1) * (count > 0)
        size = repeated.abs() + frequent.abs() + present.abs()
        return {"logits": Close(repeated - frequent - present, 4.0 * _ROUNDOFF * size)}

    return Case(name, {}, lambda fn, b: run(fn, b, rows), expect, split=lambda fn, b: run(fn, b, 1))


def penalty_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """bool and uint8 masks, permuted pool rows, odd vocabularies, no rows."""
    for rows, vocabulary in ((0, 9), (1, 1), (3, 101), (6, 2048)):
        for dtype in (torch.bool, torch.uint8):
            yield _penalty_case(f"{rows} x {vocabulary}, {dtype}", rows, vocabulary, dtype, generator)


def _mask_case(name: str, logits: torch.Tensor, allowed: torch.Tensor, rows: list[int]) -> Case:
    """``allowed`` bool [R, V]; bits beyond V are drawn at random."""
    vocabulary, count = logits.shape[1], len(rows)
    words = -(-vocabulary // 32)
    packed = [
        [
            sum(1 << bit for bit in range(32) if 32 * word + bit >= vocabulary or row[32 * word + bit])
            for word in range(words)
        ]
        for row in allowed.tolist()
    ]
    mask = (
        torch.tensor(packed, dtype=torch.int64).reshape(-1, words).to(torch.int32)
    )  # the upper half wraps to negative

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        out, held = buffers.writable("logits", logits), buffers.read_only("mask", mask)
        index = buffers.read_only("rows", torch.tensor(rows, dtype=torch.int32))
        for start in range(0, max(1, count), max(1, step)):
            fn(out[start : start + step], held, index[start : start + step])
        return {"logits": out}

    def expect() -> dict[str, Expectation]:
        expected = logits.clone()
        for place, row in enumerate(rows):
            for token in range(vocabulary if row >= 0 else 0):
                if not allowed[row, token]:
                    expected[place, token] = -math.inf
        return {"logits": Exact(expected)}

    return Case(name, {}, lambda fn, b: run(fn, b, count), expect, split=lambda fn, b: run(fn, b, 1))


def mask_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Words of all, none and some; a vocabulary that ends inside a word; rows left alone, shared and permuted; none."""
    yield _mask_case("no rows", torch.empty(0, 40), torch.ones(1, 40, dtype=torch.bool), [])
    for vocabulary in (1, 31, 32, 33, 1000):
        logits = torch.randn(5, vocabulary, generator=generator)
        allowed = torch.rand(4, vocabulary, generator=generator) < 0.4
        allowed[1], allowed[2] = True, False
        yield _mask_case(f"vocabulary {vocabulary}", logits, allowed, [3, -1, 1, 0, 3])
        yield _mask_case(f"vocabulary {vocabulary}, nothing allowed", logits, allowed, [2, 2, -1, -1, 2])


def _logprob_case(name: str, logits: torch.Tensor, ids: torch.Tensor, k: int) -> Case:
    rows, vocabulary = logits.shape

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        held, index = buffers.read_only("logits", logits), buffers.read_only("ids", ids)
        out = buffers.output("out_logprob", (rows,), torch.float32)
        top_ids = buffers.output("top_ids", (rows, k), torch.int32)
        top = buffers.output("top_logprobs", (rows, k), torch.float32)
        for start in range(0, max(1, rows), max(1, step)):
            part = slice(start, start + step)
            fn(held[part], index[part], k, out[part], top_ids[part], top[part])
        return {"out_logprob": out, "top_ids": top_ids, "top_logprobs": top}

    def expect() -> dict[str, Expectation]:
        wide = logits.double()
        exact = wide - torch.logsumexp(wide, dim=-1, keepdim=True)
        order = [sorted(range(vocabulary), key=lambda token: (-row[token], token))[:k] for row in logits.tolist()]
        best = torch.tensor(order, dtype=torch.int32).reshape(rows, k)
        bound = _ROUNDOFF * (vocabulary**0.5 + 16.0 + 4.0 * wide.abs().amax(dim=-1)) if rows else wide.sum(dim=-1)
        return {
            "out_logprob": Close(exact.gather(1, ids.long().unsqueeze(1)).squeeze(1), bound),
            "top_ids": Exact(best),
            "top_logprobs": Close(exact.gather(1, best.long()), bound.unsqueeze(1)),
        }

    return Case(name, {}, lambda fn, b: run(fn, b, rows), expect, split=lambda fn, b: run(fn, b, 1))


def logprob_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """No top ids, some, all; ties; shifted logits; no rows."""
    for rows, vocabulary, k in ((0, 7, 2), (1, 1, 1), (4, 333, 0), (5, 1001, 20), (2, 40, 40)):
        logits = torch.randn(rows, vocabulary, generator=generator) * 3.0
        ids = torch.randint(0, vocabulary, (rows,), generator=generator, dtype=torch.int32)
        yield _logprob_case(f"{rows} x {vocabulary}, top {k}", logits, ids, k)
    ties = torch.randn(3, 90, generator=generator).round()
    yield _logprob_case("ties", ties, torch.tensor([0, 45, 89], dtype=torch.int32), 30)
    shifted = torch.randn(3, 64, generator=generator) + torch.tensor([[90.0], [-200.0], [0.0]])
    yield _logprob_case("shifted", shifted, torch.tensor([1, 2, 3], dtype=torch.int32), 4)


def _nan_case(name: str, logits: torch.Tensor) -> Case:
    rows = logits.shape[0]

    def run(fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        held, out = buffers.read_only("logits", logits), buffers.output("out", (rows,), torch.bool)
        for start in range(0, max(1, rows), max(1, step)):
            fn(held[start : start + step], out[start : start + step])
        return {"out": out}

    def expect() -> dict[str, Expectation]:
        found = [any(math.isnan(value) for value in row) for row in logits.tolist()]
        return {"out": Exact(torch.tensor(found, dtype=torch.bool))}

    return Case(name, {}, lambda fn, b: run(fn, b, rows), expect, split=lambda fn, b: run(fn, b, 1))


def nan_cases(_signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """A NaN at each end and in the middle, infinities that are none, no rows."""
    yield _nan_case("no rows", torch.empty(0, 5))
    for vocabulary in (1, 37, 1024):
        logits = torch.randn(6, vocabulary, generator=generator)
        logits[1, 0] = logits[2, -1] = logits[3, vocabulary // 2] = torch.nan
        logits[4, 0], logits[5, -1] = torch.inf, -torch.inf
        yield _nan_case(f"vocabulary {vocabulary}", logits)


register_cases("sampling.sample", sample_cases)
register_cases("sampling.apply_penalties", penalty_cases)
register_cases("sampling.apply_token_mask", mask_cases)
register_cases("sampling.logprobs", logprob_cases)
register_cases("sampling.has_nan", nan_cases)
