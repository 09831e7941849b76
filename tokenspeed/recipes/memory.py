"""What one rank needs of memory, term by term. Counted where the dimensions say it exactly, else estimated and said so.

The terms of a CPU engine are held to what it reports after a start (docs/design/memory-plan.md); those of devices rest
on the dimensions and on figures of the field, until an engine of ours can report its own.
"""

from dataclasses import dataclass
from typing import Literal

from tokenspeed.recipes.capture_ladder import CaptureKeys, capture_ladder
from tokenspeed.recipes.dimensions import Compression, Dimensions, LinearAttention
from tokenspeed.recipes.parameters import count_parameters
from tokenspeed.recipes.schema import Parallel

CPU_SHARE = 4
"""On the CPU the KV cache takes at most one part in so many of the memory that is free."""

LEAST_LOGIT_ROWS = 16
"""The engine holds logits for at least so many rows: prompt log-probabilities are taken slice by slice."""

PROCESSES_BYTES = 420 << 20
"""The two processes before anything of a model is in them: interpreter, libraries, tokenizer."""

LIBRARIES_BYTES = 24 << 20
"""Code and heap that a CPU engine's first steps bring into memory, whatever the model."""

GRAPH_BYTES_PER_LAYER = 200 << 10
"""Of one captured size, a layer."""

COLLECTIVE_BYTES = 512 << 20
"""Buffers of the collective library on a rank that has peers."""

EXCHANGE_BYTES = 1 << 30
"""Heaps for exchanging tokens among experts on different ranks."""

DELTA_CHUNKS = (32, 64)
"""Tokens that kernels of devices take of the gated delta rule at a time, by architecture."""

LATER_TERMS = ("expert workspace", "state workspace", "graphs", "communication")
"""Terms of a device that are not there yet when its model is."""

DEFAULT_CONTEXT_BYTES = 700 << 20
"""What a device's runtime takes before anything of ours, where the hardware file does not say."""

