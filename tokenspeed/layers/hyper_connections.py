"""Layers over several residual streams (hyper-connections), and the experts of DeepSeek-V4 behind them."""

from collections.abc import Sequence

import torch

from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.layers.decoder import DecoderLayer, Mixer
from tokenspeed.layers.experts import ExpertNames, experts_weights
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ExpertsConfig, ModelConfig, StreamsConfig
from tokenspeed_kernel.ops.activation import GatedActivation
from tokenspeed_kernel.ops.moe import Routing

NAMES = ExpertNames(gate="w1", up="w3", down="w2", correction="gate.bias")


def streams_of(config: ModelConfig) -> StreamsConfig:
    """The residual streams; ValueError where the model has one alone."""
    if config.streams is None:
        raise ValueError(f"{config.architecture}: the configuration has no hyper-connections")
    return config.streams


def experts_of(config: ModelConfig) -> ExpertsConfig:
    """The experts; ValueError where the model has none."""
    if config.experts is None:
        raise ValueError(f"{config.architecture}: the configuration has no experts")
    return config.experts


def stream_weights(config: ModelConfig, place: str, ranks: Ranks) -> list[WeightSpec]:
    """What mixes the streams before either block of the layer at ``place``."""
    count = streams_of(config).count
    return [
        spec
        for block in ("attn", "ffn")
        for spec in _mixing(f"{place}.hc_{block}_", (2 + count) * count, count * config.hidden_size, 3, ranks)
    ]


def head_weights(config: ModelConfig, ranks: Ranks) -> list[WeightSpec]:
    """What makes one of the streams at last."""
    count = streams_of(config).count
    return _mixing("model.hc_head.hc_", count, count * config.hidden_size, 1, ranks)


def _mixing(prefix: str, rows: int, columns: int, scales: int, ranks: Ranks) -> list[WeightSpec]:
    return [
        ranks.whole(f"{prefix}fn", rows, columns, is_float=True),
        ranks.whole(f"{prefix}base", rows),
        ranks.whole(f"{prefix}scale", scales),
    ]


def mixture_weights(config: ModelConfig, layer: int, place: str, ranks: Ranks) -> list[WeightSpec]:
    """Router, experts and shared expert at ``place``; where experts are looked up, the table in the correction's
    place."""
    experts, hidden = experts_of(config), config.hidden_size
    looked_up = layer in experts.table_layers
    specs = [
        spec
        for spec in experts_weights(experts, place, hidden, ranks, NAMES)
        if not (looked_up and spec.name.endswith(NAMES.correction)) and f".{NAMES.shared}." not in spec.name
    ]
    if looked_up:
        specs.append(ranks.whole(f"{place}.gate.tid2eid", config.vocab_size, experts.active, below=experts.count))
    shared, inner = f"{place}.{NAMES.shared}", experts.shared_intermediate
    return [
        *specs,
        ranks.rows(f"{shared}.w1.weight", inner, hidden),
        ranks.rows(f"{shared}.w3.weight", inner, hidden),
        ranks.columns(f"{shared}.w2.weight", hidden, inner),
    ]


