"""Runs the device side on planned requests, and compares it with a transformers model: logits of a prompt, and the
greedy tokens that follow."""

from collections.abc import Sequence

import numpy as np
import torch
from equal_tokens import assert_greedy_equal
from plan_maker import FakePlan, PlanMaker, Request, collect, groups_of, run
from tiny_models import VOCABULARY

from tokenspeed.device.builder import DeviceBuild
from tokenspeed.device.handle import RowStart
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
    following, logits = greedy(model, prompt, new_tokens)
    expected = torch.log_softmax(logits, dim=-1).numpy()
    tokens, rows = all_logprobs(device, prompt, chunk)
    assert tokens[0] == following[0]
    np.testing.assert_allclose(rows, expected[: len(prompt)], atol=TOLERANCE, rtol=TOLERANCE)

    def generate(ids: list[int], count: int) -> list[int]:
        request = Request(prompt=ids, row=1, max_new_tokens=count, chunk=chunk)
        return run(device.handle, [request], granularity=16, groups=groups_of(device.specs))[0]

    assert_greedy_equal(generate, prompt, following, logits[len(prompt) - 1 : -1].numpy(), margin=TOLERANCE)


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """The model's next ``count`` tokens, and its logits [len(prompt) + count, VOCABULARY] after each token of all."""
    whole = prompt
    with torch.no_grad():
        for _ in range(count):
            whole = [*whole, int(model(torch.tensor([whole])).logits[0, -1].argmax())]
        return whole[len(prompt) :], model(torch.tensor([whole])).logits[0]


def run_all(device: DeviceBuild, maker: PlanMaker, requests: list[Request]) -> None:
    """Steps of all requests that are not done, until all are."""
    while active := [request for request in requests if not request.is_done]:
        step(device, *maker.plan(active), active)


def step(device: DeviceBuild, plan: FakePlan, starts: Sequence[RowStart], requests: list[Request]) -> None:
    """One planned step; no logit of it may be NaN."""
    result = device.handle.execute(plan, starts).result()  # type: ignore[arg-type]
    assert not result.nan.any()
    collect(plan, result, requests)


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
