"""moe.experts per weight format, beside the machine's read bandwidth, torch and the reference in the same run.

    python bench/moe.py [--experts 64] [--top 8] [--hidden 2048] [--intermediate 768] [--formats bfloat16,gguf_q4_0]

For each format and number of tokens: milliseconds of a call, the share of the read bandwidth that the weights of the
experts with tokens come in at (each once), GFLOP/s, and how many times longer torch and the reference take. Torch goes
from expert to expert over bfloat16 weights, which the weights of the format are turned into. Every call has other
experts than the one before, so that weights come from memory and not from the cache. All take turns in every round, and
each figure is that of the shortest call: other work on the machine can only make one longer.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

import tokenspeed_kernel_cpu
from tokenspeed_kernel.numerics.weights import random_weight
from tokenspeed_kernel.ops import bind_experts
from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.quantized import QuantizedTensor

TOKENS = (1, 4, 16, 256)
READ_ELEMENTS, READS = 4 * 1024 * 1024, 10
RANDOM_ROWS = 512
"""Rows of a weight that are random; the others repeat them."""

ROUNDS = 4
ACTIVATION = GatedActivation("silu")

Action = Callable[[], object]


def shortest(groups: dict[str, Sequence[Action]]) -> dict[str, float]:
    """Seconds of the shortest single action of each group; the groups take turns."""
    best = dict.fromkeys(groups, float("inf"))
    for _ in range(ROUNDS):
        for name, actions in groups.items():
            for action in actions:
                begin = time.perf_counter()
                action()
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def weight_of(name: str, rows: int, columns: int) -> QuantizedTensor:
    """A weight [rows, columns] of the format."""
    few = random_weight(name, min(rows, RANDOM_ROWS), columns, torch.Generator().manual_seed(0)).weight
    return few.select_rows(torch.arange(rows) % few.shape[0])


def by_torch(
    gate_up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The same by torch in bfloat16; gate_up [E, 2I, H], down [E, H, I]."""
    out, half = torch.zeros_like(x), x.bfloat16()
    for expert in ids.unique().tolist():
        row, place = torch.nonzero(ids == expert, as_tuple=True)
        gate, up = torch.nn.functional.linear(half[row], gate_up[expert]).chunk(2, dim=-1)
        result = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down[expert]).float()
        out.index_add_(0, row, result * weights[row, place].unsqueeze(1))
    return out


def measure(name: str, sizes: argparse.Namespace, tokens: int, reads: Sequence[Action]) -> str:
    """One line of the table."""
    experts, hidden, inner, top = sizes.experts, sizes.hidden, sizes.intermediate, sizes.top
    gate_up = weight_of(name, experts * 2 * inner, hidden)
    down = weight_of(name, experts * hidden, inner)
    arguments = (gate_up, down, None, None, ACTIVATION)
    ours = bind_experts(*arguments).fn
    reference = bind_experts(*arguments, override="reference").fn
    half = (
        gate_up.dequantize(torch.bfloat16).view(experts, 2 * inner, hidden),
        down.dequantize(torch.bfloat16).view(experts, hidden, inner),
    )
    x, weights, out = torch.randn(tokens, hidden), torch.rand(tokens, top), torch.empty(tokens, hidden)
    generator = torch.Generator().manual_seed(1)
    draws = [
        torch.stack([torch.randperm(experts, generator=generator)[:top] for _ in range(tokens)]).to(torch.int32)
        for _ in range(4 if tokens > 64 else 8)
    ]
    groups: dict[str, Sequence[Action]] = {
        "read": reads,
        "ours": [partial(ours, x, ids, weights, out) for ids in draws],
        "torch": [partial(by_torch, *half, x, ids, weights) for ids in draws],
        "reference": [partial(reference, x, ids, weights, out) for ids in draws[:1]],
    }
    best = shortest(groups)
    bandwidth = READ_ELEMENTS * 4 / best["read"]
    touched = min(len(ids.unique()) for ids in draws)
    rate = touched * (gate_up.nbytes + down.nbytes) / experts / best["ours"]
    operations = 6e-9 * tokens * top * hidden * inner / best["ours"]
    return (
        f"{name:10} {tokens:6} {touched:7} {best['ours'] * 1e3:9.3f} {rate / 1e9:6.1f} {rate / bandwidth:6.0%} "
        f"{operations:7.0f} {best['torch'] / best['ours']:7.2f} {best['reference'] / best['ours']:9.1f} "
        f"{bandwidth / 1e9:7.1f}"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, size in (("experts", 64), ("top", 8), ("hidden", 2048), ("intermediate", 768)):
        parser.add_argument(f"--{option}", type=int, default=size)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--formats", type=lambda text: text.split(","), default=["bfloat16", "gguf_q8_0", "gguf_q4_0"])
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=list(TOKENS))
    sizes = parser.parse_args()
    torch.set_num_threads(sizes.threads)
    reads = [torch.ones(READ_ELEMENTS).sum for _ in range(READS)]
    print(
        f"{sizes.experts} experts of {sizes.hidden} x {sizes.intermediate}, top {sizes.top}, "
        f"{tokenspeed_kernel_cpu.instruction_set()}, {sizes.threads} threads"
    )
    print("torch and reference: times as long as ours\n")
    print("weights    tokens experts        ms   GB/s  share GFLOP/s   torch reference    read")
    with torch.inference_mode():
        for name in sizes.formats:
            for tokens in sizes.tokens:
                print(measure(name, sizes, tokens, reads), flush=True)


if __name__ == "__main__":
    main()
