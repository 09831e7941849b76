"""A model's dimensions as a plan needs them: what is cached, what is computed, what must be divisible.

They come from a checkpoint's own config where it is on this machine, and from the recipe where it is not.
"""

from typing import Literal

from pydantic import model_validator

from tokenspeed.recipes.model_config import ModelConfig
from tokenspeed.recipes.schema_types import Count, Positive, Strict

CacheType = Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3"]
GroupType = Literal["auto", "auto_16", "float32", "bfloat16", "float16", "float8_e4m3"]

_UNBLOCKED = ("float32", "bfloat16", "float16")

CACHE_TYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}


class CacheGroup(Strict):
    """Layers that cache alike.

    One token, or so many as ``stride`` says, leave ``layers`` times ``values_per_layer`` values in a history group; a
    state group keeps so many for a whole request. ``replicated``: every tensor-parallel rank holds all of it (MLA's
    latent), else the ranks share it. ``dtype`` is the group's own type where it does not follow kv.dtype; "auto_16"
    follows it, but for 8 bits, in place of which it has bfloat16: rows that entries are made of.
    """

    id: str
    kind: Literal["full_history", "sliding_window", "state"] = "full_history"
    layers: Positive
    values_per_layer: Positive
    replicated: bool = False
    stride: Positive = 1
    window: Count = 0
    checkpoint: Count = 0
    dtype: GroupType = "auto"

    def kept_as(self, cache_type: str) -> str:
        """The type of its values where the cache's is ``cache_type``."""
        if self.dtype == "auto_16":
            return "bfloat16" if CACHE_TYPE_BYTES[cache_type] == 1 else cache_type
        return cache_type if self.dtype == "auto" else self.dtype

    @model_validator(mode="after")
    def _kind_has_its_own_keys(self) -> "CacheGroup":
        for key, kind in (("window", "sliding_window"), ("checkpoint", "state")):
            if bool(getattr(self, key)) != (self.kind == kind):
                raise ValueError(f"cache group {self.id}: {key} (in tokens) belongs to kind {kind}, and only there")
        return self


class LatentAttention(Strict):
    """Multi-head latent attention (DeepSeek-V2): ranks of the compressed query (0: it is not compressed) and cache, and
    widths of a head."""

    query_rank: Count
    latent: Positive
    rotary: Positive
    plain: Positive
    value: Positive


