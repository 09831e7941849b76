"""One file for each architecture, all exposing the same in the same order: cache_groups, weights, Model.

``Model`` is made of the loaded weights and has attention_specs, bind_cache, forward and logits; see
docs/adding-a-model.md.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

import torch

from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.batch import ForwardBatch, LayerCache
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.communication import ALONE, Communication
from tokenspeed.layers.kernels import KernelBinder
from tokenspeed.layers.weights import LoadedWeights, WeightSpec
from tokenspeed.recipes.model_config import CheckpointError, ModelConfig

MODELS = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "ernie4_5_moe",
    "gemma2",
    "gemma3",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "kimi_k25",
    "kimi_linear",
    "llama",
    "minimax_m2",
    "mistral",
    "mistral4",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
)
"""Architectures; each is a file of this folder."""


class Model(Protocol):
    """A model ready to run; see tokenspeed/layers/decoder.py for what the methods promise."""

    workspace_bytes: int

    def attention_specs(self) -> tuple[AttentionSpec, ...]: ...
    def bind_cache(self, caches: Sequence[Sequence[LayerCache]]) -> None: ...
    def forward(self, batch: ForwardBatch) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor: ...


class ModelConstructor(Protocol):
    """How a model is made of its weights."""

    def __call__(
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
    ) -> Model: ...


class Architecture(Protocol):
    """What a model file exposes."""

    @property
    def Model(self) -> ModelConstructor: ...  # noqa: N802 - the name of the class in the file
    def cache_groups(self, config: ModelConfig, *, granularity: int) -> tuple[CacheGroupSpec, ...]: ...
    def weights(self, config: ModelConfig, *, rank: int, world: int) -> tuple[WeightSpec, ...]: ...


def architecture(name: str) -> Architecture:
    """The file of architecture ``name``; CheckpointError where there is none."""
    if name not in MODELS:
        raise CheckpointError(f"architecture {name!r} is not supported; supported are {', '.join(MODELS)}")
    return cast(Architecture, import_module(f"tokenspeed.models.{name}"))
