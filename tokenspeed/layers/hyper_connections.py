"""Layers over several residual streams (hyper-connections)."""

from collections.abc import Sequence

import torch

from tokenspeed.layers.batch import ForwardBatch
from tokenspeed.layers.decoder import DecoderLayer, Mixer
from tokenspeed.layers.experts import Mixture
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.weights import Ranks, WeightSpec
from tokenspeed.recipes.model_config import ModelConfig, StreamsConfig


def streams_of(config: ModelConfig) -> StreamsConfig:
    """The residual streams; ValueError where the model has one alone."""
    if config.streams is None:
        raise ValueError(f"{config.architecture}: the configuration has no hyper-connections")
    return config.streams


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

    def __init__(self, parts: ModelParts, place: str, mixer: Mixer, mixture: Mixture) -> None:
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
        self._mixture.forward(normed, hidden, batch.input_ids)
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
