"""Cases of attention.gqa_prologue and attention.mla_prologue."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from tokenspeed_kernel.numerics.cases import Buffers, Case, Close, Exact, Expectation, Outputs, register_cases
from tokenspeed_kernel.numerics.elementwise_cases import exact_rms
from tokenspeed_kernel.numerics.paged import ROUNDOFF, far_arena, kv_dtype
from tokenspeed_kernel.numerics.stored import as_stored, stored, with_extremes
from tokenspeed_kernel.registry import KernelFunction
from tokenspeed_kernel.signature import FormatSignature

_FLOAT32 = torch.float32


@dataclass(frozen=True)
class Heads:
    """kv heads, query heads per KV head, elements of a head."""

    kv: int
    per_kv: int
    dim: int

    @property
    def query(self) -> int:
        return self.kv * self.per_kv


def exact_rotary(x: torch.Tensor, error: torch.Tensor, angles: torch.Tensor) -> Close:
    """x [T, heads, D] (float64, with its error) turned by ``angles`` [T, R]: cosines, then sines. Elements from R on
    keep their value and error."""
    half = angles.shape[1] // 2
    cos, sin = torch.split(angles.double().unsqueeze(1), half, dim=-1)
    low, high, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    value = torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)
    size = torch.cat([(low * cos).abs() + (high * sin).abs(), (high * cos).abs() + (low * sin).abs()], dim=-1)
    crossed = error[..., :half] + error[..., half : 2 * half]
    bound = 4.0 * ROUNDOFF * size + torch.cat([crossed, crossed], dim=-1)
    return Close(value, torch.cat([bound, error[..., 2 * half :]], dim=-1))


def random_slots(tokens: int, granularity: int, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """int64 [tokens] scattered slots, two of more than three tokens padding: one below 0, one inside block 0; and the
    number of blocks they lie in."""
    blocks = tokens + 3
    order = torch.randperm((blocks - 1) * granularity, generator=generator)[:tokens] + granularity
    if tokens > 3:
        order[1], order[tokens - 1] = -1, min(3, granularity - 1)
    return order.to(torch.int64), blocks


def random_table(rotary: int) -> torch.Tensor:
    """cos_sin float32 [4000, rotary]."""
    frequency = 10000.0 ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    angles = torch.outer(torch.arange(4000, dtype=torch.float64), frequency)
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


@dataclass(frozen=True)
class PrologueInputs:
    """One call of the prologue; qkv float32 [T, query + 2 kv heads, D].

    ``far``: the blocks lie more than 2^31 bytes apart, where there is memory for it.
    """

    heads: Heads
    qkv: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None
    slots: torch.Tensor
    arena_shape: tuple[int, int, int, int, int]
    dtype: torch.dtype
    eps: float = 1e-6
    far: bool = False

    def run(self, fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        """Calls the kernel on ``step`` rows at a time."""
        heads = self.heads
        arena = far_arena(self.arena_shape[1:], self.dtype) if self.far else None
        if arena is None:
            arena = buffers.output("arena", self.arena_shape, self.dtype)
        k_cache, v_cache = arena[:, 0], arena[:, 1]
        held = buffers.writable("qkv", self.qkv)
        q, k, v = torch.split(held, [heads.query, heads.kv, heads.kv], dim=1)
        positions, slots = buffers.read_only("positions", self.positions), buffers.read_only("slots", self.slots)
        cos_sin = buffers.read_only("cos_sin", self.cos_sin)
        norms: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if self.norms is not None:
            norms = (buffers.read_only("q_norm", self.norms[0]), buffers.read_only("k_norm", self.norms[1]))
        for start in range(0, max(1, q.shape[0]), max(1, step)):
            part = slice(start, start + step)
            row = (q[part], k[part], v[part], positions[part], cos_sin, *norms, self.eps, k_cache, v_cache, slots[part])
            fn(*row)
        # block 0 takes the padding, in any order: nobody reads it and nothing is expected of it
        return {"q": q.clone(), "k_cache": k_cache[1:].clone(), "v_cache": v_cache[1:].clone()}

    def _rotated(self, x: torch.Tensor, norm: torch.Tensor | None) -> Close:
        wide, error = x.double(), torch.zeros_like(x, dtype=torch.float64)
        if norm is not None:
            normed = exact_rms(x, norm, self.eps)
            wide, error = normed.value, normed.bound
        return exact_rotary(wide, error, self.cos_sin[self.positions.long()])

    def expect(self) -> dict[str, Expectation]:
        q, k, v = torch.split(self.qkv, [self.heads.query, self.heads.kv, self.heads.kv], dim=1)
        q_norm, k_norm = self.norms if self.norms is not None else (None, None)
        rotated = stored(self._rotated(k, k_norm), self.dtype)
        blocks, _, heads, granularity, width = self.arena_shape
        k_value = torch.full((blocks, heads, granularity, width), torch.nan, dtype=torch.float64)
        k_bound, v_value = torch.zeros_like(k_value), k_value.to(self.dtype)
        for token, slot in enumerate(self.slots.tolist()):
            if slot >= granularity:
                place = (slot // granularity, slice(None), slot % granularity)
                k_value[place], k_bound[place] = rotated.value[token], rotated.bound[token]
                v_value[place] = as_stored(v[token], self.dtype)
        return {
            "q": self._rotated(q, q_norm),
            "k_cache": Close(k_value[1:], k_bound[1:]),
            "v_cache": Exact(v_value[1:]),
        }


def _random_heads(tokens: int, heads: Heads, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """qkv; where the cache has 8 bits, keys that it cannot hold, and every kind of value it rounds."""
    qkv = torch.randn(tokens, heads.query + 2 * heads.kv, heads.dim, generator=generator)
    if dtype.itemsize == 1:
        qkv[:, heads.query : heads.query + heads.kv] *= 300.0
        qkv[:, heads.query + heads.kv :] = with_extremes(qkv[:, heads.query + heads.kv :], dtype)
    return qkv


def gqa_prologue_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """With and without head norms, several head sizes and ratios, no tokens, padding, scattered slots, large
    positions, heads of which a part is rotated, values beyond what 8 bits hold."""
    for heads, tokens, granularity, rotary in (
        (Heads(3, 3, 64), 5, 64, 64),
        (Heads(1, 1, 32), 0, 16, 32),
        (Heads(2, 4, 128), 9, 32, 128),
        (Heads(1, 7, 64), 1, 1, 64),
        (Heads(2, 2, 80), 33, 16, 80),
        (Heads(4, 1, 16), 6, 8, 16),
        (Heads(2, 3, 64), 7, 16, 32),
        (Heads(1, 4, 96), 5, 8, 24),
    ):
        for qk_norm in (False, True):
            slots, blocks = random_slots(tokens, granularity, generator)
            weights = torch.randn(2, heads.dim, generator=generator)
            inputs = PrologueInputs(
                heads=heads,
                qkv=_random_heads(tokens, heads, kv_dtype(signature), generator),
                positions=torch.randint(0, 4000, (tokens,), generator=generator, dtype=torch.int32),
                cos_sin=random_table(rotary),
                norms=(weights[0], weights[1]) if qk_norm else None,
                slots=slots,
                arena_shape=(blocks, 2, heads.kv, granularity, heads.dim),
                dtype=kv_dtype(signature),
            )
            partial_rotary = rotary < heads.dim
            name = f"{tokens} tokens, {heads}, g {granularity}{', head norms' if qk_norm else ''}"
            yield Case(
                f"{name}, {rotary} rotated" if partial_rotary else name,
                {
                    "head_dim": heads.dim,
                    "q_per_kv": heads.per_kv,
                    "qk_norm": qk_norm,
                    "partial_rotary": partial_rotary,
                },
                partial(inputs.run, step=tokens),
                inputs.expect,
                split=partial(inputs.run, step=1),
            )


def far_prologue_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """Writes to blocks that lie more than 2^31 bytes apart."""
    heads, granularity = Heads(2, 2, 64), 16
    weights = torch.randn(2, heads.dim, generator=generator)
    inputs = PrologueInputs(
        heads=heads,
        qkv=torch.randn(4, heads.query + 2 * heads.kv, heads.dim, generator=generator),
        positions=torch.tensor([0, 3, 3999, 1], dtype=torch.int32),
        cos_sin=random_table(heads.dim),
        norms=(weights[0], weights[1]),
        slots=torch.tensor([47, 16, -1, 31]),
        arena_shape=(3, 2, heads.kv, granularity, heads.dim),
        dtype=kv_dtype(signature),
        far=True,
    )
    traits = {"head_dim": heads.dim, "q_per_kv": heads.per_kv, "qk_norm": True, "partial_rotary": False}
    yield Case("large offsets", traits, partial(inputs.run, step=4), inputs.expect, split=partial(inputs.run, step=1))


@dataclass(frozen=True)
class LatentInputs:
    """One call of the latent prologue; q float32 [T, Hq, P + R], compressed [T, L + R + 3], of which the last 3 are
    another's."""

    q: torch.Tensor
    compressed: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    norm: torch.Tensor
    slots: torch.Tensor
    cache_shape: tuple[int, int, int, int]
    dtype: torch.dtype
    eps: float = 1e-6

    def run(self, fn: KernelFunction, buffers: Buffers, step: int) -> Outputs:
        """Calls the kernel on ``step`` rows at a time."""
        cache = buffers.output("latent_cache", self.cache_shape, self.dtype)
        q, held = buffers.writable("q", self.q), buffers.writable("compressed", self.compressed)
        compressed = held[:, : self.cache_shape[3]]
        positions, slots = buffers.read_only("positions", self.positions), buffers.read_only("slots", self.slots)
        cos_sin, norm = buffers.read_only("cos_sin", self.cos_sin), buffers.read_only("latent_norm", self.norm)
        for start in range(0, max(1, q.shape[0]), max(1, step)):
            part = slice(start, start + step)
            fn(q[part], compressed[part], positions[part], cos_sin, norm, self.eps, cache, slots[part])
        return {"q": q, "latent_cache": cache[1:].clone(), "beyond": held[:, self.cache_shape[3] :].clone()}

    def expect(self) -> dict[str, Expectation]:
        latent, rotary = self.norm.shape[0], self.cos_sin.shape[1]
        angles = self.cos_sin[self.positions.long()]
        plain, turned = torch.split(self.q.double(), [self.q.shape[2] - rotary, rotary], dim=2)
        rotated = exact_rotary(turned, torch.zeros_like(turned), angles)
        normed = exact_rms(self.compressed[:, :latent], self.norm, self.eps)
        raw = self.compressed[:, None, latent : latent + rotary].double()
        key = exact_rotary(raw, torch.zeros_like(raw), angles)
        entry = stored(
            Close(torch.cat([normed.value, key.value[:, 0]], 1), torch.cat([normed.bound, key.bound[:, 0]], 1)),
            self.dtype,
        )
        value = torch.full(self.cache_shape, torch.nan, dtype=torch.float64)
        limit, granularity = torch.zeros_like(value), self.cache_shape[2]
        for token, slot in enumerate(self.slots.tolist()):
            if slot >= granularity:
                place = (slot // granularity, 0, slot % granularity)
                value[place], limit[place] = entry.value[token], entry.bound[token]
        return {
            "q": Close(
                torch.cat([plain, rotated.value], dim=2), torch.cat([torch.zeros_like(plain), rotated.bound], dim=2)
            ),
            "latent_cache": Close(value[1:], limit[1:]),
            "beyond": Exact(self.compressed[:, latent + rotary :]),
        }


def mla_prologue_cases(signature: FormatSignature, generator: torch.Generator) -> Iterator[Case]:
    """The sizes of DeepSeek and odd ones, no tokens, padding, scattered slots, strided rows."""
    for heads, plain, latent, rotary, tokens, granularity in (
        (2, 128, 512, 64, 5, 64),
        (3, 5, 31, 6, 9, 16),
        (1, 16, 64, 2, 1, 1),
        (4, 32, 96, 32, 0, 32),
    ):
        slots, blocks = random_slots(tokens, granularity, generator)
        inputs = LatentInputs(
            q=torch.randn(tokens, heads, plain + rotary, generator=generator),
            compressed=torch.randn(tokens, latent + rotary + 3, generator=generator),
            positions=torch.randint(0, 4000, (tokens,), generator=generator, dtype=torch.int32),
            cos_sin=random_table(rotary),
            norm=torch.randn(latent, generator=generator),
            slots=slots,
            cache_shape=(blocks, 1, granularity, latent + rotary),
            dtype=kv_dtype(signature),
        )
        yield Case(
            f"{tokens} tokens, {heads} heads of {plain} + {rotary}, latent {latent}, g {granularity}",
            {"latent_dim": latent, "rotary_dim": rotary, "plain_dim": plain},
            partial(inputs.run, step=tokens),
            inputs.expect,
            split=partial(inputs.run, step=1),
        )


register_cases("attention.gqa_prologue", gqa_prologue_cases, far_prologue_cases)
register_cases("attention.mla_prologue", mla_prologue_cases)