class LinearAttention(Strict):
    """Layers that keep a state in place of keys and values: Gated DeltaNet, or with a decay for each channel Kimi Delta
    Attention."""

    layers: Positive
    key_heads: Positive
    value_heads: Positive
    key_dim: Positive
    value_dim: Positive
    conv_width: Positive
    channel_decay: bool = False

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Elements of all value heads."""
        return self.value_heads * self.value_dim


class SparseIndex(Strict):
    """The indexer of sparse attention (DeepSeek-V3.2): heads, their width, tokens that it chooses for each query, and
    the layers that have one, 0 for all."""

    heads: Positive
    width: Positive
    chosen: Positive = 2048
    layers: Count = 0


class Compression(Strict):
    """Attention over a window and compressed entries (DeepSeek-V4).

    ``sparse_layers`` choose among entries of ``sparse_rate`` tokens, ``heavy_layers`` see all entries of
    ``heavy_rate``; ``query_rank`` and ``output_rank`` (of each of ``output_groups``) are those of the projections.
    """

    window: Positive
    sparse_layers: Count
    sparse_rate: Positive
    heavy_layers: Count
    heavy_rate: Positive
    query_rank: Positive
    rotary: Positive
    output_groups: Positive
    output_rank: Positive


class Experts(Strict):
    """A mixture of experts in ``layers`` of the layers; ``shared`` experts see every token, through a gate of their own
    where there is a ``shared_gate``. Where the choice is ``corrected`` the router has a bias for each expert; with
    ``biases`` it has, and each expert's matrices have. In ``table_layers`` of the layers a table says, for each token
    of the vocabulary, which experts it goes to; these have no corrections."""

    layers: Positive
    count: Positive
    active: Positive
    shared: Count = 0
    shared_gate: bool = False
    intermediate: Positive
    corrected: bool = False
    biases: bool = False
    table_layers: Count = 0


class Vision(Strict):
    """A vision encoder; every rank holds it whole unless its heads are ``sharded`` too."""

    layers: Positive
    hidden: Positive
    heads: Positive
    intermediate: Positive
    parameters: Positive
    patches: Positive
    sharded: bool = False


class Dimensions(Strict):
    """A decoder's dimensions.

    ``head_norms``: queries and keys are normalised, each head by itself, or with ``whole_norms`` all heads together.
    ``biases``: queries, keys and values have them; ``output_bias``: what follows attention too. ``sinks``: each head
    has one.
    ``intermediate`` is that of the dense layers (0: there are none), ``quantisation_block`` the columns that share a
    scale: a rank's part of a quantised matrix must hold whole ones. ``by_position``: numbers that each position has in
    tables (cosines and sines, of every rotary embedding); 0: as many as one embedding of a whole head has.
    ``unturned``: layers that attend where nothing is rotated; one row of a table is every position's there.
    ``output_gate``: what attention gives is gated element by element, by rows that the projection of the queries has
    besides. ``streams``: residual streams of a token.
    """

    layers: Positive
    hidden: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    intermediate: Count
    vocab: Positive
    tied: bool = False
    head_norms: bool = False
    whole_norms: bool = False
    biases: bool = False
    output_bias: bool = False
    sinks: bool = False
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    output_gate: bool = False
    index: SparseIndex | None = None
    compression: Compression | None = None
    streams: Positive = 1
    experts: Experts | None = None
    vision: Vision | None = None
    quantisation_block: Positive = 1
    by_position: Count = 0
    unturned: Count = 0

    @property
    def table_columns(self) -> int:
        """Numbers that a position has in tables."""
        if self.unturned >= self.layers - (self.linear.layers if self.linear else 0):
            return 0
        if self.compression is not None:
            compressing = self.compression.sparse_layers + self.compression.heavy_layers
            kinds = int(compressing > 0) + int(compressing < self.layers)
            return 2 * kinds * self.compression.rotary  # there and back
        return self.by_position or (self.head_dim if self.latent is None else self.latent.rotary)


def dimensions_of(config: ModelConfig) -> Dimensions:
    """The dimensions of a checkpoint that is here."""
    return Dimensions(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        head_norms=config.qk_norm,
        whole_norms=config.whole_norms,
        biases=config.attention_bias,
        output_bias=config.output_bias,
        sinks=config.sinks,
        latent=_latent(config),
        index=_index(config),
        linear=_linear(config),
        output_gate=config.output_gate,
        compression=_compression(config),
        streams=1 if config.streams is None else config.streams.count,
        experts=_experts(config),
        quantisation_block=_quantisation_block(config),
        by_position=_by_position(config),
        unturned=sum(config.rope_of(layer).kind == "none" for layer in config.attending_layers),
    )


def _quantisation_block(config: ModelConfig) -> int:
    """Of a GGUF file it is that of the formats of its type; matrices whose columns are no whole blocks of 256 are in
    blocks of 32 there."""
    if config.quantization is not None:
        return config.quantization.block_columns
    kind = config.dtype.lower()
    if kind == "gguf" or kind in _UNBLOCKED:
        return 1
    long = "_k" in kind or kind.startswith(("iq", "tq"))
    return 256 if long and config.intermediate_size % 256 == 0 else 32


def _by_position(config: ModelConfig) -> int:
    if config.latent is not None:
        return config.latent.rotary + int(config.latent.growth > 0)
    kinds = {repr(config.rope_of(layer)): config.rope_of(layer) for layer in range(config.num_layers)}
    return sum(rope.rotated(config.head_dim) for rope in kinds.values() if rope.kind != "none")


def _latent(config: ModelConfig) -> LatentAttention | None:
    latent = config.latent
    if latent is None:
        return None
    return LatentAttention(
        query_rank=latent.query_rank,
        latent=latent.latent,
        rotary=latent.rotary,
        plain=latent.plain,
        value=latent.value,
    )


def _index(config: ModelConfig) -> SparseIndex | None:
    index = config.index
    if index is None:
        return None
    return SparseIndex(heads=index.heads, width=index.width, chosen=index.chosen, layers=len(index.layers))


def _linear(config: ModelConfig) -> LinearAttention | None:
    linear = config.linear
    if linear is None:
        return None
    return LinearAttention(
        layers=len(linear.layers),
        key_heads=linear.key_heads,
        value_heads=linear.value_heads,
        key_dim=linear.key_dim,
        value_dim=linear.value_dim,
        conv_width=linear.conv_width,
        channel_decay=linear.channel_decay,
    )


def _compression(config: ModelConfig) -> Compression | None:
    compression = config.compression
    if compression is None:
        return None
    return Compression(
        window=config.sliding_window,
        sparse_layers=len(compression.sparse_layers),
        sparse_rate=compression.sparse_rate,
        heavy_layers=len(compression.heavy_layers),
        heavy_rate=compression.heavy_rate,
        query_rank=compression.query_rank,
        rotary=compression.rotary,
        output_groups=compression.output_groups,
        output_rank=compression.output_rank,
    )


def _experts(config: ModelConfig) -> Experts | None:
    experts = config.experts
    if experts is None:
        return None
    return Experts(
        layers=len(experts.layers),
        count=experts.count,
        active=experts.active,
        shared=-(-experts.shared_intermediate // experts.intermediate),
        shared_gate=experts.shared_gate,
        intermediate=experts.intermediate,
        corrected=experts.corrected,
        biases=experts.biases,
        table_layers=len(experts.table_layers),
    )


def groups_of(config: ModelConfig) -> list[CacheGroup]:
    """The cache groups of a checkpoint that is here; the model's own declaration says the same."""
    attending, states = len(config.attending_layers), _state_groups(config)
    if config.latent is not None:
        width = config.latent.latent + config.latent.rotary
        groups = []
        if config.index is not None and len(config.index.layers) == config.num_layers:
            width += config.index.width
        elif config.index is not None:
            count, key = len(config.index.layers), config.index.width
            groups = [CacheGroup(id="index", layers=count, values_per_layer=key, replicated=True)]
        return [CacheGroup(id="latent", layers=attending, values_per_layer=width, replicated=True), *groups, *states]
    if config.compression is not None:
        return _compressed_groups(dimensions_of(config))
    values = 2 * config.num_kv_heads * config.head_dim
    sliding = len(config.sliding_layers)
    groups = []
    if attending > sliding:
        groups.append(CacheGroup(id="attention", layers=attending - sliding, values_per_layer=values))
    if sliding:
        groups.append(
            CacheGroup(
                id="sliding_attention",
                kind="sliding_window",
                layers=sliding,
                values_per_layer=values,
                window=config.sliding_window,
            )
        )
    return groups + states