_BESIDE_EXPERTS = {"int4": 2, "mxfp4": 2, "nvfp4": 2, "w4a8": 2, "w4a16": 2, "fp4": 1}
"""Bytes of a weight that is no expert's, in formats whose published checkpoints have experts in fewer."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """One part of the need, in bytes on one rank."""

    name: str
    bytes: int
    certainty: Literal["counted", "estimated"]
    detail: str = ""


def effective_cache_type(requested: str, stored: str) -> str:
    """Resolves "auto": float32 where the checkpoint is float32, float16 where it is GGUF, else bfloat16 (quantised ones
    compute in it). GGUF's weights are coarser than float16, and half the bytes are half the time of attention.

    ``stored`` is the checkpoint's type as ModelConfig.dtype or a recipe's weight format says it.
    """
    if requested != "auto":
        return requested
    stored = stored.lower()
    if stored.startswith("gguf"):
        return "float16"
    return "float32" if stored.startswith("float32") or not stored else "bfloat16"


def cpu_pool_bytes(*, requested: int, wanted: int, free_bytes: int) -> int:
    """Size of the KV cache on the CPU: as asked for, else what all sequences can use (``wanted``), at most a quarter of
    what is free once the weights are in."""
    if requested:
        return requested
    return min(wanted, max(0, free_bytes) // CPU_SHARE)


def weights_term(total: int, model: Dimensions | None, parallel: Parallel, stored: str) -> Term:
    """The weights on one rank, of ``total`` bytes in all."""
    ranks = parallel.tp * parallel.pp * parallel.ep
    if ranks == 1:
        return Term(name="weights", bytes=total, certainty="counted")
    if model is None:
        divisor = parallel.tp * parallel.pp
        return Term(name="weights", bytes=total // divisor, certainty="estimated", detail=f"a share of 1/{divisor}")
    count = count_parameters(model)
    if stored in _BESIDE_EXPERTS and count.experts:
        sharded, replicated = (_BESIDE_EXPERTS[stored] * part for part in (count.sharded, count.replicated))
    else:
        sharded, replicated = (total * part // count.total for part in (count.sharded, count.replicated))
    experts = max(0, total - sharded - replicated)
    expert_ranks = parallel.ep if parallel.ep > 1 else parallel.tp
    mine = (sharded // parallel.tp + replicated + experts // expert_ranks) // parallel.pp
    detail = f"experts / {expert_ranks}, heads and dense layers / {parallel.tp}, the rest whole"
    return Term(name="weights", bytes=mine, certainty="estimated", detail=detail)


def on_one_rank(model: Dimensions, parallel: Parallel) -> Dimensions:
    """The dimensions of what one rank computes with: its heads, and its columns of MLPs and experts. Of experts that
    stay whole that is right for the shared one, which alone has buffers here."""
    tp = parallel.tp
    if tp == 1:
        return model
    changes: dict[str, object] = {
        "heads": model.heads // tp,
        "kv_heads": max(1, model.kv_heads // tp),
        "intermediate": model.intermediate // tp,
    }
    if model.experts is not None:
        changes["experts"] = model.experts.model_copy(update={"intermediate": model.experts.intermediate // tp})
    if model.linear is not None:
        heads = {"key_heads": model.linear.key_heads // tp, "value_heads": model.linear.value_heads // tp}
        changes["linear"] = model.linear.model_copy(update=heads)
    if model.compression is not None:
        groups = model.compression.output_groups // tp
        changes["compression"] = model.compression.model_copy(update={"output_groups": groups})
    return model.model_copy(update=changes)


def cpu_workspace_term(
    model: Dimensions, *, stored: str, chunk: int, max_seqs: int, positions: int, ranks: int = 1
) -> Term:
    """The buffers of a forward on the CPU, float32, the tables of rotary embeddings, and what latent attention keeps
    transposed besides the weights as they are ``stored``. Of one of several ``ranks``: ``model`` is its own part, and
    the ids and logits of all are beside it."""
    tokens, rows = chunk + max_seqs, max(max_seqs, LEAST_LOGIT_ROWS)
    values = tokens * (3 * model.hidden + _attention_values(model) + _feed_forward_values(model))
    if model.streams > 1:
        values += tokens * (model.streams * model.hidden + model.streams + model.streams**2)
    values += rows * (model.hidden + model.vocab) + positions * model.table_columns + model.hidden
    if ranks > 1:
        values += tokens + (ranks + 1) * rows * -(-model.vocab // ranks)
    if model.unturned:
        values += tokens + (model.head_dim if model.latent is None else model.latent.rotary)
    detail = f"{tokens} tokens a step, {rows} rows of logits"
    return Term(name="workspace", bytes=4 * values + _turned_bytes(model, stored), certainty="counted", detail=detail)


def _turned_bytes(model: Dimensions, stored: str) -> int:
    """The up-projection's part for keys, once more for absorbed queries: float32 where it is stored so, else in 16
    bits."""
    if model.latent is None:
        return 0
    layers = model.layers - (model.linear.layers if model.linear else 0)
    width = 4 if effective_cache_type("auto", stored) == "float32" else 2
    return layers * model.heads * model.latent.plain * model.latent.latent * width


def _compressed_values(model: Dimensions, compression: Compression) -> int:
    """As _attention_values: projections, the output of window and entries, and what becomes an entry."""
    width, heads = model.head_dim, model.heads
    values = compression.query_rank + width + heads * (4 * width + 3)
    values += compression.output_groups * compression.output_rank
    if compression.sparse_layers:
        values += 2 * width
    elif compression.heavy_layers:
        values += width
    if model.index is not None:
        values += model.index.heads * (model.index.width + 1) + model.index.chosen
    return values


def _attention_values(model: Dimensions) -> int:
    """Numbers that attention holds for a token: projections, and the heads' output."""
    if model.compression is not None:
        return _compressed_values(model, model.compression)
    latent = model.latent
    if latent is None:
        output = model.heads * model.head_dim
        projected = (2 if model.output_gate else 1) * output + 2 * model.kv_heads * model.head_dim
    else:
        output = model.heads * latent.value
        projected = model.heads * (latent.plain + latent.rotary + 2 * latent.latent)
        projected += latent.query_rank + latent.latent + latent.rotary
    if model.index is not None:
        projected += (model.index.heads + 1) * model.index.width + model.index.heads + model.index.chosen
    return projected + _linear_values(model) + max(output, model.linear.values if model.linear else 0)


def _linear_values(model: Dimensions) -> int:
    """The same of layers with a state, but for the heads' output, which has the memory of attention's."""
    linear = model.linear
    if linear is None:
        return 0
    if linear.channel_decay:
        decays = linear.value_heads * linear.key_dim
        return 2 * linear.channels + linear.key_dim + decays + linear.value_heads + linear.values
    return 2 * linear.channels + linear.values + 2 * linear.value_heads


def _feed_forward_values(model: Dimensions) -> int:
    """The same of MLPs, which share their buffers, and of experts and their router."""
    experts = model.experts
    if experts is None:
        return 3 * model.intermediate
    dense = model.intermediate if model.layers > experts.layers else 0
    inner = max(dense, experts.shared * experts.intermediate)
    shared = (model.hidden if experts.shared else 0) + int(experts.shared_gate)
    return 3 * inner + experts.count + 2 * experts.active + shared


