"""What the machine's memory and arithmetic reach, and what decode attention makes of the first."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from scripts.device_check.results import Figure, PartResult
from scripts.device_check.target import Target
from tokenspeed_kernel import ops
from tokenspeed_kernel.binding import Bound

PAGE = 64
CEILING = "copy ceiling"


@dataclass(frozen=True)
class Shapes:
    """What is measured at one size: bytes of a copy, the side of a product, rows and tokens of attention, runs."""

    copied: int
    side: int
    rows: tuple[int, ...]
    tokens: int
    runs: int


SHAPES = {"full": Shapes(2 << 30, 8192, (1, 16, 64), 8192, 20), "tiny": Shapes(8 << 20, 256, (2,), 256, 3)}


def copy_bytes_per_second(target: Target, count: int, runs: int) -> float:
    """Bytes read and written by a copy within the device's memory."""
    source = torch.zeros(count, dtype=torch.uint8, device=target.device)
    there = torch.empty_like(source)
    return 2 * count / target.seconds_of(lambda: there.copy_(source), runs=runs)


def operations_per_second(target: Target, side: int, runs: int) -> float:
    """Of a product of bfloat16 matrices by PyTorch."""
    one, other = (torch.randn(side, side, device=target.device).bfloat16() for _ in range(2))
    return 2 * side**3 / target.seconds_of(lambda: one @ other, runs=runs)


def _paged(target: Target, rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Page tables in an order of their own, as a cache in use has them; lengths; and how many blocks there are."""
    pages = -(-tokens // PAGE)
    order = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(0)) + 1
    table = order.to(torch.int32).view(rows, pages).to(target.device)
    return table, torch.full((rows,), tokens, dtype=torch.int32, device=target.device), rows * pages + 1


@dataclass(frozen=True)
class _Decode:
    """A decode step of attention: what, its kernel and arguments, the one of them it fills, and the bytes it reads."""

    what: str
    bound: Bound
    arguments: tuple[Any, ...]
    out: torch.Tensor
    read: int

    def __call__(self) -> None:
        self.bound.fn(*self.arguments)


def grouped_decode(target: Target, rows: int, tokens: int) -> _Decode:
    """32 query heads on 8 KV heads of 128 elements, as a llama of 8B has them."""
    kv_heads, per_kv, width = 8, 4, 128
    table, lens, blocks = _paged(target, rows, tokens)
    cache = torch.randn(blocks, 2, kv_heads, PAGE, width, dtype=torch.bfloat16, device=target.device)
    q = torch.randn(rows, kv_heads * per_kv, width, device=target.device)
    out = torch.empty_like(q)
    bound = ops.bind_attention_decode(
        head_dim=width, q_per_kv=per_kv, kernel_page_size=PAGE, kv_dtype=torch.bfloat16, activations="bfloat16"
    )
    arguments = (q, cache[:, 0], cache[:, 1], table, lens, width**-0.5, 0, out)
    what = f"GQA decode, 32 heads on 8 of 128, {rows} rows of {tokens} tokens"
    return _Decode(what, bound, arguments, out, rows * tokens * kv_heads * 2 * width * 2)


def latent_decode(target: Target, rows: int, tokens: int, heads: int) -> _Decode:
    """``heads`` over latents of 512 and rotated keys of 64 elements, as DeepSeek has them."""
    latent, rotary = 512, 64
    table, lens, blocks = _paged(target, rows, tokens)
    cache = torch.randn(blocks, 1, PAGE, latent + rotary, dtype=torch.bfloat16, device=target.device)
    q, q_rope = (torch.randn(rows, heads, width, device=target.device) for width in (latent, rotary))
    out = torch.empty_like(q)
    bound = ops.bind_mla_read(
        "mla_decode",
        latent_dim=latent,
        rotary_dim=rotary,
        kernel_page_size=PAGE,
        kv_dtype=torch.bfloat16,
        activations="bfloat16",
    )
    arguments = (q, q_rope, cache, table, lens, 0.1, out, None)
    what = f"MLA decode, {heads} heads, {rows} rows of {tokens} tokens"
    return _Decode(what, bound, arguments, out, rows * tokens * (latent + rotary) * 2)


def _decodes(target: Target, shapes: Shapes) -> Iterator[_Decode]:
    for rows in shapes.rows:
        yield grouped_decode(target, rows, shapes.tokens)
        for heads in (16, 128):
            yield latent_decode(target, rows, shapes.tokens, heads)


def run(target: Target) -> PartResult:
    """Copy and product ceilings, then decode attention over caches in bfloat16 as a share of the copy's.

    Tiny sizes lie in caches, and their ceilings mean nothing: no share is told, and the parts behind get none.
    """
    shapes, result = SHAPES[target.sizes], PartResult("bandwidth")
    copy = copy_bytes_per_second(target, shapes.copied, shapes.runs)
    products = operations_per_second(target, shapes.side, shapes.runs)
    full = target.sizes == "full"
    if full:
        result.ceilings = {"copy": copy, "products": products}
    result.figures += [
        Figure("copy within the device's memory, read and written", copy / 1e9, "GB/s"),
        Figure(f"product of bfloat16 matrices {shapes.side} x {shapes.side}", products / 1e12, "TFLOP/s"),
    ]
    for decode in _decodes(target, shapes):
        reached = decode.read / target.seconds_of(decode, runs=shapes.runs)
        name = f"{decode.what}, {decode.bound.spec.name}"
        if not bool(torch.isfinite(decode.out).all()):
            result.problems.append(f"{name}: values that are not finite")
        result.figures.append(Figure(name, reached / 1e9, "GB/s", reached / copy if full else None, CEILING))
    return result.settle()
