"""Decoders that attend to a window and to compressed entries: DeepSeek-V4."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.huggingface import Generation, decoder
from tokenspeed.recipes.model_config.rope import make_rope, rope_of
from tokenspeed.recipes.model_config.types import (
    CompressionConfig,
    ExpertsConfig,
    IndexConfig,
    ModelConfig,
    RopeConfig,
    StreamsConfig,
)
from tokenspeed.recipes.quantization import Quantization, WeightScheme, read_quantization

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_HASHED, _ROUTED = "hash_moe", "moe"
_SPARSE_RATE, _HEAVY_RATE = 4, 128


def deepseek_v4(fields: Fields, generation: Generation) -> ModelConfig:
    """DeepSeek-V4 Pro and Flash. Layers that draft tokens, under mtp, are left out."""
    fields.refuse_unless("hidden_act", ("silu",))
    fields.refuse_unless("num_key_value_heads", (1,))
    fields.refuse_unless("attention_bias", (False,))
    fields.refuse_unless("mlp_bias", (False,))
    count, head_dim = fields.integer("num_hidden_layers"), fields.integer("head_dim")
    kinds, rates = _layer_kinds(fields, count), _rates(fields)
    sparse, heavy = (tuple(layer for layer in range(count) if kinds[layer] == kind) for kind in (SPARSE, HEAVY))
    share = _rotary_share(fields, head_dim)
    compression = CompressionConfig(
        sparse_layers=sparse,
        sparse_rate=rates[SPARSE],
        heavy_layers=heavy,
        heavy_rate=rates[HEAVY],
        query_rank=fields.integer("q_lora_rank"),
        rotary=int(head_dim * share),
        rope=_rope(fields, "compress", "compress_rope_theta", 160000.0, share),
        output_groups=fields.integer("o_groups"),
        output_rank=fields.integer("o_lora_rank"),
    )
    _check(fields, compression)
    return decoder(
        fields,
        generation,
        "deepseek_v4",
        num_kv_heads=1,
        head_dim=head_dim,
        intermediate_size=fields.integer("moe_intermediate_size"),
        attention_bias=False,
        rope=_rope(fields, "main", "rope_theta", 10000.0, share),
        sliding_window=fields.integer("sliding_window"),
        sliding_layers=tuple(range(count)),
        compression=compression,
        index=_index(fields, sparse),
        streams=StreamsConfig(
            count=fields.integer("hc_mult", 4),
            rounds=fields.integer("hc_sinkhorn_iters", 20),
            floor=fields.number("hc_eps", 1e-6),
        ),
        experts=_experts(fields, count),
        quantization=_quantization(fields),
        ignored_weights=(r"(model\.)?mtp\..*",),
    )


def _quantization(fields: Fields) -> Quantization | None:
    """Of the makers' checkpoints: scales are called "scale", and experts that are stored as bytes are MXFP4 in groups
    of 32. ``expert_dtype`` says so, beside quantization_config or in it; the first copies do not say."""
    found = read_quantization(fields.where, fields.values)
    if found is None or found.method != "fp8":
        return found
    places = (fields, fields.part("quantization_config"))
    for place in places:
        place.refuse_unless("expert_dtype", ("fp4", "fp8"))
    experts = WeightScheme(kind="mxfp4", strategy="group", group=32, scale="scale")
    return replace(
        found,
        rules=tuple((targets, replace(scheme, scale="scale")) for targets, scheme in found.rules),
        of_bytes=None if any(place.values.get("expert_dtype") == "fp8" for place in places) else experts,
    )


def _layer_kinds(fields: Fields, count: int) -> list[str]:
    kinds = fields.words("layer_types", count)
    ratios = fields.values.get("compress_ratios")
    if kinds is None and isinstance(ratios, list):
        names = {0: WINDOW, _SPARSE_RATE: SPARSE, _HEAVY_RATE: HEAVY}
        kinds = [names.get(ratio, str(ratio)) for ratio in ratios[:count]]  # there may be more, of drafting layers
    if kinds is None:
        kinds = [HEAVY if layer < 2 or layer % 2 == 0 else SPARSE for layer in range(count)]
    unknown = sorted(set(kinds) - {WINDOW, SPARSE, HEAVY})
    if unknown or len(kinds) != count:
        raise CheckpointError(
            f"{fields.where}: the {count} layers attend by {', '.join(unknown) or f'{len(kinds)} kinds'}; supported is "
            f"one of {WINDOW}, {SPARSE} and {HEAVY} for each"
        )
    return kinds


def _rates(fields: Fields) -> dict[str, int]:
    rates = {SPARSE: fields.integer("compress_rate_csa", _SPARSE_RATE)}
    rates[HEAVY] = fields.integer("compress_rate_hca", _HEAVY_RATE)
    if isinstance(fields.values.get("compress_rates"), Mapping):
        given = fields.part("compress_rates")
        rates = {kind: given.integer(kind, rate) for kind, rate in rates.items()}
    return rates


def _rotary_share(fields: Fields, head_dim: int) -> float:
    rotary = fields.integer("qk_rope_head_dim", 64)
    return fields.number("partial_rotary_factor", rotary / max(head_dim, 1))


def _rope(fields: Fields, label: str, theta_key: str, theta: float, share: float) -> RopeConfig:
    """The rotary embedding ``label``: under its own name in rope_parameters, or out of the older flat fields, where
    only layers that compress are scaled."""
    values = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    own = values.get(label) if isinstance(values, Mapping) else None
    theta = fields.number(theta_key, theta)
    if not isinstance(own, Mapping):
        own = dict(values) if label == "compress" and isinstance(values, Mapping) else {}
        own.pop("rope_theta", None)
    found: dict[str, Any] = {"rope_theta": theta, "partial_rotary_factor": share, **own}
    kind = str(found.get("rope_type") or found.get("type") or "default")
    if kind == "yarn":
        found.setdefault("attention_factor", 1.0)  # the angles alone are scaled
    if kind == "default":
        where = Fields(f"{fields.where}: rope_parameters", found)
        return make_rope(where, kind=kind, theta=where.number("rope_theta"), share=share)
    return rope_of(fields, found, share=share)


def _index(fields: Fields, layers: tuple[int, ...]) -> IndexConfig | None:
    if not layers:
        return None
    return IndexConfig(
        heads=fields.integer("index_n_heads"),
        width=fields.integer("index_head_dim"),
        chosen=fields.integer("index_topk"),
        layers=layers,
        paired=True,
    )


def _experts(fields: Fields, count: int) -> ExpertsConfig:
    fields.refuse_unless("scoring_func", ("sqrtsoftplus",))
    fields.refuse_unless("topk_method", ("noaux_tc",))
    fields.refuse_unless("norm_topk_prob", (True,))
    kinds = fields.words("mlp_layer_types", count)
    if kinds is None:
        hashed = fields.integer("num_hash_layers", 3)
        kinds = [_HASHED if layer < hashed else _ROUTED for layer in range(count)]
    unknown = sorted(set(kinds) - {_HASHED, _ROUTED})
    if unknown:
        raise CheckpointError(
            f"{fields.where}: mlp_layer_types has {', '.join(unknown)}; supported are {_HASHED} and {_ROUTED}"
        )
    intermediate = fields.integer("moe_intermediate_size")
    return ExpertsConfig(
        layers=tuple(range(count)),
        count=fields.integer("n_routed_experts"),
        active=fields.integer("num_experts_per_tok"),
        intermediate=intermediate,
        shared_intermediate=fields.integer("n_shared_experts", 1) * intermediate,
        scoring="sqrtsoftplus",
        corrected=True,
        renormalise=True,
        scale=fields.number("routed_scaling_factor", 1.5),
        limit=fields.number("swiglu_limit", 10.0),
        table_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == _HASHED),
    )


def _check(fields: Fields, compression: CompressionConfig) -> None:
    heads, groups = fields.integer("num_attention_heads"), compression.output_groups
    if groups < 1 or heads % groups:
        raise CheckpointError(f"{fields.where}: {heads} attention heads do not divide into o_groups {groups}")
    for name, value in (
        ("q_lora_rank", compression.query_rank),
        ("o_lora_rank", compression.output_rank),
        ("sliding_window", fields.integer("sliding_window")),
        ("the tokens of a compressed entry", min(compression.sparse_rate, compression.heavy_rate)),
        ("hc_mult", fields.integer("hc_mult", 4)),
        ("hc_sinkhorn_iters", fields.integer("hc_sinkhorn_iters", 20)),
    ):
        if value < 1:
            raise CheckpointError(f"{fields.where}: {name} is {value}, it should be at least 1")
