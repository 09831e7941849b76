"""The cache groups that decoders declare, by what their layers leave behind."""

from collections.abc import Sequence

from tokenspeed.layers.cache_spec import CacheFieldSpec, CacheGroupSpec
from tokenspeed.recipes.model_config import ModelConfig


def history(
    group_id: str, layers: Sequence[int], fields: Sequence[CacheFieldSpec], *, granularity: int, window: int = 0
) -> CacheGroupSpec:
    """One entry a token in blocks of ``granularity`` tokens: of every token, or of the last ``window``."""
    return CacheGroupSpec(
        group_id=group_id,
        kind="sliding_window" if window else "full_history",
        layers=tuple(layers),
        fields=tuple(fields),
        rows_per_page=granularity,
        entry_stride_tokens=1,
        sliding_window_tokens=window or None,
    )


def key_value_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """Keys and values: of every token in the layers that see the whole sequence, of the last
    ``config.sliding_window`` tokens in the others. A group without layers is left out."""
    fields = [CacheFieldSpec(name=name, heads=config.num_kv_heads, dim=config.head_dim) for name in ("k", "v")]
    full = [layer for layer in range(config.num_layers) if layer not in config.sliding_layers]
    groups = []
    if full:
        groups.append(history("attention", full, fields, granularity=granularity))
    if config.sliding_layers:
        window = config.sliding_window
        groups.append(
            history("sliding_attention", config.sliding_layers, fields, granularity=granularity, window=window)
        )
    return tuple(groups)


def latent_group(config: ModelConfig, layers: Sequence[int], *, granularity: int) -> CacheGroupSpec:
    """The latents of multi-head latent attention and the rotated part of the key, one vector a token."""
    if config.latent is None:
        raise ValueError(f"{config.architecture}: the configuration has no latent attention")
    width = config.latent.latent + config.latent.rotary
    return history("latent", layers, [CacheFieldSpec(name="latent", heads=1, dim=width)], granularity=granularity)
