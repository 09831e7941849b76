"""Mixtures of experts and latent attention as the metadata of GGUF files describe them."""

from typing import Any

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.types import ExpertsConfig, LatentConfig, Scoring

_SCORINGS: dict[int, Scoring] = {1: "softmax", 2: "sigmoid"}


def experts_of(fields: Fields, layers: int, **own: Any) -> ExpertsConfig | None:
    """The mixture in all layers but the leading dense ones; None where there is none.

    ``own``: what the architecture has by nature. Experts that are chosen by sigmoid have a correction.
    """
    count, first = fields.integer("expert_count", 0), fields.integer("leading_dense_block_count", 0)
    if not count or first >= layers:
        return None
    scoring = _scoring(fields)
    groups, top_groups = fields.integer("expert_group_count", 0), fields.integer("expert_group_used_count", 0)
    if not groups and count == 256 and scoring == "sigmoid":
        groups, top_groups = 8, 4  # of the first files of DeepSeek-V3, which do not say it
    intermediate = fields.integer("expert_feed_forward_length")
    found: dict[str, Any] = {
        "layers": tuple(range(first, layers)),
        "count": count,
        "active": fields.integer("expert_used_count"),
        "intermediate": intermediate,
        "shared_intermediate": fields.integer("expert_shared_count", 0) * intermediate,
        "scoring": scoring,
        "corrected": scoring == "sigmoid",
        "groups": max(1, groups),
        "top_groups": max(1, top_groups),
        "renormalise": fields.flag("expert_weights_norm", False),
        "scale": fields.number("expert_weights_scale", 1.0) or 1.0,
    }
    return ExpertsConfig(**{**found, **own})


def _scoring(fields: Fields) -> Scoring:
    number = fields.integer("expert_gating_func", 1)
    if number not in _SCORINGS:
        raise CheckpointError(
            f"{fields.where}: expert_gating_func is {number}, supported are 1 (softmax) and 2 (sigmoid)"
        )
    return _SCORINGS[number]


def latent_of(fields: Fields) -> LatentConfig:
    """Latent attention. Files that have the up-projection in two parts say of a head's widths what it caches, and the
    widths themselves apart."""
    rotary = fields.integer("rope.dimension_count")
    key = fields.integer("attention.key_length_mla", fields.integer("attention.key_length"))
    value = fields.integer("attention.value_length_mla", fields.integer("attention.value_length"))
    if key <= rotary:
        raise CheckpointError(f"{fields.where}: a head of {key} has {rotary} rotated elements; it has plain ones too")
    return LatentConfig(
        query_rank=fields.integer("attention.q_lora_rank", 0),
        latent=fields.integer("attention.kv_lora_rank"),
        rotary=rotary,
        plain=key - rotary,
        value=value,
    )
