"""Weight bandwidth of gemm.linear, per format, beside the machine's read bandwidth and torch's product in the same run.

    python bench/linear.py [--rows 4096] [--columns 4096] [--tokens 1,8,64] [--copies 8] [--threads 2]

Several copies of the weight are walked in turn, so that they come from memory and not from the cache. Every figure is
the best of several rounds: other work on the machine can only make one slower.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

import tokenspeed_kernel_cpu
from tokenspeed_kernel.ops import bind_linear
from tokenspeed_kernel.quantized import QuantizedTensor

DENSE = ("float32", "bfloat16", "float16")
BLOCK_BYTES = {"gguf_q8_0": 34, "gguf_q4_1": 20, "gguf_q4_0": 18}
ROUNDS = 15


def best_seconds(actions: Sequence[Callable[[], object]]) -> float:
    """The shortest mean time of one action over a round of all of them."""
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for action in actions:
            action()
        best = min(best, (time.perf_counter() - begin) / len(actions))
    return best


def read_bandwidth() -> float:
    """Bytes a second of a sum over 256 MB with all threads."""
    data = torch.ones(64 * 1024 * 1024)
    return data.numel() * 4 / best_seconds([data.sum])


def random_weight(name: str, rows: int, columns: int) -> QuantizedTensor:
    """A weight whose values are finite and small."""
    if name in DENSE:
        return QuantizedTensor.from_dense((torch.randn(rows, columns) * 0.02).to(getattr(torch, name)), "bench")
    blocks = torch.randint(0, 256, (rows, columns // 32, BLOCK_BYTES[name]), dtype=torch.uint8)
    blocks[..., 0:4] = torch.full((1, 1, 2), 0.01, dtype=torch.float16).view(torch.uint8)
    return QuantizedTensor(name, (rows, columns), {"blocks": blocks.view(rows, -1)}, "bench")


def measure(name: str, arguments: argparse.Namespace, bandwidth: float) -> None:
    """Prints one line for each batch."""
    weights = [random_weight(name, arguments.rows, arguments.columns) for _ in range(arguments.copies)]
    kernels = [bind_linear(weight, None).fn for weight in weights]
    dtype = getattr(torch, name) if name in DENSE else torch.float32
    dense = [weight.dequantize(dtype) for weight in weights[: 2 if name not in DENSE else None]]
    for tokens in arguments.tokens:
        x, out = torch.randn(tokens, arguments.columns), torch.empty(tokens, arguments.rows)
        ours = best_seconds([partial(kernel, x, out) for kernel in kernels])
        theirs = best_seconds([partial(torch.mm, x.to(dtype), matrix.T) for matrix in dense])
        rate = weights[0].nbytes / ours
        gigaflops = 2e-9 * tokens * arguments.rows * arguments.columns / ours
        line = f"{name:10} {tokens:6} {ours * 1e6:10.1f} {rate / 1e9:8.1f} {rate / bandwidth:7.0%} {gigaflops:9.1f}"
        print(f"{line} {theirs * 1e6:10.1f}")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 8, 64])
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--formats", type=lambda text: text.split(","), default=[*DENSE, *BLOCK_BYTES])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    bandwidth = read_bandwidth()
    instruction_set = tokenspeed_kernel_cpu.instruction_set()
    print(f"{arguments.rows} x {arguments.columns}, {instruction_set}, {arguments.threads} threads")
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s\n")
    print("weight     tokens         us     GB/s   share   GFLOP/s   torch us")
    with torch.inference_mode():
        for name in arguments.formats:
            measure(name, arguments, bandwidth)


if __name__ == "__main__":
    main()
