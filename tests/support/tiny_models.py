"""Tiny random checkpoints made by transformers, and the device side built over one."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from tokenspeed.device.builder import DeviceBuild, build_device_side
from tokenspeed.layers.kernels import OPERATIONS
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed.recipes.resolved import KVConfig, ModelSource, ResolvedConfig, SchedulerSettings

VOCABULARY = 128
REFERENCE = dict.fromkeys(OPERATIONS, "reference")
"""For ``kernels``: the PyTorch reference of every operation."""

_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def transformers_model(family: str, **changes: object) -> torch.nn.Module:
    """A random float32 model of ``family`` ("llama" or "qwen3"), the same for the same arguments."""
    import transformers

    names = {"llama": ("LlamaConfig", "LlamaForCausalLM"), "qwen3": ("Qwen3Config", "Qwen3ForCausalLM")}[family]
    torch.manual_seed(7)
    model = getattr(transformers, names[1])(getattr(transformers, names[0])(**{**_BASE, **changes}))
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def save(model: torch.nn.Module, folder: Path) -> Path:
    """Saves as safetensors with its configuration; returns ``folder``."""
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def random_config(**changes: object) -> str:
    """An HF-style configuration for ``random`` weights, as JSON text."""
    return json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_BASE, **changes})


def resolved(
    source: ModelSource | Path,
    *,
    kernels: Mapping[str, str] | None = None,
    granularity: int = 16,
    max_seqs: int = 4,
    chunk: int = 64,
    max_len: int = 128,
    overlap: int = 1,
    kv_dtype: str = "auto",
    kv_bytes: int = 0,
    host_bytes: int = 0,
    enforce: str = "latency",
    activations: str = "auto",
) -> ResolvedConfig:
    """A configuration of test size for a checkpoint folder or a source."""
    model = ModelSource(kind="folder", path=str(source)) if isinstance(source, Path) else source
    return ResolvedConfig(
        name="tiny",
        served_name="tiny",
        model=model,
        threads=1,
        kv=KVConfig(dtype=kv_dtype, granularity=granularity, bytes=kv_bytes, host_bytes=host_bytes),
        scheduler=SchedulerSettings(max_len=max_len, max_seqs=max_seqs, chunk=chunk, overlap=overlap),
        kernels=dict(kernels or {}),
        enforce=enforce,
        activations=activations,
    )


def build(config: ResolvedConfig) -> DeviceBuild:
    """The device side of ``config``; the caller shuts its handle down."""
    return build_device_side(config, read_model_config(config.model), report=lambda phase, done, total, detail: None)
