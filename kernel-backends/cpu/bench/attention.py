"""Paged attention beside the machine's read bandwidth and torch's attention in the same run.

    python bench/attention.py [--kinds gqa,mla,extend,prefill] [--contexts 512,4096,16384] [--batches 1,8] [--threads 2]
                              [--activations float32,bfloat16] [--prompts 512+0,2048+0,8192+0,128+2048,256+2048]

Decode: the bytes of the cache that a call reads over its time, as GB/s and as share of the read bandwidth (torch's sum
of memory, which needs two threads or more to be bound by memory), and the arithmetic, which is what limits latent
attention: its many heads share one row of the cache. Extend: the arithmetic of a chunk of 256 behind a prefix. Prefill:
latent attention of a chunk + its prefix in both forms, from projected queries to values, beside torch, which expands
keys and values by a product and attends to them (values as wide as keys, or its fast kernel would not take them).

Torch computes scaled_dot_product_attention in bfloat16 on keys and values that were gathered beforehand and lie dense,
the query heads of a group taken as rows, so that it too reads the keys once. The calls of a round walk different
sequences, so that these come from memory and not from the cache. Ours, torch and the plain read take turns in every
round, and each figure is that of the shortest call: other work on the machine can only make one longer.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from linear import Action, shortest
from torch.nn.functional import linear, pad, scaled_dot_product_attention

import tokenspeed_kernel_cpu
from tokenspeed_kernel.ops import (
    bind_attention_decode,
    bind_attention_extend,
    bind_head_linear,
    bind_mla_extend_expanded,
)
from tokenspeed_kernel.ops.mla import bind_mla_read
from tokenspeed_kernel.quantized import QuantizedTensor

PAGE = 64
KV_DTYPE = torch.bfloat16
SET_BYTES = 160 * 1024 * 1024  # of all sequences that a round walks: several times the last cache
READ_BYTES = 16 * 1024 * 1024
CHUNK = 256
ROUNDS = 5
GROUPED = ((32, 8, 128), (16, 8, 64))  # query heads, KV heads, elements of a head
LATENT, ROTARY = 512, 64
LATENT_HEADS = (16, 64, 128)
PREFILL_HEADS, PLAIN, VALUE = 16, 128, 128
LONG_PROMPT = 4096  # from here on a call takes seconds: two rounds


@dataclass(frozen=True)
class Sequences:
    """Sequences of one length in a paged cache: fields [blocks, fields, heads, PAGE, width], blocks in random order."""

    arena: torch.Tensor
    tables: list[torch.Tensor]
    lengths: torch.Tensor

    def dense(self, call: int, field: int) -> torch.Tensor:
        """What a call reads of a field, gathered: [batch, heads, context, width]."""
        pages = self.arena[self.tables[call].long(), field]
        return pages.transpose(1, 2).flatten(2, 3)[:, :, : int(self.lengths[0])].contiguous()


def sequences(
    fields: int, heads: int, width: int, batch: int, context: int, dtype: torch.dtype = KV_DTYPE
) -> Sequences:
    """As many batches as the set holds, one at least."""
    pages = batch * -(-context // PAGE)
    calls = max(1, SET_BYTES // (pages * fields * heads * PAGE * width * dtype.itemsize))
    blocks = (torch.randperm(calls * pages) + 1).to(torch.int32).reshape(calls, batch, -1)
    few = torch.randn(8, fields, heads, PAGE, width).to(dtype)
    arena = few[torch.arange(calls * pages + 1) % 8]
    return Sequences(arena, list(blocks), torch.full((batch,), context, dtype=torch.int32))


def line(name: str, best: dict[str, float], size: int, operations: float) -> str:
    """One line of the table: ours, torch, the read."""
    bandwidth = READ_BYTES / best["read"]
    text = f"{name:42}"
    for who in ("ours", "torch"):
        rate = size / best[who]
        text += (
            f" |{best[who] * 1e3:8.2f} {rate / 1e9:6.1f} {rate / bandwidth:5.0%} {operations * 1e-9 / best[who]:6.0f}"
        )
    return f"{text} |{bandwidth / 1e9:6.1f}"


def grouped_decode(
    heads: tuple[int, int, int], batch: int, context: int, activations: str, reads: Sequence[Action]
) -> str:
    """Grouped-query attention, one token a sequence."""
    q_heads, kv_heads, dim = heads
    held = sequences(2, kv_heads, dim, batch, context)
    bound = bind_attention_decode(
        head_dim=dim, q_per_kv=q_heads // kv_heads, kernel_page_size=PAGE, kv_dtype=KV_DTYPE, activations=activations
    )
    q, out = torch.randn(batch, q_heads, dim), torch.empty(batch, q_heads, dim)
    keys, values = held.arena[:, 0], held.arena[:, 1]
    ours = [partial(bound.fn, q, keys, values, table, held.lengths, dim**-0.5, 0, out) for table in held.tables]
    rows = q.to(KV_DTYPE).reshape(batch, kv_heads, -1, dim)
    theirs = [
        partial(scaled_dot_product_attention, rows, held.dense(call, 0), held.dense(call, 1))
        for call in range(min(len(held.tables), 8))
    ]
    best = shortest({"read": reads, "ours": ours, "torch": theirs}, ROUNDS)
    size = 2 * batch * context * kv_heads * dim * KV_DTYPE.itemsize
    name = f"decode {q_heads}/{kv_heads} x {dim}, {batch} x {context} {activations}"
    return line(name, best, size, 4.0 * batch * context * q_heads * dim)


def latent_decode(heads: int, batch: int, context: int, activations: str, reads: Sequence[Action]) -> str:
    """Latent attention, one token a sequence."""
    width = LATENT + ROTARY
    held = sequences(1, 1, width, batch, context)
    bound = bind_mla_read(
        "mla_decode",
        latent_dim=LATENT,
        rotary_dim=ROTARY,
        kernel_page_size=PAGE,
        kv_dtype=KV_DTYPE,
        activations=activations,
    )
    q, out = torch.randn(batch, heads, width), torch.empty(batch, heads, LATENT)
    cache, scale = held.arena[:, 0], width**-0.5
    ours = [
        partial(bound.fn, q[..., :LATENT], q[..., LATENT:], cache, table, held.lengths, scale, out, None)
        for table in held.tables
    ]
    rows = q.to(KV_DTYPE).unsqueeze(1)
    theirs: list[Action] = []
    for call in range(min(len(held.tables), 8)):
        dense = held.dense(call, 0)
        theirs.append(partial(scaled_dot_product_attention, rows, dense, dense[..., :LATENT], scale=scale))
    best = shortest({"read": reads, "ours": ours, "torch": theirs}, ROUNDS)
    size = batch * context * width * KV_DTYPE.itemsize
    return line(
        f"latent decode {heads}, {batch} x {context} {activations}",
        best,
        size,
        2.0 * batch * context * heads * (width + LATENT),
    )


def grouped_extend(heads: tuple[int, int, int], prefix: int, activations: str, reads: Sequence[Action]) -> str:
    """Grouped-query attention, a chunk behind a prefix."""
    q_heads, kv_heads, dim = heads
    context = prefix + CHUNK
    held = sequences(2, kv_heads, dim, 1, context)
    bound = bind_attention_extend(
        head_dim=dim, q_per_kv=q_heads // kv_heads, kernel_page_size=PAGE, kv_dtype=KV_DTYPE, activations=activations
    )
    q, out = torch.randn(CHUNK, q_heads, dim), torch.empty(CHUNK, q_heads, dim)
    starts, keys, values = torch.tensor([0, CHUNK], dtype=torch.int32), held.arena[:, 0], held.arena[:, 1]
    ours = [
        partial(bound.fn, q, keys, values, table, starts, held.lengths, dim**-0.5, 0, out) for table in held.tables[:8]
    ]
    mask = torch.arange(context) <= prefix + torch.arange(CHUNK).unsqueeze(1)
    chunk = q.to(KV_DTYPE).transpose(0, 1).unsqueeze(0).contiguous()
    repeat = q_heads // kv_heads
    theirs: list[Action] = []
    for call in range(min(len(held.tables), 8)):
        planes = [held.dense(call, field).repeat_interleave(repeat, dim=1) for field in (0, 1)]
        masked = {"is_causal": True} if prefix == 0 else {"attn_mask": mask}
        theirs.append(partial(scaled_dot_product_attention, chunk, *planes, **masked))
    best = shortest({"read": reads, "ours": ours, "torch": theirs}, ROUNDS)
    pairs = CHUNK * prefix + CHUNK * (CHUNK + 1) // 2
    size = 2 * context * kv_heads * dim * KV_DTYPE.itemsize
    return line(
        f"extend {q_heads}/{kv_heads} x {dim}, {CHUNK} + {prefix} {activations}",
        best,
        size,
        4.0 * pairs * q_heads * dim,
    )


def latent_forms(tokens: int, prefix: int, activations: str) -> dict[str, Sequence[Action]]:
    """Expanded, absorbed with its products, torch; short calls several times in a row, for torch's threads still spin
    for a while when the next one begins."""
    heads, context, width = PREFILL_HEADS, prefix + tokens, LATENT + ROTARY
    held = sequences(1, 1, width, 1, context)
    cache, table, scale = held.arena[:, 0], held.tables[0], (PLAIN + ROTARY) ** -0.5
    rows = (torch.randn(heads, PLAIN + VALUE, LATENT) * LATENT**-0.5).to(KV_DTYPE)
    up = QuantizedTensor.from_dense(rows.flatten(0, 1), "up-projection")
    turned = QuantizedTensor.from_dense(rows[:, :PLAIN].transpose(1, 2).flatten(0, 1).contiguous(), "its keys")
    sizes = {"rotary_dim": ROTARY, "kernel_page_size": PAGE, "kv_dtype": KV_DTYPE, "activations": activations}
    expand = bind_mla_extend_expanded(up, heads, plain_dim=PLAIN, **sizes)
    extend = bind_mla_read("mla_extend", latent_dim=LATENT, **sizes)
    to_latent, to_value = bind_head_linear(turned, heads), bind_head_linear(up, heads, skipped=PLAIN)
    q, out = torch.randn(tokens, heads, PLAIN + ROTARY), torch.empty(tokens, heads, VALUE)
    q_latent, attended = torch.empty(2, tokens, heads, LATENT)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    dense, chunk = held.dense(0, 0)[0, 0], q.to(KV_DTYPE).transpose(0, 1).unsqueeze(0).contiguous()
    mask = torch.arange(context) <= prefix + torch.arange(tokens).unsqueeze(1)
    masked = {"is_causal": True} if prefix == 0 else {"attn_mask": mask}

    def absorbed() -> None:
        to_latent.fn(q[..., :PLAIN], q_latent)
        extend.fn(q_latent, q[..., PLAIN:], cache, table, starts, held.lengths, scale, attended)
        to_value.fn(attended, out)

    def theirs() -> None:
        both = linear(dense[:, :LATENT], up.plane).view(context, heads, PLAIN + VALUE)
        keys = torch.cat([both[..., :PLAIN], dense[:, None, LATENT:].expand(-1, heads, -1)], dim=-1)
        planes = [x.transpose(0, 1).unsqueeze(0) for x in (keys, pad(both[..., PLAIN:], (0, PLAIN + ROTARY - VALUE)))]
        scaled_dot_product_attention(chunk, *planes, scale=scale, **masked)

    assert expand is not None, "the reference does where nothing else can run"
    ours = partial(expand.fn, q, cache, table, starts, held.lengths, scale, out)
    calls = 1 if tokens >= LONG_PROMPT else 4
    return {"expanded": [ours] * calls, "absorbed": [absorbed] * calls, "torch": [theirs] * calls}


def latent_prefill(tokens: int, prefix: int, activations: str) -> str:
    """One line of the table of prefills: each form's ms and how many times the expanded one's they are."""
    best = shortest(latent_forms(tokens, prefix, activations), 2 if tokens >= LONG_PROMPT else ROUNDS)
    pairs, context = tokens * prefix + tokens * (tokens + 1) // 2, prefix + tokens
    operations = 2.0 * PREFILL_HEADS * (pairs * (PLAIN + ROTARY + VALUE) + context * LATENT * (PLAIN + VALUE))
    text = f"latent prefill {PREFILL_HEADS}, {tokens} + {prefix} {activations}"
    text = f"{text:42} |{best['expanded'] * 1e3:9.2f} {operations * 1e-9 / best['expanded']:6.0f}"
    for who in ("absorbed", "torch"):
        text += f" |{best[who] * 1e3:9.2f} {best[who] / best['expanded']:5.2f}"
    return text


def lines(
    kinds: Sequence[str], contexts: Sequence[int], batches: Sequence[int], activations: Sequence[str]
) -> Iterator[str]:
    """The lines of the table, one after the other."""
    reads = [torch.ones(READ_BYTES // 4).sum for _ in range(SET_BYTES // READ_BYTES)]
    decodes = list(product(batches, contexts, activations))
    if "gqa" in kinds:
        yield from (grouped_decode(heads, *case, reads) for heads in GROUPED for case in decodes)
    if "mla" in kinds:
        yield from (latent_decode(heads, *case, reads) for heads in LATENT_HEADS for case in decodes)
    if "extend" in kinds:
        extends = product(GROUPED, (0, 4096), activations)
        yield from (grouped_extend(*case, reads) for case in extends)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["gqa", "mla", "extend", "prefill"])
    parser.add_argument(
        "--contexts", type=lambda text: [int(part) for part in text.split(",")], default=[512, 4096, 16384]
    )
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8])
    parser.add_argument("--activations", type=lambda text: text.split(","), default=["float32", "bfloat16"])
    parser.add_argument(
        "--prompts",
        type=lambda text: [tuple(map(int, part.split("+"))) for part in text.split(",")],
        default=[(512, 0), (2048, 0), (8192, 0), (128, 2048), (256, 2048)],
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenspeed_kernel_cpu.set_num_threads(arguments.threads)
    print(f"{tokenspeed_kernel_cpu.instruction_set()}, {arguments.threads} threads, pages of {PAGE}, cache in bfloat16")
    if set(arguments.kinds) - {"prefill"}:
        print("of ours, then of torch: ms, GB/s and share of the read bandwidth, GFLOP/s; last the read bandwidth\n")
        head = "|      ms   GB/s share  GFLOP"
        print(f"{'':42} {head} {head} |  read")
    with torch.inference_mode():
        for text in lines(arguments.kinds, arguments.contexts, arguments.batches, arguments.activations):
            print(text, flush=True)
        if "prefill" in arguments.kinds:
            print("\nlatent prefill: expanded ms and GFLOP/s, absorbed and torch ms and times the expanded one's\n")
            for prompt, activations in product(arguments.prompts, arguments.activations):
                print(latent_prefill(*prompt, activations), flush=True)


if __name__ == "__main__":
    main()
