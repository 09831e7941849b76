"""Rotary embeddings as checkpoints describe them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.model_config.fields import Fields
from tokenspeed.recipes.model_config.types import RopeConfig

PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""The parameters that a kind must have."""

OPTIONAL: dict[str, dict[str, float]] = {
    "yarn": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.0,
        "mscale_all_dim": 0.0,
        "attention_factor": 0.0,
        "truncate": 1.0,
    },
}
"""Those that it may have, with what stands for "not given"."""


def read_rope(fields: Fields, *, share: float = 1.0, theta: float = 10000.0, paired: bool = False) -> RopeConfig:
    """Reads rope_parameters (transformers 5) or rope_theta with rope_scaling (before).

    ``share`` and ``theta``: what partial_rotary_factor and rope_theta are where the checkpoint does not say.
    ``paired``: see RopeConfig.
    """
    values = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{fields.where}: rope_parameters should be an object, it is {values!r}")
    return replace(rope_of(fields, values, share=share, theta=theta), paired=paired)


def rope_of(fields: Fields, values: Mapping[str, Any], *, share: float = 1.0, theta: float = 10000.0) -> RopeConfig:
    """The rotary embedding that ``values``, one object of rotary parameters in ``fields``, describes."""
    rope = Fields(f"{fields.where}: rope_parameters", values)
    kind = str(values.get("rope_type") or values.get("type") or "default")
    if kind == "mrope":
        kind = (
            "default"  # multimodal sections: the axes of a text have one position, and the embedding is the plain one
        )
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", share))
    if not 0 < share <= 1:
        raise CheckpointError(f"{fields.where}: partial_rotary_factor is {share}, it should be above 0 and at most 1")
    theta = rope.number("rope_theta", fields.number("rope_theta", theta))
    if kind == "yarn" and values.get("original_max_position_embeddings") is None:
        given = fields.integer("max_position_embeddings")
        rope = Fields(rope.where, {**values, "original_max_position_embeddings": given})
    return make_rope(rope, kind=kind, theta=theta, share=share)


def make_rope(fields: Fields, *, kind: str, theta: float, share: float = 1.0) -> RopeConfig:
    """Takes the parameters of ``kind`` from ``fields``; CheckpointError for an unknown kind or a parameter that cannot
    be."""
    if kind not in PARAMETERS:
        raise CheckpointError(
            f"{fields.where}: rotary scaling {kind!r} is not supported; supported are {', '.join(PARAMETERS)}"
        )
    parameters = {name: fields.number(name) for name in PARAMETERS[kind]}
    for name, value in parameters.items():
        if value <= 0:
            raise CheckpointError(f"{fields.where}: {name} should be above 0, it is {value}")
    for name, default in OPTIONAL.get(kind, {}).items():
        is_flag = isinstance(fields.values.get(name), bool)
        parameters[name] = float(fields.flag(name, True)) if is_flag else fields.number(name, default)
    return RopeConfig(theta=theta, kind=kind, parameters=parameters, share=share)
