"""Tokens do not depend on chunks, on what else is in the batch, on overlap, on a restart, or on unwritten memory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_maker import Request, run
from tiny_models import REFERENCE, VOCABULARY, build, random_config, resolved, save, transformers_model

from tokenspeed.device.builder import POISON_VARIABLE, DeviceBuild
from tokenspeed.device.handle import RowStart, StepResult
from tokenspeed.messages import SamplingParameters
from tokenspeed.recipes.resolved import ModelSource

GRANULARITY = 16
PROMPTS = [list(range(2, 45)), [9, 9, 9], [77], list(range(100, 70, -1))]
SAMPLINGS = [
    SamplingParameters(top_k=1),
    SamplingParameters(temperature=0.9, top_p=0.9, seed=3),
    SamplingParameters(temperature=1.3, top_k=20, min_p=0.02, seed=4, choice=1),
    SamplingParameters(top_k=1, frequency_penalty=0.8, presence_penalty=0.2, repetition_penalty=1.2),
]
COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(transformers_model("qwen3"), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module", params=[({}, "chosen"), (REFERENCE, "reference")], ids=lambda pair: pair[1])
def device(request: pytest.FixtureRequest, folder: Path) -> Iterator[DeviceBuild]:
    made = build(resolved(folder, kernels=request.param[0], chunk=128))
    yield made
    made.handle.shutdown()


def requests(*, chunk: int = 1 << 30) -> list[Request]:
    return [
        Request(prompt=prompt, row=row, max_new_tokens=COUNT, chunk=chunk, sampling=sampling)
        for row, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True), start=1)
    ]


@pytest.fixture(scope="module")
def alone(device: DeviceBuild) -> list[list[int]]:
    """Each request by itself, in one chunk, without overlap."""
    outputs = [run(device.handle, [request], granularity=GRANULARITY)[0] for request in requests()]
    assert all(len(output) == COUNT for output in outputs)
    assert len({tuple(output) for output in outputs}) == len(outputs)
    return outputs


@given(
    chunks=st.lists(st.integers(1, 50), min_size=4, max_size=4),
    joins=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    rows=st.permutations([1, 2, 3, 4]),
    overlap=st.integers(0, 1),
)
@settings(max_examples=12, deadline=None)
def test_any_batch_gives_the_same_tokens(
    device: DeviceBuild, alone: list[list[int]], chunks: list[int], joins: list[int], rows: list[int], overlap: int
) -> None:
    batch = requests()
    first = min(joins)
    starts = {}
    for request, chunk, row, start in zip(batch, chunks, rows, joins, strict=True):
        request.chunk, request.row, starts[row] = chunk, row, start - first
    outputs = run(
        device.handle,
        batch,
        granularity=GRANULARITY,
        overlap=overlap,
        join=lambda step, request: step >= starts[request.row],
    )
    assert outputs == alone


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_request_that_begins_again_goes_on_with_the_same_tokens(
    device: DeviceBuild, alone: list[list[int]], cut: int
) -> None:
    """After a retraction what was generated is prefilled with the prompt; positions and counts go on."""
    for request, expected in zip(requests(), alone, strict=True):
        again = Request(
            prompt=[*request.prompt, *expected[:cut]],
            row=2,
            max_new_tokens=COUNT - cut,
            chunk=7,
            sampling=request.sampling,
        )
        handle = Restarting(device, original=request.prompt, output=expected[:cut])
        assert run(handle, [again], granularity=GRANULARITY)[0] == expected[cut:]


class Restarting:
    """A handle that tells prompt and output apart in the row's start, as the engine does after a retraction."""

    def __init__(self, device: DeviceBuild, *, original: list[int], output: list[int]) -> None:
        self._handle, self._original, self._output = device.handle, original, output

    def execute(self, plan: object, starts: list[RowStart]) -> object:
        changed = [
            RowStart(
                handle=start.handle,
                row=start.row,
                sampling=start.sampling,
                prompt=np.array(self._original, np.int32),
                output=np.array(self._output, np.int32),
            )
            for start in starts
        ]
        return self._handle.execute(plan, changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernels", [{}, REFERENCE], ids=["chosen", "reference"])
def test_nothing_reads_what_was_not_written(
    folder: Path, kernels: dict[str, str], alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POISON_VARIABLE, "1")
    made = build(resolved(folder, kernels=kernels, chunk=128))
    try:
        assert run(made.handle, requests(chunk=9), granularity=GRANULARITY, overlap=1) == alone
    finally:
        made.handle.shutdown()


@pytest.mark.parametrize("granularity", [8, 32])
def test_granularity_does_not_change_tokens(folder: Path, granularity: int, alone: list[list[int]]) -> None:
    made = build(resolved(folder, granularity=granularity, chunk=128))
    try:
        assert run(made.handle, requests(chunk=13), granularity=granularity) == alone
    finally:
        made.handle.shutdown()


def test_the_determinism_objective_gives_equal_bits(folder: Path) -> None:
    """Kernels that promise row invariance: log-probabilities are equal to the last bit, however chunked and batched."""
    made = build(resolved(folder, chunk=128, enforce="determinism", kv_dtype="bfloat16"))
    try:
        seen = [logprob_bits(made, chunk, together) for chunk in (128, 5) for together in (False, True)]
    finally:
        made.handle.shutdown()
    assert all(bits == seen[0] for bits in seen)


def logprob_bits(device: DeviceBuild, chunk: int, together: bool) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}

    def watch(plan: object, result: StepResult) -> None:
        for place, row in enumerate(plan.row.tolist()):  # type: ignore[attr-defined]
            if result.tokens[place] >= 0:
                found.setdefault(row, []).append(result.logprobs[place].tobytes())

    batch = [
        Request(prompt=prompt, row=row, max_new_tokens=6, chunk=chunk, sampling=SamplingParameters(top_k=1, logprobs=0))
        for row, prompt in enumerate(PROMPTS, start=1)
    ]
    for part in [batch] if together else [[request] for request in batch]:
        run(device.handle, part, granularity=GRANULARITY, watch=watch)
    return found


