"""A decode step and a prefill of a llama-shaped model with random weights, from this package's kernels alone.

    python bench/step.py [--batch 1] [--context 256] [--prefill 256] [--threads 2] [--kv-dtype bfloat16]
        [--activations int8]

The shape is SmolLM2-135M's: Q4_1 layers and a tied Q8_0 embedding, about 96 MB a step. Every figure is the best of
several rounds. A step cannot be faster than its bytes over the read bandwidth, which is printed beside it.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import linear  # before torch: it chooses huge pages for it
import torch

from tokenspeed_kernel.binding import Bound
from tokenspeed_kernel.numerics.weights import random_weight
from tokenspeed_kernel.ops import (
    bind_attention_decode,
    bind_attention_extend,
    bind_embedding,
    bind_fused_add_rms_norm,
    bind_gqa_prologue,
    bind_linear,
    bind_rms_norm,
    bind_sample,
    bind_silu_and_mul,
)
from tokenspeed_kernel.quantized import QuantizedTensor

LAYERS, HIDDEN, INTERMEDIATE, Q_HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 30, 576, 1536, 9, 3, 64, 49152
PAGE = 64
ROUNDS = 12


@dataclass
class Layer:
    """The four products of one layer and its part of the cache."""

    qkv: Bound
    output: Bound
    gate_up: Bound
    down: Bound
    keys: torch.Tensor
    values: torch.Tensor


class Model:
    """The kernels in the order a model calls them; nothing else."""

    def __init__(self, pages: int, kv_dtype: torch.dtype, activations: str) -> None:
        self.weight_bytes = 0
        self.activations = activations
        self.generator = torch.Generator().manual_seed(0)
        heads = {"head_dim": HEAD_DIM, "q_per_kv": Q_HEADS // KV_HEADS, "kv_dtype": kv_dtype}
        self.prologue = bind_gqa_prologue(**heads, qk_norm=False).fn
        self.decode = bind_attention_decode(**heads, kernel_page_size=PAGE).fn
        self.extend = bind_attention_extend(**heads, kernel_page_size=PAGE).fn
        self.rms, self.fused = bind_rms_norm().fn, bind_fused_add_rms_norm().fn
        self.silu, self.sample = bind_silu_and_mul().fn, bind_sample().fn
        table = self._weight("gguf_q8_0", VOCABULARY, HIDDEN)
        self.embedding = bind_embedding(table).fn
        self.head = bind_linear(table, None, activations=activations).fn
        self.layers = [self._layer(pages, kv_dtype) for _ in range(LAYERS)]
        self.norm = torch.ones(HIDDEN)
        self.cos_sin = torch.randn(8192, HEAD_DIM)

    def _weight(self, name: str, rows: int, columns: int) -> QuantizedTensor:
        weight = random_weight(name, rows, columns, self.generator).weight
        self.weight_bytes += weight.nbytes
        return weight

    def _linear(self, rows: int, columns: int) -> Bound:
        return bind_linear(self._weight("gguf_q4_1", rows, columns), None, activations=self.activations)

    def _layer(self, pages: int, kv_dtype: torch.dtype) -> Layer:
        cache = (torch.randn(pages + 1, 2, KV_HEADS, PAGE, HEAD_DIM) * 0.1).to(kv_dtype)
        return Layer(
            qkv=self._linear((Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            output=self._linear(HIDDEN, Q_HEADS * HEAD_DIM),
            gate_up=self._linear(2 * INTERMEDIATE, HIDDEN),
            down=self._linear(HIDDEN, INTERMEDIATE),
            keys=cache[:, 0],
            values=cache[:, 1],
        )

    def step(self, tokens: int, attend: Callable[..., None], lengths: torch.Tensor, *tables: torch.Tensor) -> None:
        """One forward over `tokens` tokens; logits and a greedy token for each of the rows of `lengths`."""
        rows = lengths.shape[0]
        ids = torch.zeros(tokens, dtype=torch.int32)
        positions, slots = torch.zeros(tokens, dtype=torch.int32), torch.arange(PAGE, PAGE + tokens)
        residual, x = torch.empty(tokens, HIDDEN), torch.empty(tokens, HIDDEN)
        qkv = torch.empty(tokens, Q_HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = qkv.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
        flat_qkv, attended = qkv.view(tokens, -1), torch.empty(tokens, Q_HEADS, HEAD_DIM)
        flat_attended, gate_up = attended.view(tokens, -1), torch.empty(tokens, 2 * INTERMEDIATE)
        gate, up = gate_up.chunk(2, dim=1)
        hidden = torch.empty(tokens, INTERMEDIATE)
        self.embedding(ids, residual)
        self.rms(residual, self.norm, 1e-5, x)
        for layer in self.layers:
            layer.qkv.fn(x, flat_qkv)
            self.prologue(q, k, v, positions, self.cos_sin, None, None, 1e-5, layer.keys, layer.values, slots)
            attend(q, layer.keys, layer.values, *tables, lengths, HEAD_DIM**-0.5, 0, attended)
            layer.output.fn(flat_attended, x)
            self.fused(x, residual, self.norm, 1e-5, x)
            layer.gate_up.fn(x, gate_up)
            self.silu(gate, up, hidden)
            layer.down.fn(hidden, x)
            self.fused(x, residual, self.norm, 1e-5, x)
        logits = torch.empty(rows, VOCABULARY)
        self.head(x[:rows], logits)
        floats, integers = torch.ones(rows), torch.ones(rows, dtype=torch.int32)
        self.sample(logits, floats, integers, floats, floats, integers.long(), integers, integers, integers)


def best_seconds(action: Callable[[], None]) -> float:
    """The shortest of several runs."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    """Prints one line for the decode step and one for the prefill."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prefill", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument("--activations", default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pages = (arguments.context + PAGE - 1) // PAGE
    room = max(pages * arguments.batch, arguments.prefill // PAGE + 2)
    model = Model(room, getattr(torch, arguments.kv_dtype), arguments.activations)
    table = torch.arange(pages * arguments.batch, dtype=torch.int32).view(arguments.batch, pages) + 1
    lengths = torch.full((arguments.batch,), arguments.context, dtype=torch.int32)
    bandwidth = linear.read_bandwidth()
    with torch.inference_mode():
        decode = best_seconds(lambda: model.step(arguments.batch, model.decode, lengths, table))
        tokens = arguments.prefill
        whole = torch.arange(tokens // PAGE + 1, dtype=torch.int32)[None] + 1
        starts, length = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
        prefill = best_seconds(lambda: model.step(tokens, model.extend, length, whole, starts))
    batch, context = arguments.batch, arguments.context
    print(
        f"{arguments.threads} threads, activations {arguments.activations}, read bandwidth {bandwidth / 1e9:.1f} GB/s"
    )
    print(
        f"reading the weights alone ({model.weight_bytes / 1e6:.0f} MB) would take "
        f"{model.weight_bytes / bandwidth * 1e3:.2f} ms"
    )
    print(f"decode {batch} at context {context}: {decode * 1e3:.2f} ms, {batch / decode:.0f} tokens/s")
    print(f"prefill {tokens}: {prefill * 1e3:.1f} ms, {tokens / prefill:.0f} tokens/s")


if __name__ == "__main__":
    main()