def device_terms(model: Dimensions | None, parallel: Parallel, keys: CaptureKeys) -> list[Term]:
    """What a rank on a device needs beside weights and KV cache, without the runtime's own share."""
    terms = []
    if model is not None:
        chunk, max_seqs = keys.chunk, keys.max_seqs
        terms += [_activation_term(model, parallel, chunk, max_seqs), *_expert_terms(model, parallel, chunk)]
        terms += _state_terms(on_one_rank(model, parallel), chunk + max_seqs, max_seqs)
        terms += _graph_terms(model, parallel, keys)
    if parallel.tp * parallel.dp * parallel.pp > 1:
        heaps = COLLECTIVE_BYTES + (EXCHANGE_BYTES if parallel.ep > 1 else 0)
        terms.append(Term(name="communication", bytes=heaps, certainty="estimated"))
    return terms


def delta_rule_bytes(linear: LinearAttention, tokens: int, rows: int, chunk: int) -> int:
    """What the gated delta rule takes beside its inputs for ``tokens`` of ``rows`` requests in chunks of ``chunk``, in
    float32: for each token the updates of its chunk, what queries see of it, and what comes of the state and of the
    values; and the states between chunks, of every row, or of as many as so many tokens can have."""
    each = linear.value_heads * (2 * chunk + linear.key_dim + linear.value_dim)
    states = min(rows, tokens // (chunk + 1) + 1)
    return 4 * (tokens * each + states * linear.value_heads * linear.key_dim * linear.value_dim)


def _state_terms(model: Dimensions, tokens: int, rows: int) -> list[Term]:
    """Of layers with a state; one of them computes at a time."""
    linear = model.linear
    if linear is None:
        return []
    most = max(delta_rule_bytes(linear, tokens, rows, chunk) for chunk in DELTA_CHUNKS)
    detail = f"{tokens} tokens a step, in chunks of up to {max(DELTA_CHUNKS)}"
    return [Term(name="state workspace", bytes=most, certainty="counted", detail=detail)]


def _graph_terms(model: Dimensions, parallel: Parallel, keys: CaptureKeys) -> list[Term]:
    """Captured decodes and prefills: one graph a size, or a piece a layer, which have as many kernels in all."""
    if keys.graphs == "off":
        return []
    decodes = len(capture_ladder(keys, parallel.dp))
    prefills = sum(1 for tokens in keys.capture_prefill_tokens if tokens <= keys.chunk)
    if not decodes + prefills:
        return []
    detail = f"{decodes} captured sizes" + (f", and {prefills} of prefills" if prefills else "")
    size = (decodes + prefills) * model.layers * GRAPH_BYTES_PER_LAYER
    return [Term(name="graphs", bytes=size, certainty="estimated", detail=detail)]


def _activation_term(model: Dimensions, parallel: Parallel, chunk: int, max_seqs: int) -> Term:
    tokens, rows = chunk + max_seqs, max(max_seqs, LEAST_LOGIT_ROWS)
    if model.latent is None:
        attention = (2 * model.heads + 2 * model.kv_heads) * model.head_dim // parallel.tp
    else:
        # Queries and their absorbed form, the compressed query and cache, and the heads' output.
        latent = model.latent
        each = latent.plain + 2 * latent.rotary + latent.latent + latent.value
        attention = model.heads * each // parallel.tp + latent.query_rank + latent.latent + latent.rotary
    dense = 3 * max(model.intermediate, model.experts.intermediate if model.experts else 0) // parallel.tp
    values = 2 * tokens * (3 * model.hidden + attention + dense)
    logits = 4 * rows * (model.vocab + model.hidden)
    vision = 0
    if model.vision is not None:
        vision = 2 * model.vision.patches * (6 * model.vision.hidden + 2 * model.vision.intermediate)
    detail = f"{tokens} tokens a step, {rows} rows of logits" + (", an image" if vision else "")
    return Term(name="activations", bytes=values + logits + vision, certainty="estimated", detail=detail)


def _expert_terms(model: Dimensions, parallel: Parallel, chunk: int) -> list[Term]:
    experts = model.experts
    if experts is None:
        return []
    # Every token's copy for each of its experts, as if all of them were on this rank: routing promises no balance.
    inner = experts.intermediate if parallel.ep > 1 else experts.intermediate // parallel.tp
    values = 2 * chunk * experts.active * (2 * model.hidden + 3 * inner)
    detail = f"{chunk} tokens to {experts.active} experts each"
    return [Term(name="expert workspace", bytes=values, certainty="estimated", detail=detail)]
