"""Decode attention over caches of 16 and of 8 bits, side by side in one run.

    python bench/cache_types.py [--contexts 4096] [--batches 1,8] [--activations float32,bfloat16] [--threads 2]

Milliseconds of the shortest call over each cache, and the second's share of the first's; both read as many keys and
values, which come from memory and not from the processor's cache (see attention.py).
"""

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import product

import torch
from attention import GROUPED, LATENT, LATENT_HEADS, PAGE, ROTARY, sequences
from linear import Action, shortest

import tokenspeed_kernel_cpu
from tokenspeed_kernel.ops import bind_attention_decode
from tokenspeed_kernel.ops.mla import bind_mla_read

CACHES = {"16 bits": torch.bfloat16, "8 bits": torch.float8_e4m3fn}
ROUNDS = 9
MOST_CALLS = 16  # of a round


def grouped(
    heads: tuple[int, int, int], batch: int, context: int, activations: str, dtype: torch.dtype
) -> list[Action]:
    """The calls of a round: grouped-query attention, one token a sequence."""
    q_heads, kv_heads, dim = heads
    held = sequences(2, kv_heads, dim, batch, context, dtype)
    fn = bind_attention_decode(
        head_dim=dim, q_per_kv=q_heads // kv_heads, kernel_page_size=PAGE, kv_dtype=dtype, activations=activations
    ).fn
    q, out = torch.randn(batch, q_heads, dim), torch.empty(batch, q_heads, dim)
    keys, values = held.arena[:, 0], held.arena[:, 1]
    return [partial(fn, q, keys, values, table, held.lengths, dim**-0.5, 0, out) for table in held.tables[:MOST_CALLS]]


def latent(heads: int, batch: int, context: int, activations: str, dtype: torch.dtype) -> list[Action]:
    """The calls of a round: latent attention, one token a sequence."""
    held = sequences(1, 1, LATENT + ROTARY, batch, context, dtype)
    sizes = {"latent_dim": LATENT, "rotary_dim": ROTARY, "kernel_page_size": PAGE}
    fn = bind_mla_read("mla_decode", **sizes, kv_dtype=dtype, activations=activations).fn
    q, out = torch.randn(batch, heads, LATENT + ROTARY), torch.empty(batch, heads, LATENT)
    parts, cache = (q[..., :LATENT], q[..., LATENT:]), held.arena[:, 0]
    return [partial(fn, *parts, cache, table, held.lengths, 0.05, out, None) for table in held.tables[:MOST_CALLS]]


def line(name: str, calls: dict[str, Sequence[Action]]) -> str:
    """One line of the table."""
    best = shortest(calls, ROUNDS)
    times = "".join(f" |{best[cache] * 1e3:9.3f}" for cache in CACHES)
    return f"{name:44}{times} |{best['8 bits'] / best['16 bits']:7.2f}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=lambda text: [int(part) for part in text.split(",")], default=[4096])
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8])
    parser.add_argument("--activations", type=lambda text: text.split(","), default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenspeed_kernel_cpu.set_num_threads(arguments.threads)
    print(f"{tokenspeed_kernel_cpu.instruction_set()}, {arguments.threads} threads, pages of {PAGE}; ms")
    print(f"{'':44} |  16 bits |   8 bits |  share")
    cases = list(product(arguments.activations, arguments.batches, arguments.contexts))
    for activations, batch, context in cases:
        for heads in GROUPED:
            each = {name: grouped(heads, batch, context, activations, dtype) for name, dtype in CACHES.items()}
            label = f"decode {heads[0]}/{heads[1]} x {heads[2]}, {batch} x {context} {activations}"
            print(line(label, each), flush=True)
        for count in LATENT_HEADS[:2]:
            each = {name: latent(count, batch, context, activations, dtype) for name, dtype in CACHES.items()}
            print(line(f"latent decode {count}, {batch} x {context} {activations}", each), flush=True)


if __name__ == "__main__":
    main()
