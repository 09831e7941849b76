"""What rows may ask for besides tokens, on the emulated device: the host's answers, without a hidden wait."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulated_builds import LLAMA, built, outputs
from emulated_streams import DEVICE
from numpy.typing import NDArray
from plan_maker import FakePlan, Request

from tokenspeed.device.builder import DeviceBuild
from tokenspeed.device.handle import Grammar, RowStart, StepResult, TokenMatcher
from tokenspeed.messages import SamplingParameters

Change = Callable[[RowStart], RowStart]


@pytest.fixture(scope="module")
def builds() -> Iterator[tuple[DeviceBuild, DeviceBuild]]:
    both = built(LLAMA, "cpu"), built(LLAMA, "npu")
    yield both
    for build in both:
        build.handle.shutdown()


class Starting:
    """A handle whose rows begin otherwise than their requests say."""

    def __init__(self, build: DeviceBuild, change: Change) -> None:
        self._build, self._change = build, change
        self.specs, self.handle = build.specs, self

    def execute(self, plan: FakePlan, starts: Sequence[RowStart]) -> Any:
        return self._build.handle.execute(plan, [self._change(start) for start in starts])  # type: ignore[arg-type]


def answers(
    build: DeviceBuild, sampling: Sequence[SamplingParameters], change: Change, overlap: int
) -> list[list[object]]:
    """Everything but the times that comes of rows with these parameters."""
    found: list[list[object]] = []

    def watch(_plan: FakePlan, result: StepResult) -> None:
        prompts = {place: [token.logprob for token in part.tokens] for place, part in result.prompt_logprobs.items()}
        pooled = {place: vector.tolist() for place, vector in result.pooled.items()}
        tops = [None if part is None else part.tolist() for part in (result.logprobs, result.top_ids)]
        found.append([result.tokens.tolist(), result.refused, result.complete, prompts, pooled, tops])

    batch = [
        Request(prompt=[5, 9, 9, 20 + row, 7], row=row, max_new_tokens=5, chunk=3, sampling=parameters)
        for row, parameters in enumerate(sampling, start=1)
    ]
    outputs(Starting(build, change), batch, overlap=overlap, watch=watch)  # type: ignore[arg-type]
    return found


def same_on_both(
    builds: tuple[DeviceBuild, DeviceBuild],
    *sampling: SamplingParameters,
    change: Change = lambda start: start,
) -> list[list[object]]:
    host, device = builds
    expected = answers(host, sampling, change, 0)
    with DEVICE.watching():
        found = answers(device, sampling, change, 1)  # each step is launched before the one ahead of it is finished
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[:3] == theirs[:3]
        for part, twin in zip(ours[3:], theirs[3:], strict=True):
            np.testing.assert_equal(_rounded(part), _rounded(twin))
    return found


def _rounded(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: _rounded(value) for key, value in part.items()}
    if isinstance(part, list):
        return [_rounded(value) for value in part]
    return round(part, 3) if isinstance(part, float) else part


def test_drawn_tokens_biases_and_least_lengths(builds: tuple[DeviceBuild, DeviceBuild]) -> None:
    found = same_on_both(
        builds,
        SamplingParameters(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, seed=7, choice=2),
        SamplingParameters(top_k=1, logit_bias={33: 100.0}),
        SamplingParameters(top_k=1, logit_bias={44: 100.0}, stop_token_ids=(44,), min_tokens=3),
    )
    drawn = [tokens for tokens, *_ in found]
    assert any(33 in tokens for tokens in drawn) and any(44 in tokens for tokens in drawn)


def test_penalties_count_on_the_device(builds: tuple[DeviceBuild, DeviceBuild]) -> None:
    favoured = {33: 50.0, 34: 49.0, 35: 48.0}
    found = same_on_both(
        builds,
        SamplingParameters(top_k=1, logit_bias=favoured, frequency_penalty=2.0, presence_penalty=1.5),
        SamplingParameters(top_k=1),
        SamplingParameters(top_k=1, logit_bias=favoured, repetition_penalty=1.5),
    )
    assert {33, 34, 35} <= {token for tokens, *_ in found for token in tokens}  # type: ignore[attr-defined]


def test_log_probabilities_of_prompts_and_tokens(builds: tuple[DeviceBuild, DeviceBuild]) -> None:
    found = same_on_both(
        builds,
        SamplingParameters(top_k=1, logprobs=3),
        SamplingParameters(top_k=1),
        SamplingParameters(top_k=1, logprobs=0, prompt_logprobs=2),
    )
    assert any(prompts for _, _, _, prompts, _, _ in found) and all(tops for *_, tops in found)


class EvenTokens(Grammar):
    """Even tokens may come, and nothing ends it."""

    def matcher(self) -> TokenMatcher:
        return _EvenMatcher()


class _EvenMatcher(TokenMatcher):
    may_end, error = False, ""

    def fill(self, mask: NDArray[np.int32]) -> None:
        mask[:] = 0x55555555

    def accept(self, token: int) -> None:
        assert token % 2 == 0


def test_masks_of_constraints(builds: tuple[DeviceBuild, DeviceBuild]) -> None:
    def change(start: RowStart) -> RowStart:
        return replace(start, grammar=EvenTokens()) if start.row > 1 else start

    found = same_on_both(builds, *[SamplingParameters(temperature=5.0, seed=seed) for seed in range(3)], change=change)
    drawn = [tokens for tokens, *_ in found if len(tokens) == 3]  # type: ignore[arg-type]
    assert any(tokens[0] % 2 for tokens in drawn)  # type: ignore[index]
    assert not any(token % 2 for tokens in drawn[-4:] for token in tokens[1:])  # type: ignore[index]


def test_pooled_prompts(builds: tuple[DeviceBuild, DeviceBuild]) -> None:
    kinds = {1: "mean", 2: None, 3: "last"}
    found = same_on_both(
        builds,
        *[SamplingParameters(top_k=1)] * 3,
        change=lambda start: replace(start, pooling=kinds[start.row]),
    )
    # Two chunks of a mean, and the last token of another prompt.
    assert sum(len(pooled) for *_, pooled, _ in found) == 3  # type: ignore[misc, arg-type]


def test_a_row_that_begins_again_goes_on_from_what_it_is_told(builds: tuple[DeviceBuild, DeviceBuild]) -> None:
    output = np.array([33, 34], np.int32)
    parameters = SamplingParameters(top_k=1, frequency_penalty=1.0)
    same_on_both(builds, parameters, change=lambda start: replace(start, output=output))
