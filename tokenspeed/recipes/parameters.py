"""How many weights a model's dimensions imply, and how ranks share them."""

from dataclasses import dataclass

from tokenspeed.recipes.dimensions import Compression, Dimensions


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Counts of weights by how ranks share them.

    Attributes:
        sharded: divided by tensor parallelism: projections of heads, dense MLPs, embedding and head.
        replicated: whole on every rank: norms, routers, compressed projections, the vision encoder.
        experts: divided by expert (or else tensor) parallelism.
    """

    sharded: int
    replicated: int
    experts: int

    @property
    def total(self) -> int:
        """Of the whole model."""
        return self.sharded + self.replicated + self.experts


def count_parameters(model: Dimensions) -> Parameters:
    """Counts the weights that the dimensions imply."""
    sharded, replicated = (sum(both) for both in zip(_attention(model), _linear_weights(model), strict=True))
    experts = model.experts
    dense_layers = model.layers - (experts.layers if experts else 0)
    sharded += dense_layers * 3 * model.hidden * model.intermediate
    sharded += (1 if model.tied else 2) * model.vocab * model.hidden
    replicated += (2 * model.layers + 1) * model.hidden
    if model.streams > 1:
        rows = 2 * model.layers * (2 + model.streams) + 1
        replicated += rows * model.streams * model.streams * model.hidden
        replicated += rows * model.streams + 2 * model.layers * 3 + 1  # what is added, and what scales it
    expert_count = 0
    if experts is not None:
        each = 3 * model.hidden * experts.intermediate
        sharded += experts.layers * experts.shared * each
        if experts.biases:
            each += 2 * experts.intermediate + model.hidden
        expert_count = experts.layers * experts.count * each
        replicated += experts.layers * experts.count * (model.hidden + experts.corrected + experts.biases)
        replicated += experts.layers * int(experts.shared_gate) * model.hidden
        replicated += experts.table_layers * (model.vocab * experts.active - experts.count * experts.corrected)
    if model.vision is not None:
        encoder = model.vision.parameters
        sharded, replicated = (
            (sharded + encoder, replicated) if model.vision.sharded else (sharded, replicated + encoder)
        )
    return Parameters(sharded=sharded, replicated=replicated, experts=expert_count)


def _linear_weights(model: Dimensions) -> tuple[int, int]:
    """(sharded, replicated) weights of all layers with a state."""
    linear = model.linear
    if linear is None:
        return 0, 0
    heads, keys = linear.value_heads, linear.value_heads * linear.key_dim
    sharded = model.hidden * (linear.channels + linear.values + heads) + linear.channels * linear.conv_width + heads
    if linear.channel_decay:  # decay and gate come through a rank of one head
        sharded += linear.key_dim * (keys + linear.values) + keys
        replicated = 2 * model.hidden * linear.key_dim + linear.value_dim
    else:
        sharded += model.hidden * (linear.values + heads) + heads
        replicated = linear.value_dim
    return linear.layers * sharded, linear.layers * replicated


def _attention(model: Dimensions) -> tuple[int, int]:
    """(sharded, replicated) weights of the attention of all layers that attend."""
    if model.compression is not None:
        return _compressed_attention(model, model.compression)
    layers = model.layers - (model.linear.layers if model.linear else 0)
    if model.latent is None:
        queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        sharded = model.hidden * ((3 if model.output_gate else 2) * queries + 2 * keys)
        if model.biases:
            sharded += queries + 2 * keys
        if model.sinks:
            sharded += model.heads
        replicated = model.hidden if model.output_bias else 0
        if model.whole_norms:
            sharded += queries + keys
        elif model.head_norms:
            replicated += 2 * model.head_dim
        return layers * sharded, layers * replicated
    latent = model.latent
    sharded = (latent.query_rank or model.hidden) * model.heads * (latent.plain + latent.rotary)
    sharded += latent.latent * model.heads * (latent.plain + latent.value) + model.heads * latent.value * model.hidden
    replicated = model.hidden * (latent.query_rank + latent.latent + latent.rotary) + latent.query_rank + latent.latent
    if model.index is not None:
        index = model.index
        each = latent.query_rank * index.heads * index.width + model.hidden * (index.width + index.heads)
        indexers = (index.layers or layers) * (each + 2 * index.width)
        return layers * sharded, layers * replicated + indexers
    return layers * sharded, layers * replicated


def _compressed_attention(model: Dimensions, compression: Compression) -> tuple[int, int]:
    width, hidden, query = model.head_dim, model.hidden, compression.query_rank
    heads, rank = model.heads * width, compression.output_rank
    sharded = heads * query + rank * heads + hidden * compression.output_groups * rank + model.heads
    replicated = model.layers * (hidden * (query + width) + query + width)
    replicated += compression.heavy_layers * (2 * width * (hidden + compression.heavy_rate // 2) + width)
    if model.index is not None:
        key, rate = model.index.width, compression.sparse_rate
        each = 2 * (width + key) * (2 * hidden + rate) + width + key
        replicated += compression.sparse_layers * (each + model.index.heads * (key * query + hidden))
    return model.layers * sharded, replicated
