"""Greedy tokens of the real default model equal those of transformers on the dequantised weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equal_tokens import assert_greedy_equal

from tokenspeed import LLM

PROMPTS = [
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n",
    "Zürich, Genève and Lugano are cities in",
    "<|im_start|>user\nWrite a haiku about the sea.<|im_end|>\n<|im_start|>assistant\n",
]
COUNT = 64
MARGIN = 5e-4
"""Logits this close may change places: the two add up the same float32 numbers in another order, over 30 layers."""


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(smollm2.parent), gguf_file=smollm2.name, dtype=torch.float32
    )
    model.generation_config.eos_token_id = None  # generates on, as ignore_eos does
    return model.eval()


def test_greedy_tokens_equal_transformers(smollm2: Path, reference: Any) -> None:
    ties = 0
    with LLM(str(smollm2), max_num_seqs=4, max_model_len=512, seed=1) as llm:

        def generate(tokens: list[int], count: int) -> list[int]:
            return llm.generate([tokens], max_tokens=count, temperature=0, ignore_eos=True)[0][0].token_ids

        for prompt in PROMPTS:
            ids = llm.generate(prompt, max_tokens=1)[0][0].prompt_token_ids
            with torch.inference_mode():
                out = reference.generate(
                    torch.tensor([ids]),
                    max_new_tokens=COUNT,
                    do_sample=False,
                    pad_token_id=0,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
            logits = torch.cat(out.logits).float().numpy().astype(np.float32)
            theirs = out.sequences[0, len(ids) :].tolist()
            ties += assert_greedy_equal(generate, ids, theirs, logits, MARGIN)
    print(f"{len(PROMPTS)} prompts x {COUNT} tokens equal, {ties} ties within {MARGIN}")