class ClampedMixture:
    """Experts and a shared one, whose gate and up are clamped; chosen by the router, or looked up by the token's id."""

    def __init__(self, parts: ModelParts, layer: int, place: str) -> None:
        kernels, workspace, experts = parts.kernels, parts.workspace, experts_of(parts.config)
        matrices, shared = parts.weights.matrices, f"{place}.{NAMES.shared}"
        self._limit, self._scale = experts.limit, experts.scale
        # Which experts a token goes to must not hang on the rounding of the router's inputs.
        self._score = kernels.linear(matrices[f"{place}.gate.weight"], None, exact=True)
        self._table: torch.Tensor | None = None
        if layer in experts.table_layers:
            self._table = parts.vector(f"{place}.gate.tid2eid")
            self._route = kernels.table_route()
        else:
            routing = Routing(
                experts=experts.count,
                top_k=experts.active,
                scoring=experts.scoring,
                corrected=True,
                renormalise=experts.renormalise,
                scale=experts.scale,
            )
            self._route = kernels.route(routing, parts.vector(f"{place}.{NAMES.correction}"))
        activation = GatedActivation("clamped_silu", limit=experts.limit)
        self._experts = kernels.experts(
            matrices[f"{place}.experts.gate_up"], matrices[f"{place}.experts.down"], None, None, activation
        )
        inner = experts.shared_intermediate
        self._gate_up = parts.stacked([f"{shared}.w1", f"{shared}.w3"]).forward
        self._down = parts.linear(f"{shared}.w2", "columns")
        self._activate, self._add = kernels.clamped_silu(), kernels.add()
        self._logits = workspace.rows("router", experts.count)
        self._weights = workspace.rows("expert_weights", experts.active)
        self._ids = workspace.integers("expert_ids", experts.active)
        self._both = workspace.stacked("gate_up", ((inner,), (inner,)))
        self._activated = workspace.rows("activated", inner)
        self._shared_out = workspace.rows("shared", parts.config.hidden_size)

    def forward(self, tokens: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out`` float32 [T, H] of ``x`` float32 [T, H], of the tokens int32 [T]."""
        count = x.shape[0]
        logits, ids, weights = self._logits(count), self._ids(count), self._weights(count)
        self._score(x, logits)
        if self._table is None:
            self._route(logits, ids, weights)
        else:
            self._route(logits, tokens, self._table, self._scale, ids, weights)
        self._experts(x, ids, weights, out)
        gate, up = self._gate_up(x, self._both(count))
        activated, shared = self._activated(count), self._shared_out(count)
        self._activate(gate, up, self._limit, activated)
        self._down(activated, shared)
        self._add(shared, out)


class StreamMixer:
    """Makes a block's input of the streams, and the streams of its output."""

    def __init__(self, parts: ModelParts, prefix: str) -> None:
        streams, kernels, workspace = streams_of(parts.config), parts.kernels, parts.workspace
        count, self._rounds, self._floor = streams.count, streams.rounds, streams.floor
        self._eps = parts.config.rms_norm_eps
        self._weights = tuple(parts.vector(f"{prefix}{name}") for name in ("fn", "base", "scale"))
        self._mix, self._spread = kernels.hyper("mix", streams=count), kernels.hyper("spread", streams=count)
        self._post = workspace.rows("stream_post", count)
        self._comb = workspace.rows("stream_comb", count, count)

    def gather(self, streams: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out`` float32 [T, H], the block's input."""
        post, comb = self._post(streams.shape[0]), self._comb(streams.shape[0])
        self._mix(streams, *self._weights, self._eps, self._floor, self._rounds, post, comb, out)

    def spread(self, x: torch.Tensor, streams: torch.Tensor) -> None:
        """Puts the block's output ``x`` into the streams, mixed as ``gather`` found before."""
        self._spread(x, self._post(x.shape[0]), self._comb(x.shape[0]), streams)


class HyperLayer(DecoderLayer):
    """Two blocks, each behind an RMS norm, over the residual streams float32 [T, N, H]."""

    def __init__(self, parts: ModelParts, place: str, mixer: Mixer, mixture: ClampedMixture) -> None:
        self.mixer = mixer
        self._mixture = mixture
        self._eps = parts.config.rms_norm_eps
        self._input_norm, self._middle_norm = (parts.vector(f"{place}.{name}_norm.weight") for name in ("attn", "ffn"))
        self._rms_norm = parts.kernels.rms_norm()
        self._before, self._between = (StreamMixer(parts, f"{place}.hc_{name}_") for name in ("attn", "ffn"))

    def forward(
        self,
        batch: ForwardBatch,
        residual: torch.Tensor,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        *,
        first: bool,  # noqa: ARG002 - of layers over one stream
    ) -> None:
        """Works on the streams ``residual``; ``hidden`` and ``normed`` are room."""
        self._before.gather(residual, hidden)
        self._rms_norm(hidden, self._input_norm, self._eps, normed)
        self.mixer.forward(batch, normed, hidden)
        self._before.spread(hidden, residual)
        self._between.gather(residual, hidden)
        self._rms_norm(hidden, self._middle_norm, self._eps, normed)
        self._mixture.forward(batch.input_ids, normed, hidden)
        self._between.spread(hidden, residual)


class StreamEnds:
    """Several streams of one, and one of several."""

    def __init__(self, parts: ModelParts) -> None:
        streams = streams_of(parts.config)
        self._begin = parts.kernels.hyper("begin", streams=streams.count)
        self._eps, self._floor = parts.config.rms_norm_eps, streams.floor
        self._weights: Sequence[torch.Tensor] = [
            parts.vector(f"model.hc_head.hc_{name}") for name in ("fn", "base", "scale")
        ]
        self._collapse = parts.kernels.hyper("collapse", streams=streams.count)

    def begin(self, x: torch.Tensor, streams: torch.Tensor) -> None:
        """Writes ``streams`` float32 [T, N, H] of ``x`` float32 [T, H]."""
        self._begin(x, streams)

    def collapse(self, streams: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out`` float32 [T, H]."""
        self._collapse(streams, *self._weights, self._eps, self._floor, out)
