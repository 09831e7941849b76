"""gemm.linear per weight format, beside the machine's read bandwidth and torch's product in the same run.

    python bench/linear.py [--columns 4096] [--threads 2] [--formats bfloat16,gguf_q4_k] [--activations int8]

For each format: the share of the read bandwidth that one token reaches, how many times longer 8 and 32 tokens take than
one, and the arithmetic of a prefill of 256. Several weights are walked in turn, so that they come from memory and not
from the cache. Ours, torch and the plain read take turns in every round, and each figure is that of the shortest call:
other work on the machine can only make one longer. The read is a plain sum with the kernels' threads, over memory on
huge pages like everything here: a file's weights are mapped so where the file system grants it, packed ones always.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # before torch is imported: it allocates on huge pages then

import torch

import tokenspeed_kernel_cpu
from tokenspeed_kernel.gguf_blocks import BLOCK_BYTES
from tokenspeed_kernel.numerics.weights import random_weight
from tokenspeed_kernel.ops import bind_linear
from tokenspeed_kernel.plugins import load_plugins
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel_cpu import _native

DENSE = ("float32", "bfloat16", "float16")
WEIGHTS = 4 * 1024 * 1024  # elements of one weight
SET_BYTES = 160 * 1024 * 1024  # of all weights together: several times the last cache
BATCHES = (1, 8, 32)
PREFILL_TOKENS, PREFILL_ROWS = 256, 1024  # rows as of a layer: rounding the inputs costs ours as much as 25 of them
ROUNDS = 6

Action = Callable[[], object]


def shortest(groups: dict[str, Sequence[Action]], rounds: int) -> dict[str, float]:
    """Seconds of the shortest single action of each group; the groups take turns."""
    best = dict.fromkeys(groups, float("inf"))
    for _ in range(rounds):
        for name, actions in groups.items():
            for action in actions:
                begin = time.perf_counter()
                action()
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def copies_of(weight: QuantizedTensor) -> list[QuantizedTensor]:
    """The weight and as many copies as the set holds."""
    count = max(2, SET_BYTES // weight.nbytes)
    planes = [{name: plane.clone() for name, plane in weight.planes.items()} for _ in range(count)]
    return [QuantizedTensor(weight.format, weight.shape, plane, "bench") for plane in planes]


def reads_of_memory() -> list[Action]:
    """Plain reads of WEIGHTS * 4 bytes each, all over memory that no cache holds."""
    pieces = torch.ones(SET_BYTES // (WEIGHTS * 4), WEIGHTS)
    return [partial(_read, piece) for piece in pieces]


def _read(piece: torch.Tensor) -> int:
    return _native.read_all(piece.data_ptr(), piece.nbytes)


def read_bandwidth() -> float:
    """Bytes a second of plain reads."""
    tokenspeed_kernel_cpu.set_num_threads(torch.get_num_threads())
    reads = reads_of_memory()
    return WEIGHTS * 4 / shortest({"read": reads}, ROUNDS)["read"]


def measure(name: str, activations: str, columns: int, reads: Sequence[Action]) -> str | None:
    """One line of the table; None where no kernel takes such activations with these weights."""
    weight = random_weight(name, WEIGHTS // columns, columns, torch.Generator().manual_seed(0)).weight
    if activations != "float32" and "activations" not in bind_linear(weight, None, activations=activations).spec.traits:
        return None
    weights = copies_of(weight)
    kernels = [bind_linear(copy, None, activations=activations).fn for copy in weights]
    dtype = getattr(torch, name) if name in DENSE else torch.float32
    dense = [copy.dequantize(dtype) for copy in weights[: max(2, SET_BYTES // (WEIGHTS * dtype.itemsize))]]
    groups: dict[str, Sequence[Action]] = {"read": reads}
    for tokens in BATCHES:
        x, out = torch.randn(tokens, columns), torch.empty(tokens, weight.shape[0])
        groups[f"ours {tokens}"] = [partial(kernel, x, out) for kernel in kernels]
        groups[f"torch {tokens}"] = [partial(torch.mm, x.to(dtype), matrix.T) for matrix in dense]
    few = weight.rows(0, min(PREFILL_ROWS, weight.shape[0]))
    x, out = torch.randn(PREFILL_TOKENS, columns), torch.empty(PREFILL_TOKENS, few.shape[0])
    groups["ours prefill"] = [partial(bind_linear(few, None, activations=activations).fn, x, out)] * 8
    groups["torch prefill"] = [partial(torch.mm, x.to(dtype), few.dequantize(dtype).T)] * 8
    best = shortest(groups, ROUNDS)
    bandwidth = WEIGHTS * 4 / best["read"]
    operations = 2e-9 * PREFILL_TOKENS * few.shape[0] * columns
    line = f"{name:10} {activations:9}"
    for who, size in (("ours", weight.nbytes), ("torch", WEIGHTS * dtype.itemsize)):
        rate = size / best[f"{who} 1"]
        ratios = [best[f"{who} {tokens}"] / best[f"{who} 1"] for tokens in BATCHES[1:]]
        line += f" |{rate / 1e9:6.1f} {rate / bandwidth:5.0%} {ratios[0]:6.2f} {ratios[1]:6.2f}"
        line += f" {operations / best[f'{who} prefill']:6.0f}"
    return f"{line} |{bandwidth / 1e9:6.1f}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--formats", type=lambda text: text.split(","), default=[*DENSE, *BLOCK_BYTES])
    parser.add_argument(
        "--activations", type=lambda text: text.split(","), default=["float32", "bfloat16", "int8", "int16"]
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    reads = reads_of_memory()
    rows = WEIGHTS // arguments.columns
    load_plugins()  # puts the platform's instruction set in force
    instruction_set = tokenspeed_kernel_cpu.instruction_set()
    print(f"weights of {rows} x {arguments.columns}, {instruction_set}, {arguments.threads} threads")
    print(
        "of ours, then of torch (GGUF blocks dequantised to float32): GB/s and share of the read bandwidth at 1 token,"
    )
    print("time of 8 and of 32 tokens over that of 1, GFLOP/s at 256 tokens; last the read bandwidth\n")
    head = "|  GB/s share   8/1   32/1 GFLOP"
    print(f"weight     activated {head} {head} |  read")
    with torch.inference_mode():
        for name in arguments.formats:
            for activations in arguments.activations:
                line = measure(name, activations, arguments.columns, reads)
                if line is not None:
                    print(line, flush=True)


if __name__ == "__main__":
    main()
