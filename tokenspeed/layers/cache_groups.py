"""The cache groups that decoders declare, by what their layers leave behind."""

from collections.abc import Sequence

from tokenspeed.layers.cache_spec import CacheFieldSpec, CacheGroupSpec, CacheType
from tokenspeed.recipes.model_config import ModelConfig


def history(
    group_id: str,
    layers: Sequence[int],
    fields: Sequence[CacheFieldSpec],
    *,
    granularity: int,
    window: int = 0,
    stride: int = 1,
    dtype: CacheType = "kv",
) -> CacheGroupSpec:
    """One entry for ``stride`` tokens in blocks of ``granularity`` tokens: of every token, or of the last ``window``.
    ValueError where a block holds no whole number of entries."""
    if granularity % stride:
        raise ValueError(
            f"kv.granularity is {granularity} tokens, an entry of cache group {group_id!r} stands for {stride}; set "
            "kv.granularity to a multiple"
        )
    return CacheGroupSpec(
        group_id=group_id,
        kind="sliding_window" if window else "full_history",
        layers=tuple(layers),
        fields=tuple(fields),
        dtype=dtype,
        rows_per_page=granularity // stride,
        entry_stride_tokens=stride,
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


def compressed_groups(config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]:
    """Of DeepSeek-V4: the entries of a window in every layer; and for the layers that compress by either rate, the
    compressed entries of the whole sequence, and what the tokens leave for entries that are not complete yet.

    An entry is made of the tokens that it stands for and, where layers choose among entries, of as many before them: so
    far back goes the window of these inputs, which are never cached in 8 bits (kv_cache.row_dtype). A prefix hit finds
    them as it finds any window.
    """
    compression, width = config.compression, config.head_dim
    if compression is None:
        raise ValueError(f"{config.architecture}: the configuration compresses nothing")
    window, layers = config.sliding_window, tuple(range(config.num_layers))
    entry = CacheFieldSpec(name="latent", heads=1, dim=width)
    groups = [history("sliding_attention", layers, [entry], granularity=granularity, window=window)]
    if compression.sparse_layers:
        assert config.index is not None, "layers that choose have an indexer"
        key, rate = config.index.width, compression.sparse_rate
        fields = [entry, CacheFieldSpec(name="index_key", heads=1, dim=key)]
        inputs = [_input(name, 2 * width) for name in ("values", "gates")]
        inputs += [_input(name, 2 * key) for name in ("index_values", "index_gates")]
        groups += _compressing("sparse", compression.sparse_layers, fields, inputs, granularity, rate, 2 * rate)
    if compression.heavy_layers:
        rate, inputs = compression.heavy_rate, [_input(name, width) for name in ("values", "gates")]
        groups += _compressing("heavy", compression.heavy_layers, [entry], inputs, granularity, rate, rate)
    return tuple(groups)


def _input(name: str, width: int) -> CacheFieldSpec:
    return CacheFieldSpec(name=name, heads=1, dim=width)


def _compressing(
    name: str,
    layers: tuple[int, ...],
    entries: list[CacheFieldSpec],
    inputs: list[CacheFieldSpec],
    granularity: int,
    rate: int,
    window: int,
) -> tuple[CacheGroupSpec, CacheGroupSpec]:
    """Entries of ``rate`` tokens, and inputs of the last ``window``."""
    return (
        history(f"{name}_entries", layers, entries, granularity=granularity, stride=rate),
        history(f"{name}_inputs", layers, inputs, granularity=granularity, window=window, dtype="kv_16"),
    )


def _latent_field(config: ModelConfig) -> CacheFieldSpec:
    if config.latent is None:
        raise ValueError(f"{config.architecture}: the configuration has no latent attention")
    return CacheFieldSpec(name="latent", heads=1, dim=config.latent.latent + config.latent.rotary)
