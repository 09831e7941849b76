"""What a profile may ask for that this version of the engine does not have: ``run`` refuses it by name."""

from tokenspeed.recipes.model_config import ARCHITECTURES, named_architecture
from tokenspeed.recipes.schema import (
    HuggingFaceWeights,
    PackageWeights,
    Profile,
    RandomWeights,
    Recipe,
    RunKeys,
    Vendor,
    Weights,
)

RUNNABLE_FAMILIES = frozenset(ARCHITECTURES.values())
"""Those that config.json can be read of: there is a model for each (docs/models.md)."""

_DENSE_FORMATS = ("float32", "bfloat16", "float16", "gguf-f32", "gguf-f16", "gguf-bf16")
_BLOCK_FORMATS = ("gguf-q4_0", "gguf-q4_1", "gguf-q8_0")
# What converters call the mixtures of K blocks; each holds several of Q2_K to Q6_K.
_K_FORMATS = tuple(
    f"gguf-{name}"
    for name in ("q2_k", "q2_k_s", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")
)
CPU_GROWTH = {
    "int4": 4.5 / 4,
    "int8": 8.5 / 8,
    "fp8": 2.0,
    "mxfp4": 1.0,
    "fp4": 132 / 128,  # DeepSeek-V4's own: experts as mxfp4, the rest fp8 in whole blocks
    "nvfp4": 5.0 / 4.5,
    "awq": 5.0 / 4,
    "gptq": 16.0 / 4,  # with scattered columns; else as int4
}
"""Formats of safetensors that the CPU loads as blocks of its own (docs/weights.md), and how much weights grow at most.
"""
RUNNABLE_FORMATS = frozenset({"", *_DENSE_FORMATS, *_BLOCK_FORMATS, *_K_FORMATS, *CPU_GROWTH})


def missing_features(family: str, weights: Weights | None, vendor: Vendor, keys: RunKeys) -> list[str]:
    """Returns, in words, everything this configuration asks for that the engine does not have."""
    missing: list[str] = []
    if family not in RUNNABLE_FAMILIES:
        missing.append(f"model family {family}")
    weight_format = getattr(weights, "format", "")
    if weight_format not in RUNNABLE_FORMATS:
        missing.append(f"weight format {weight_format}")
    for name, words in (("dp", "data"), ("pp", "pipeline")):
        ranks = getattr(keys.parallel, name)
        if ranks > 1:
            missing.append(f"{words} parallelism (parallel.{name} = {ranks})")
    if keys.parallel.nodes > 1:
        missing.append(f"several nodes (parallel.nodes = {keys.parallel.nodes})")
    if keys.speculative is not None:
        missing.append(f"speculative decoding (speculative.method = {keys.speculative.method})")
    if keys.role != "fused":
        missing.append(f"a split role (role = {keys.role})")
    if keys.kv.dtype == "float8_e4m3" and vendor == "npu":
        missing.append("an 8-bit KV cache on an NPU (kv.dtype = float8_e4m3; set kv.dtype to auto)")
    if keys.kv.fraction is not None and vendor == "cpu":
        missing.append("a KV cache sized by a share of the CPU's memory (kv.fraction; set kv.bytes)")
    if keys.api.structured_output == "xgrammar":
        missing.append(
            "constraints compiled by xgrammar (api.structured_output = xgrammar; set it to llguidance, the default)"
        )
    return missing


def family_of(recipe: Recipe, profile: Profile) -> str:
    """The family that really runs: the recipe's, or for random weights the one their config names."""
    weights = profile.weights or recipe.weights
    if not isinstance(weights, RandomWeights):
        return recipe.family
    return named_architecture(weights.config) or str(weights.config.get("model_type", recipe.family))


def weights_bytes(weights: Weights) -> int:
    """Bytes on disk as the recipe states them; 0 where it does not know."""
    return 0 if isinstance(weights, RandomWeights) else weights.bytes


def describe_weights(weights: Weights) -> str:
    """One line for a person."""
    if isinstance(weights, PackageWeights):
        return f"{weights.member.rsplit('/', 1)[-1]} out of the Python package {weights.package}=={weights.version}"
    if isinstance(weights, HuggingFaceWeights):
        return f"{weights.repository} at revision {weights.revision}"
    if isinstance(weights, RandomWeights):
        return f"random (seed {weights.seed})" + (f": {weights.note}" if weights.note else "")
    return weights.path
