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
    full = [layer for layer in config.attending_layers if layer not in config.sliding_layers]
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
    return history("latent", layers, [_latent_field(config)], granularity=granularity)


def sparse_latent_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """The latents of all layers, and the indexer's keys: beside the latents where every layer has an indexer, else in a
    group of their own."""
    index, everywhere = config.index, tuple(range(config.num_layers))
    if index is None:
        raise ValueError(f"{config.architecture}: the configuration has no indexer")
    latent, key = _latent_field(config), CacheFieldSpec(name="index_key", heads=1, dim=index.width)
    if index.layers == everywhere:
        return (history("latent", everywhere, [latent, key], granularity=granularity),)
    return (
        history("latent", everywhere, [latent], granularity=granularity),
        history("index", index.layers, [key], granularity=granularity),
    )


def _latent_field(config: ModelConfig) -> CacheFieldSpec:
    if config.latent is None:
        raise ValueError(f"{config.architecture}: the configuration has no latent attention")
    return CacheFieldSpec(name="latent", heads=1, dim=config.latent.latent + config.latent.rotary)
