"""Registers sparse and compressed attention: what writes their entries, chooses among them and attends to them."""

from collections.abc import Callable

from tokenspeed_kernel.ops.activation import ACTIVATION_SIGNATURE
from tokenspeed_kernel.ops.kv_cache import ATTENTION_SIGNATURES, KV_FORMATS
from tokenspeed_kernel.ops.mla_expanded import expanded_signature
from tokenspeed_kernel.ops.ragged import RAGGED_SIGNATURE
from tokenspeed_kernel.page_sizes import PAGE_SIZE_TRAIT
from tokenspeed_kernel.signature import BFLOAT16, FLOAT8_E4M3, FLOAT32, WEIGHT_FORMATS, FormatSignature
from tokenspeed_kernel.traits import MultipleOf, Range, TraitBound, one_of
from tokenspeed_kernel_triton import entries, expanded, sparse

_MAX_ENTRY = 1024
"""Elements of an entry, or of a head of the indexer, that a block holds."""

_ROUNDED_OVER = (BFLOAT16, FLOAT8_E4M3)
"""Caches whose readers may round: bfloat16 holds what they hold."""

_PAGES: dict[str, TraitBound] = {PAGE_SIZE_TRAIT: MultipleOf(1)}
_LATENT: dict[str, TraitBound] = {"latent_dim": Range(1, 512), "rotary_dim": Range(0, 64), **_PAGES}


def register_entries(register: Callable[..., None]) -> None:
    """``register``: registration's, for one kernel of an operation."""
    register("attention.write", entries.write, ATTENTION_SIGNATURES, {"entry_dim": Range(1)}, by_row=True)
    compressed = {"entry_dim": Range(2, _MAX_ENTRY), "overlapping": one_of(False, True), **_PAGES}
    register("attention.compress", entries.compress, ATTENTION_SIGNATURES, compressed, by_row=True)
    sunk = {"head_dim": Range(1, _MAX_ENTRY)}
    register("attention.apply_sinks", entries.apply_sinks, frozenset({ACTIVATION_SIGNATURE}), sunk, by_row=True)
    turned = {"index_dim": Range(2, _MAX_ENTRY), "rotary_dim": MultipleOf(2)}
    register("attention.index_prologue", entries.index_prologue, ATTENTION_SIGNATURES, turned, by_row=True)
    chosen = {"index_dim": Range(1, 128), "index_heads": Range(1, 64), **_PAGES}
    register("attention.index_select", sparse.index_select, ATTENTION_SIGNATURES, chosen, by_row=True)
    register("attention.mla_selected", sparse.mla_selected, ATTENTION_SIGNATURES, _LATENT)
    rounding = {**_LATENT, "activations": one_of("bfloat16")}
    rounded = frozenset(FormatSignature.of(input=FLOAT32, kv=kv) for kv in _ROUNDED_OVER)
    register("attention.mla_selected", sparse.rounded_mla_selected, rounded, rounding, solution="triton_bf16")
    _register_expanded(register)


def _register_expanded(register: Callable[..., None]) -> None:
    """Attention over keys and values of each head."""
    heads: dict[str, TraitBound] = {
        "head_dim": Range(1, 256),
        "value_dim": Range(1, 256),
        "q_per_kv": Range(1, 16),
        "causal": one_of(False, True),
    }
    register("attention.ragged", expanded.ragged, frozenset({RAGGED_SIGNATURE}), heads)
    sizes: dict[str, TraitBound] = {
        "latent_dim": Range(1, 512),
        "rotary_dim": MultipleOf(2, 64),
        "plain_dim": Range(1, 128),
        "value_dim": Range(1, 128),
        **_PAGES,
    }
    for make, kinds, rounding, solution in (
        (expanded.make_mla_extend_expanded, KV_FORMATS, {}, "triton"),
        (
            expanded.make_rounded_mla_extend_expanded,
            _ROUNDED_OVER,
            {"activations": one_of("bfloat16")},
            "triton_bf16",
        ),
    ):
        taken = frozenset(expanded_signature(kv, weight) for kv in kinds for weight in WEIGHT_FORMATS.values())
        register("attention.mla_extend_expanded", make, taken, {**sizes, **rounding}, solution=solution)
