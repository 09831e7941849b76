"""Engines over random llamas, in a process of their own, without HTTP."""

import json
import random
import time

from scripts.device_check.target import Target
from tokenspeed import LLM
from tokenspeed.recipes.resolved import ModelSource, ResolvedConfig, SchedulerSettings

_SHAPES: dict[str, dict[str, object]] = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "dtype": "bfloat16",
    },
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "dtype": "float32",
    },
}
"""Of Llama 3.1 8B, and of one for comparing tokens: in float32, where no two logits are nearly equal by accident."""


def random_llama(target: Target, shape: str, *, layers: int = 0) -> ResolvedConfig:
    """The configuration of an engine over a llama of ``shape`` ("8b" or "tiny"), with fewer ``layers`` where given."""
    values = dict(_SHAPES[shape]) | ({"num_hidden_layers": layers} if layers else {})
    config = json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **values})
    large = shape == "8b"
    return ResolvedConfig(
        name=f"random-llama-{shape}",
        served_name=f"random-llama-{shape}",
        device=target.kind,
        model=ModelSource(kind="random", random_config=config, seed=1),
        scheduler=SchedulerSettings(max_len=4096 if large else 512, max_seqs=64 if large else 4, chunk=2048),
    )


def prompt_of(length: int, vocabulary: int = 1024) -> list[int]:
    """Token ids that no cache has seen."""
    return [random.randrange(300, vocabulary) for _ in range(length)]


def greedy_tokens(config: ResolvedConfig, *, prompts: int, tokens: int) -> list[list[int]]:
    """What an engine of this configuration draws for a few prompts, always the same ones."""
    fixed = [[300 + (17 * i * (row + 1)) % 700 for i in range(24 + row)] for row in range(prompts)]
    with LLM(config) as llm:
        return [
            choices[0].token_ids for choices in llm.generate(fixed, max_tokens=tokens, ignore_eos=True, temperature=0)
        ]


def seconds_for(llm: LLM, *, rows: int, prompt: int, tokens: int) -> float:
    """Wall time of ``rows`` requests together, each of a new prompt and with exactly ``tokens`` tokens of answer."""
    prompts = [prompt_of(prompt) for _ in range(rows)]
    begin = time.perf_counter()
    answers = llm.generate(prompts, max_tokens=tokens, ignore_eos=True, temperature=0)
    taken = time.perf_counter() - begin
    short = [len(choices[0].token_ids) for choices in answers if len(choices[0].token_ids) != tokens]
    if short:
        raise RuntimeError(f"{tokens} tokens were asked for, {short[0]} came: {answers[0][0].finish_reason}")
    return taken
