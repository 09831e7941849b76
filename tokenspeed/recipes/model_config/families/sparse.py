"""Decoders whose attention chooses what it reads by an indexer: DeepSeek-V3.2 and GLM 5."""

from dataclasses import replace

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.model_config.families.latent import deepseek_v3
from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.huggingface import Generation
from tokenspeed.recipes.model_config.types import IndexConfig, ModelConfig

_FULL, _SHARED = "full", "shared"


def deepseek_v32(fields: Fields, generation: Generation) -> ModelConfig:
    """DeepSeek-V3.2: a DeepSeek-V3 with an indexer in every layer."""
    fields.refuse_unless("indexer_rope_interleave", (False,))
    layers = tuple(range(fields.integer("num_hidden_layers")))
    return _sparse(fields, generation, "deepseek_v32", layers, paired=False)


def glm_moe_dsa(fields: Fields, generation: Generation) -> ModelConfig:
    """GLM 5: the same, but layers may take over the choice of the last layer before them that has an indexer."""
    fields.refuse_unless("indexer_rope_interleave", (True,))
    kinds = _indexer_kinds(fields)
    if kinds[:1] != [_FULL]:
        raise CheckpointError(
            f"{fields.where}: the first layer has no indexer, and no layer before it whose choice it could share; the "
            "configuration is damaged: take the one that belongs to the weights"
        )
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _FULL)
    return _sparse(fields, generation, "glm_moe_dsa", layers, paired=True)


def _sparse(
    fields: Fields, generation: Generation, architecture: str, layers: tuple[int, ...], *, paired: bool
) -> ModelConfig:
    if not fields.integer("q_lora_rank"):
        raise CheckpointError(f"{fields.where}: q_lora_rank is 0; an indexer works on compressed queries")
    found = deepseek_v3(fields, generation, architecture)
    index = IndexConfig(
        heads=fields.integer("index_n_heads"),
        width=fields.integer("index_head_dim"),
        chosen=fields.integer("index_topk", 2048),
        layers=layers,
        paired=paired,
    )
    assert found.latent is not None, "deepseek_v3 reads it"
    if min(index.heads, index.chosen) < 1 or index.width < found.latent.rotary:
        raise CheckpointError(
            f"{fields.where}: an indexer of {index.heads} heads of {index.width} elements, {found.latent.rotary} of "
            f"them rotated, that chooses {index.chosen} tokens cannot be; check index_n_heads, index_head_dim and "
            "index_topk"
        )
    kinds = fields.words("mlp_layer_types", found.num_layers)
    if kinds is not None and found.experts is not None:
        sparse = tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
        found = replace(found, experts=replace(found.experts, layers=sparse) if sparse else None)
    return replace(found, index=index)


def _indexer_kinds(fields: Fields) -> list[str]:
    """For each layer, whether it has an indexer ("full") or shares a choice ("shared")."""
    count = fields.integer("num_hidden_layers")
    pattern = fields.values.get("index_topk_pattern")
    kinds = fields.words("indexer_types", count)
    if kinds is None and isinstance(pattern, str):
        names = {"F": _FULL, "S": _SHARED}
        kinds = [names.get(letter, letter) for letter in pattern]
    elif kinds is None:
        kinds = fields.words("index_topk_pattern", count)
    if kinds is None:
        every, first = max(fields.integer("index_topk_freq", 1), 1), fields.integer("index_skip_topk_offset", 2)
        kinds = [_SHARED if max(layer - first + 1, 0) % every else _FULL for layer in range(count)]
    if len(kinds) != count or not set(kinds) <= {_FULL, _SHARED}:
        raise CheckpointError(
            f"{fields.where}: the layers' indexers are {kinds}; {_FULL} or {_SHARED} is said for each of the {count} "
            "layers"
        )
    return kinds
