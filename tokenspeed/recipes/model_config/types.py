"""What the engine, the frontend and the memory plan know of a checkpoint's model. No torch here."""

from dataclasses import dataclass, field, replace
from typing import Literal

from tokenspeed.recipes.quantization import Quantization

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GatedKind = Literal["silu", "gelu_tanh"]
"""What the gate of a dense MLP goes through."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. ``kind`` "default", "linear", "llama3" ..., "none" (nothing is rotated); ``parameters`` are its
    own.

    ``share``: the part of a head that is rotated, its first elements. ``paired``: the checkpoint has elements that
    rotate together side by side, not half a rotary part apart.
    """

    theta: float = 10000.0
    kind: str = "default"
    parameters: dict[str, float] = field(default_factory=dict)
    share: float = 1.0
    paired: bool = False

    def rotated(self, head_dim: int) -> int:
        """Elements of a head of ``head_dim`` that are rotated."""
        return int(head_dim * self.share)


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): ranks of the compressed query (0: queries are not
    compressed) and of the latent, and the elements of a head: rotated, plain, and of its value.

    ``growth``: a query at position p is multiplied by 1 + growth * log(1 + floor(p / ``growth_length``)) (Mistral 4);
    0: it is not.
    """

    query_rank: int
    latent: int
    rotary: int
    plain: int
    value: int
    growth: float = 0.0
    growth_length: int = 0


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """The indexer of DeepSeek Sparse Attention.

    Attributes:
        heads, width: its heads and the elements of one.
        chosen: tokens that a query attends to at most.
        layers: those that have one; the others attend to what the last such layer before them chose.
        paired: whether the checkpoint has elements that rotate together side by side, else half a rotary part apart.
    """

    heads: int
    width: int
    chosen: int
    layers: tuple[int, ...]
    paired: bool = False


@dataclass(frozen=True, kw_only=True)
class StreamsConfig:
    """Hyper-connections: residual streams of a token, and the rounds and the floor of what makes their mixing matrix
    doubly stochastic."""

    count: int
    rounds: int
    floor: float


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Attention over a window and over entries that stand for several tokens each (DeepSeek-V4). Layers that are in
    neither list see the window alone; it is the model's sliding_window, and all layers have it.

    Attributes:
        sparse_layers, sparse_rate: layers whose indexer chooses among entries, and the tokens of an entry there.
        heavy_layers, heavy_rate: layers that see all entries, and the tokens of one.
        query_rank: of the compressed query.
        rotary: elements of a head that are rotated, its last ones.
        rope: of layers that compress; those with a window alone have the model's own.
        output_groups, output_rank: groups of heads in the output projection, and the rank of a group.
    """

    sparse_layers: tuple[int, ...]
    sparse_rate: int
    heavy_layers: tuple[int, ...]
    heavy_rate: int
    query_rank: int
    rotary: int
    rope: RopeConfig
    output_groups: int
    output_rank: int


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts.

    Attributes:
        layers: indices of the layers that have it; the others have a dense MLP.
        count, active: how many there are, and how many a token goes to.
        intermediate: of one expert.
        shared_intermediate: of the expert that every token goes to (several side by side are one); 0: there is none.
        shared_gate: whether the shared expert's result is gated by a sigmoid of its own.
        scoring, corrected, groups, top_groups, renormalise, scale: see Routing of tokenspeed_kernel.ops.moe.
        biases: whether router and experts have biases.
        swiglu_alpha, swiglu_limit: of the experts' activation clamped_swiglu; 0.0: it is silu.
        limit: what gate and up are clamped at; 0.0: at nothing.
        table_layers: those whose experts are looked up by the token's id.
        by_expert: among several ranks each expert is whole on one of them (expert parallelism); else each rank has a
            part of every expert.
        held, first_held: of one rank's dimensions: how many experts it has, from which on; 0: all.
    """

    layers: tuple[int, ...]
    count: int
    active: int
    intermediate: int
    shared_intermediate: int = 0
    shared_gate: bool = False
    scoring: Scoring = "softmax"
    corrected: bool = False
    groups: int = 1
    top_groups: int = 1
    renormalise: bool = True
    scale: float = 1.0
    biases: bool = False
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0
    limit: float = 0.0
    table_layers: tuple[int, ...] = ()
    by_expert: bool = False
    held: int = 0
    first_held: int = 0


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig:
    """Layers that keep a state in place of keys and values, by the gated delta rule (arXiv:2412.06464, and 2510.26692
    with a decay for each channel).

    Attributes:
        layers: indices of the layers that are so; the others attend.
        key_heads, value_heads: heads; value heads share key heads.
        key_dim, value_dim: elements of a head.
        conv_width: inputs that the convolution before the rule sees.
        channel_decay: whether a channel of a key has a decay of its own, else a head has.
        checkpoint: tokens between two states that are kept: a state is as large as the keys and values of hundreds of
            tokens, so they are kept far apart; a multiple of every block granularity.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    channel_decay: bool = False
    checkpoint: int = 256

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder's dimensions.

    Attributes:
        architecture: the name of the file under tokenspeed/models/.
        intermediate_size: of the dense MLPs.
        rope: see RopeConfig.
        context_length: the longest sequence the model was made for.
        attention_bias: whether q, k and v have biases; ``output_bias``: whether o has one.
        eos_token_ids: all ids that end a generation (generation_config.json counts too).
        dtype: what the checkpoint stores: "float32", "bfloat16", "float16" or a GGUF file type; of a quantised one,
            what the rest of it is stored in.
        quantization: how the quantised matrices of safetensors files are stored; None where none is.
        q_and_k_permuted: GGUF stores the q and k rows of llama models permuted for interleaved rotary.
        sliding_window: positions that a token sees in the layers ``sliding_layers``, its own the last of them; else 0.
        sliding_layers: indices of the layers with that window; all others see the whole sequence.
        sliding_rope: of the layers with the window, where it is not ``rope``.
        unturned_layers: layers whose queries and keys are not rotated at all.
        sinks: whether each query head has a sink, one more score in its softmax that has no value.
        whole_norms: with ``qk_norm``: each norm is over all heads together, not over one.
        norm_offset: what is added to the weights of all norms.
        attention_scale: of the scores; 0.0: 1 / sqrt(head_dim).
        soft_cap, logit_soft_cap: what scores and logits are capped at, x becoming c * tanh(x / c); 0.0: they are not.
        embedding_scale: what embeddings are multiplied by, rounded to the type that they are stored in.
        activation: of the dense MLPs; ``joined_gate_up``: whether the checkpoint has their gate and up as one matrix.
        output_gate: whether what attention gives is gated, element by element, by a sigmoid of the token's own.
        latent, index, compression, streams, experts, linear: of models that have them.
        ignored_weights: regular expressions for tensors of the checkpoint that are left out knowingly: a vision
            encoder, layers that draft tokens.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    context_length: int
    tie_word_embeddings: bool
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    output_bias: bool = False
    quantization: Quantization | None = None
    q_and_k_permuted: bool = False
    sliding_window: int = 0
    sliding_layers: tuple[int, ...] = ()
    sliding_rope: RopeConfig | None = None
    unturned_layers: tuple[int, ...] = ()
    sinks: bool = False
    whole_norms: bool = False
    norm_offset: float = 0.0
    attention_scale: float = 0.0
    soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    activation: GatedKind = "silu"
    joined_gate_up: bool = False
    latent: LatentConfig | None = None
    index: IndexConfig | None = None
    compression: CompressionConfig | None = None
    streams: StreamsConfig | None = None
    experts: ExpertsConfig | None = None
    linear: LinearAttentionConfig | None = None
    output_gate: bool = False
    ignored_weights: tuple[str, ...] = ()

    def rope_of(self, layer: int) -> RopeConfig:
        """The rotary embedding of a layer."""
        if layer in self.unturned_layers:
            return RopeConfig(kind="none")
        return self.sliding_rope if self.sliding_rope and layer in self.sliding_layers else self.rope

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with a dense MLP."""
        experts = () if self.experts is None else self.experts.layers
        return tuple(layer for layer in range(self.num_layers) if layer not in experts)

    @property
    def attending_layers(self) -> tuple[int, ...]:
        """Layers that cache what each token leaves."""
        linear = () if self.linear is None else self.linear.layers
        return tuple(layer for layer in range(self.num_layers) if layer not in linear)

    def by_expert(self) -> "ModelConfig":
        """The same with every expert whole on one rank; ValueError where the model has none."""
        if self.experts is None:
            raise ValueError(
                f"{self.architecture}: parallel.ep shares experts out, and the model has none; take it away"
            )
        return replace(self, experts=replace(self.experts, by_expert=True))

    def without(self, *patterns: str) -> "ModelConfig":
        """The same, with more that is left out of the checkpoint."""
        return replace(self, ignored_weights=(*self.ignored_weights, *patterns))
