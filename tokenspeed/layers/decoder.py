"""A decoder: embedding, layers over a residual stream, a last norm, logits for the rows that need them."""

from collections.abc import Sequence
from typing import Protocol

import torch

from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.batch import ForwardBatch, LayerCache
from tokenspeed.layers.communication import ALONE, Communication
from tokenspeed.layers.kernels import KernelBinder
from tokenspeed.layers.parts import ModelParts
from tokenspeed.layers.vocabulary import Vocabulary
from tokenspeed.layers.weights import LoadedWeights, Ranks, WeightSpec
from tokenspeed.layers.workspace import Workspace
from tokenspeed.recipes.model_config import ModelConfig
from tokenspeed_kernel.quantized import QuantizedTensor


class Mixer(Protocol):
    """What mixes a token with those before it: attention of some kind, or a state."""

    def bind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Gives the layer its part of the arena, one entry for each of its cache groups."""

    def forward(self, batch: ForwardBatch, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out`` float32 [T, H] of ``x`` float32 [T, H]."""


class FeedForward(Protocol):
    """What works on each token alone: an MLP or a mixture of experts."""

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out`` float32 [T, H] of ``x`` float32 [T, H]."""


def decoder_weights(config: ModelConfig, ranks: Ranks, layers: Sequence[WeightSpec]) -> tuple[WeightSpec, ...]:
    """Embedding, the ``layers``' weights, last norm and output head, in the order of the forward."""
    vocabulary, hidden = config.vocab_size, config.hidden_size
    specs = [ranks.vocabulary("model.embed_tokens.weight", vocabulary, hidden), *layers]
    specs.append(ranks.whole("model.norm.weight", hidden, offset=config.norm_offset))
    if not config.tie_word_embeddings:
        specs.append(ranks.vocabulary("lm_head.weight", vocabulary, hidden))
    return tuple(specs)


def norm_weights(config: ModelConfig, place: str, ranks: Ranks) -> tuple[WeightSpec, WeightSpec]:
    """The norms before the two blocks of the layer at ``place`` ("model.layers.0")."""
    return tuple(
        ranks.whole(f"{place}.{name}.weight", config.hidden_size, offset=config.norm_offset)
        for name in ("input_layernorm", "post_attention_layernorm")
    )  # type: ignore[return-value]


class DecoderLayer:
    """Two blocks, each behind an RMS norm, over the residual stream; ``norms``: what the checkpoint calls these."""

    def __init__(
        self,
        parts: ModelParts,
        place: str,
        mixer: Mixer,
        feed_forward: FeedForward,
        norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    ) -> None:
        self.mixer = mixer
        self._feed_forward = feed_forward
        self._eps = parts.config.rms_norm_eps
        self._input_norm, self._middle_norm = (parts.vector(f"{place}.{name}.weight") for name in norms)
        self._add_rms_norm = parts.kernels.fused_add_rms_norm()
        self._rms_norm = parts.kernels.rms_norm()

    def forward(
        self, batch: ForwardBatch, residual: torch.Tensor, hidden: torch.Tensor, normed: torch.Tensor, *, first: bool
    ) -> None:
        """Adds ``hidden`` of the layer before to ``residual`` (nothing in the ``first`` layer) and leaves its own."""
        if first:
            self._rms_norm(residual, self._input_norm, self._eps, normed)
        else:
            self._add_rms_norm(hidden, residual, self._input_norm, self._eps, normed)
        self.mixer.forward(batch, normed, hidden)
        self._add_rms_norm(hidden, residual, self._middle_norm, self._eps, normed)
        self._feed_forward.forward(normed, hidden)