def test_prompt_logprobs_do_not_depend_on_chunks(device: DeviceBuild) -> None:
    sampling = SamplingParameters(top_k=1, prompt_logprobs=2)
    seen: list[dict[int, tuple[int, list[int], float]]] = []
    for chunk in (64, 1, 7):
        found: dict[int, tuple[int, list[int], float]] = {}

        def watch(plan: object, result: StepResult, found: dict[int, tuple[int, list[int], float]] = found) -> None:
            for part in result.prompt_logprobs.values():
                for place, token in enumerate(part.tokens):
                    assert part.start + place not in found
                    found[part.start + place] = (token.token_id, token.top_ids, token.logprob)

        request = Request(prompt=PROMPTS[0], row=3, max_new_tokens=3, chunk=chunk, sampling=sampling)
        run(device.handle, [request], granularity=GRANULARITY, watch=watch)
        seen.append(found)
    for found in seen:
        assert sorted(found) == list(range(1, len(PROMPTS[0])))
        assert [found[place][0] for place in sorted(found)] == PROMPTS[0][1:]
        for place, (_, top_ids, logprob) in found.items():
            assert top_ids == seen[0][place][1]
            assert logprob == pytest.approx(seen[0][place][2], abs=1e-4)


def test_prompt_logprobs_of_several_rows_in_one_batch(device: DeviceBuild) -> None:
    """More prompt tokens than one slice of logits has rows, and each row's slice begins where its tokens do."""

    def taken(batch: list[Request]) -> dict[tuple[int, int], float]:
        found: dict[tuple[int, int], float] = {}

        def watch(plan: object, result: StepResult) -> None:
            for place, part in result.prompt_logprobs.items():
                row = int(plan.row[place])  # type: ignore[attr-defined]
                found.update({(row, part.start + i): token.logprob for i, token in enumerate(part.tokens)})

        run(device.handle, batch, granularity=GRANULARITY, watch=watch)
        return found

    def batch() -> list[Request]:
        sampling = SamplingParameters(top_k=1, prompt_logprobs=0)
        return [
            Request(prompt=prompt, row=row, max_new_tokens=1, sampling=sampling)
            for row, prompt in enumerate(PROMPTS, start=1)
        ]

    together = taken(batch())
    assert len(together) == sum(len(prompt) - 1 for prompt in PROMPTS)
    for request in batch():
        for key, logprob in taken([request]).items():
            assert together[key] == pytest.approx(logprob, abs=1e-4)


def test_prompt_logprobs_are_not_taken_again_after_a_restart(device: DeviceBuild) -> None:
    sampling = SamplingParameters(top_k=1, prompt_logprobs=0)
    request = Request(prompt=[*PROMPTS[0], 5], row=1, max_new_tokens=2, sampling=sampling)
    seen: list[int] = []
    run(
        Restarting(device, original=PROMPTS[0], output=[5]),
        [request],
        granularity=GRANULARITY,
        watch=lambda plan, result: seen.append(len(result.prompt_logprobs)),
    )
    assert seen == [0, 0]


def test_random_weights_are_the_same_for_the_same_seed() -> None:
    def tokens(seed: int, **changes: object) -> list[int]:
        source = ModelSource(kind="random", random_config=random_config(**changes), seed=seed)
        made = build(resolved(source))
        try:
            return run(made.handle, [Request(prompt=[5, 6], row=1, max_new_tokens=10)], granularity=GRANULARITY)[0]
        finally:
            made.handle.shutdown()

    assert tokens(1) == tokens(1) != tokens(2)
    assert all(0 <= token < VOCABULARY for token in tokens(1, dtype="bfloat16", attention_bias=True))


def test_a_report_follows_the_phases(folder: Path) -> None:
    from tokenspeed.device.builder import build_device_side
    from tokenspeed.recipes.model_config import read_model_config

    said: list[tuple[str, int, int]] = []
    config = resolved(folder)
    report: Callable[[str, int, int, str], None] = lambda phase, done, total, detail: said.append((phase, done, total))  # noqa: E731
    made = build_device_side(config, read_model_config(config.model), report=report)
    made.handle.shutdown()
    phases = [phase for phase, _, _ in said]
    assert list(dict.fromkeys(phases)) == ["load", "compile", "warm up"]
    assert all(0 <= done <= total for _, done, total in said)
    for phase in set(phases):
        last = [entry for entry in said if entry[0] == phase][-1]
        assert last[1] == last[2] > 0
