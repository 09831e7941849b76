"""Compares the device side with a transformers model: logits of a prompt, and the greedy tokens that follow."""

import numpy as np
import torch
from equal_tokens import assert_greedy_equal
from plan_maker import Request, groups_of, run
from tiny_models import VOCABULARY

from tokenspeed.device.builder import DeviceBuild
from tokenspeed.messages import SamplingParameters

TOLERANCE = 1e-4
NEW_TOKENS = 24


def check_prompt(
    model: torch.nn.Module,
    device: DeviceBuild,
    prompt: list[int],
    *,
    new_tokens: int = NEW_TOKENS,
    chunk: int = 1 << 30,
) -> None:
    """Compares the prompt's log-probabilities and ``new_tokens`` greedy tokens; ``chunk`` tokens a prefill step."""
    whole = prompt
    with torch.no_grad():
        for _ in range(new_tokens):
            whole = [*whole, int(model(torch.tensor([whole])).logits[0, -1].argmax())]
        logits = model(torch.tensor([whole])).logits[0]
    expected = torch.log_softmax(logits, dim=-1).numpy()
    tokens, rows = all_logprobs(device, prompt, chunk)
    assert tokens[0] == whole[len(prompt)]
    np.testing.assert_allclose(rows, expected[: len(prompt)], atol=TOLERANCE, rtol=TOLERANCE)

    def generate(ids: list[int], count: int) -> list[int]:
        request = Request(prompt=ids, row=1, max_new_tokens=count, chunk=chunk)
        return run(device.handle, [request], granularity=16, groups=groups_of(device.specs))[0]

    targets = logits[len(prompt) - 1 : -1].numpy()
    assert_greedy_equal(generate, prompt, whole[len(prompt) :], targets, margin=TOLERANCE)


def all_logprobs(device: DeviceBuild, prompt: list[int], chunk: int) -> tuple[list[int], np.ndarray]:
    """The token after ``prompt``, and log-probabilities [len(prompt), VOCABULARY] after each of its tokens."""
    rows = np.full((len(prompt), VOCABULARY), np.nan, np.float32)

    def watch(plan: object, result: object) -> None:
        for part in result.prompt_logprobs.values():  # type: ignore[attr-defined]
            for place, token in enumerate(part.tokens):
                rows[part.start + place - 1, token.top_ids] = token.top_logprobs
        if result.top_logprobs is not None:  # type: ignore[attr-defined]
            rows[-1, result.top_ids[0]] = result.top_logprobs[0]  # type: ignore[attr-defined]

    sampling = SamplingParameters(top_k=1, logprobs=VOCABULARY, prompt_logprobs=VOCABULARY)
    request = Request(prompt=prompt, row=1, max_new_tokens=1, chunk=chunk, sampling=sampling)
    tokens = run(device.handle, [request], granularity=16, groups=groups_of(device.specs), watch=watch)[0]
    return tokens, rows