def _state_groups(config: ModelConfig) -> list[CacheGroup]:
    """The inputs that a convolution still sees, and the matrix of each head."""
    linear = config.linear
    if linear is None:
        return []
    values = (linear.conv_width - 1) * linear.channels + linear.value_heads * linear.key_dim * linear.value_dim
    return [
        CacheGroup(
            id="state",
            kind="state",
            layers=len(linear.layers),
            values_per_layer=values,
            checkpoint=linear.checkpoint,
            dtype="float32",
        )
    ]


def _compressed_groups(model: Dimensions) -> list[CacheGroup]:
    """A window in all layers; of those that compress, entries, and what tokens leave for entries not complete yet."""
    compression, width = model.compression, model.head_dim
    assert compression is not None, "asked for by its presence"
    key = 0 if model.index is None else model.index.width

    def group(name: str, layers: int, values: int, *, stride: int = 1, window: int = 0) -> CacheGroup:
        return CacheGroup(
            id=name,
            kind="sliding_window" if window else "full_history",
            layers=layers,
            values_per_layer=values,
            replicated=True,
            stride=stride,
            window=window,
            dtype="auto_16" if name.endswith("_inputs") else "auto",
        )

    groups = [group("sliding_attention", model.layers, width, window=compression.window)]
    count, rate = compression.sparse_layers, compression.sparse_rate
    if count:
        groups.append(group("sparse_entries", count, width + key, stride=rate))
        groups.append(group("sparse_inputs", count, 4 * (width + key), window=2 * rate))
    count, rate = compression.heavy_layers, compression.heavy_rate
    if count:
        groups.append(group("heavy_entries", count, width, stride=rate))
        groups.append(group("heavy_inputs", count, 2 * width, window=rate))
    return groups
