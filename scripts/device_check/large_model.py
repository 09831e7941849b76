"""A random llama of the shape of one with 8 billion parameters, end to end: prompts and decode against the roofline."""

import time

import torch

from scripts.device_check.engines import random_llama, seconds_for
from scripts.device_check.results import Figure, PartResult
from scripts.device_check.target import Target
from tokenspeed import LLM
from tokenspeed.recipes.model_config import ModelConfig, read_model_config

WHOLE_LAYERS, FEW_LAYERS = 32, 8
WHOLE_PARAMETERS = 8.0e9

BESIDE_SECONDS = 75.0
"""For starting an engine whose weights are there, and for measuring."""


def layers_within(seconds: float) -> int:
    """WHOLE_LAYERS where so many random weights can be drawn in time, which one core does; else FEW_LAYERS."""
    sample = 1 << 22
    begin = time.perf_counter()
    torch.randn(sample, generator=torch.Generator().manual_seed(0)).mul_(0.5).bfloat16()
    drawing = (time.perf_counter() - begin) * WHOLE_PARAMETERS / sample
    return WHOLE_LAYERS if drawing + BESIDE_SECONDS <= seconds else FEW_LAYERS


def parameters_of(model: ModelConfig) -> int:
    """Those that a token is multiplied by: the layers' matrices and the head."""
    attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim * model.hidden_size
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    return model.num_layers * layer + model.vocab_size * model.hidden_size


def run(target: Target, ceilings: dict[str, float], seconds: float) -> PartResult:
    """Tokens a second of one long prompt, and of decoding 1, 8 and 32 rows; ``ceilings`` are the bandwidth part's."""
    result = PartResult("large model")
    full = target.sizes == "full"
    layers = layers_within(seconds) if full else 0
    config = random_llama(target, "8b" if full else "tiny", layers=layers)
    model = read_model_config(config.model)
    parameters = parameters_of(model)
    prompt, answer = (2048, 65) if full else (128, 9)
    name = f"llama of {parameters / 1e9:.2g}B in {model.num_layers} layers, {model.dtype}"
    with LLM(config) as llm:
        seconds_for(llm, rows=1, prompt=prompt, tokens=2)
        first = min(seconds_for(llm, rows=1, prompt=prompt, tokens=1) for _ in range(2))
        reached = prompt / first
        share = 2.0 * parameters * reached / ceilings["products"] if "products" in ceilings else None
        result.figures.append(Figure(f"{name}: prompt of {prompt}", reached, "tokens/s", share, "product ceiling"))
        for rows in (1, 8, 32) if full else (1, 2):
            short, long = (seconds_for(llm, rows=rows, prompt=32, tokens=tokens) for tokens in (1, answer))
            step = max(long - short, 1e-9) / (answer - 1)
            share = 2.0 * parameters / step / ceilings["copy"] if "copy" in ceilings else None
            what = f"{name}: decode, {rows} rows"
            result.figures.append(
                Figure(what, rows / step, "tokens/s", share, "reading the weights at the copy ceiling")
            )
    result.checks.append(f"{name}: every request had as many tokens as it asked for")
    return result.settle()