class Decoder:
    """What every architecture's Model is: it says of which layers, and how each cache group attends.

    ``max_tokens`` bounds the tokens of a forward, ``max_logit_rows`` the rows of one ``logits`` call, ``max_positions``
    the length of a sequence. All buffers are float32 and are made once, where the weights lie. Of several ranks each
    has a Model of its own, over ``rank_dimensions`` and its shards; ``communication`` is with the others.

    Attributes:
        config: the dimensions, of this rank.
        workspace_bytes: of the buffers and tables.
    """

    def __init__(
        self,
        config: ModelConfig,
        loaded: LoadedWeights,
        kernels: KernelBinder,
        *,
        kv_dtype: torch.dtype,
        max_tokens: int,
        max_logit_rows: int,
        max_positions: int,
        communication: Communication = ALONE,
    ) -> None:
        device = loaded.device
        workspace = Workspace(device=device, max_tokens=max_tokens, kept=max_logit_rows)
        parts = ModelParts(config, loaded, kernels, workspace, kv_dtype, max_positions, communication)
        vocabulary = Vocabulary(
            kernels, communication, size=config.vocab_size, max_tokens=max_tokens, max_rows=max_logit_rows
        )
        hidden = config.hidden_size
        self.config = config
        self._eps = config.rms_norm_eps
        self._residual, self._hidden, self._normed = (
            workspace.rows(name, hidden) for name in ("residual", "hidden", "normed")
        )
        embedding = loaded.take("model.embed_tokens.weight")
        self._embed = vocabulary.embedding(embedding)
        self._embedding_scale: torch.Tensor | None = None
        if config.embedding_scale != 1.0:
            self._embedding_scale = _in_the_type_of(embedding, config.embedding_scale)
            self._scale_rows = kernels.scale_rows()
        self.layers = [self.make_layer(parts, index) for index in range(config.num_layers)]
        self._norm = parts.vector("model.norm.weight")
        self._add_rms_norm = kernels.fused_add_rms_norm()
        head = embedding if config.tie_word_embeddings else loaded.take("lm_head.weight")
        self._head = vocabulary.head(head)
        self._gathered = torch.zeros(max_logit_rows, hidden, device=device)
        self._logits = torch.zeros(max_logit_rows, config.vocab_size, device=device)
        workspace.make()
        held = (self._norm, self._gathered, self._logits)
        self.workspace_bytes = (
            workspace.nbytes + parts.table_bytes + vocabulary.nbytes + sum(buffer.nbytes for buffer in held)
        )

    def make_layer(self, parts: ModelParts, index: int) -> DecoderLayer:
        """Layer number ``index``."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its layers are")

    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """How each cache group attends, in the order of the groups."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it attends")

    def bind_cache(self, caches: Sequence[Sequence[LayerCache]]) -> None:
        """Gives each layer its parts of the arena; ``caches`` in the order of the layers."""
        for layer, own in zip(self.layers, caches, strict=True):
            layer.mixer.bind_cache(own)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Runs all layers and the last norm; returns float32 [T, H], a view that the next forward overwrites."""
        tokens = batch.input_ids.shape[0]
        residual, hidden, normed = self._residual(tokens), self._hidden(tokens), self._normed(tokens)
        self._embed(batch.input_ids, residual)
        if self._embedding_scale is not None:
            self._scale_rows(residual, self._embedding_scale, None, residual)
        first = True
        for layer in self.layers:
            layer.forward(batch, residual, hidden, normed, first=first)
            first = False
        self._add_rms_norm(hidden, residual, self._norm, self._eps, normed)
        return normed

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits float32 [S, V] of the tokens ``rows`` (int64 [S]) of ``hidden``; overwritten by the next call."""
        count = rows.shape[0]
        gathered, logits = self._gathered[:count], self._logits[:count]
        torch.index_select(hidden, 0, rows, out=gathered)
        self._head(gathered, logits)
        cap = self.config.logit_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def _in_the_type_of(embedding: QuantizedTensor, scale: float) -> torch.Tensor:
    """float32 [1]: ``scale`` as models of that type were trained with it, rounded as their embeddings are."""
    exact = torch.full((1,), scale, device=embedding.plane.device)
    return exact if embedding.is_blocked else exact.to(embedding.plane.dtype).float()
