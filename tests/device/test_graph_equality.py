"""Replays are equal to eager steps, bit for bit: architectures, sizes, padding, chunks and rows that begin again.

The recorder of torch's dispatcher stands for a device's graphs; every replay is followed by its eager twin and
compared, and the tokens and log-probabilities are those of an engine that captures nothing.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_checks import step
from plan_maker import PlanMaker, Request, groups_of
from sparse_models import CASES, COMPRESSED_CASES, compressed_model, sparse_model
from tiny_models import REFERENCE, build, prompt_of, resolved, save, transformers_model

from tokenspeed.device import builder
from tokenspeed.device.attention.backends import backend_class, backend_names
from tokenspeed.device.attention.paged_rows import Rows
from tokenspeed.device.builder import POISON_VARIABLE, DeviceBuild
from tokenspeed.device.graphs.check import CHECK_VARIABLE
from tokenspeed.device.graphs.decode import CapturedDecode
from tokenspeed.device.graphs.pieces import CapturedPrefill
from tokenspeed.device.handle import StepFailed
from tokenspeed.messages import SamplingParameters
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed.recipes.resolved import ResolvedConfig

FAMILIES = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "kimi_linear")
"""Grouped queries, experts, latents, windows with sinks, and states of both kinds beside attention."""

SPARSE = ("deepseek_v32", "all-kinds")
"""Attention that chooses what it reads, and over compressed entries."""

MAX_SEQS, CHUNK = 6, 256
LIMITS = {"max_examples": 6, "deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}

Output = list[tuple[list[int], list[float]]]


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    monkeypatch.setenv(POISON_VARIABLE, "1")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @lru_cache
    def of(family: str) -> Path:
        make = {**dict.fromkeys(CASES, sparse_model), **dict.fromkeys(COMPRESSED_CASES, compressed_model)}
        return save(make.get(family, transformers_model)(family), tmp_path_factory.mktemp(family))

    return of


def configuration(folder: Path, *, reference: bool = False, **scheduler: object) -> ResolvedConfig:
    config = resolved(
        folder,
        kernels=REFERENCE if reference else None,
        enforce="latency" if reference else "determinism",
        max_seqs=MAX_SEQS,
        chunk=CHUNK,
    )
    return config.model_copy(update={"scheduler": config.scheduler.model_copy(update=scheduler)})


def serve(device: DeviceBuild, lengths: list[tuple[int, int]], chunk: int, again: int) -> Output:
    """The tokens and their log-probabilities of a request of each (prompt, output), which begin one step apart; after
    ``again`` steps the first begins anew, in its row and with other blocks, as a retracted one does."""
    maker = PlanMaker(16, groups_of(device.specs))

    def request(row: int, prompt: int, count: int) -> Request:
        sampling = SamplingParameters(top_k=1, logprobs=1)
        return Request(prompt=prompt_of(prompt, row), row=row, max_new_tokens=count, chunk=chunk, sampling=sampling)

    waiting = [request(row, *length) for row, length in enumerate(lengths, start=1)]
    requests: list[Request] = []
    logprobs: dict[int, list[float]] = {}
    steps = 0
    while waiting or any(not one.is_done for one in requests):
        if waiting:
            requests.append(waiting.pop(0))
        if steps == again:
            requests[0] = request(1, *lengths[0])
            logprobs[1] = []
        active = [one for one in requests if not one.is_done]
        plan, starts = maker.plan(active)
        result = device.handle.execute(plan, starts).result()  # type: ignore[arg-type]
        assert not result.nan.any()
        for place, row in enumerate(plan.row.tolist()):
            if plan.samples[place]:
                one = next(one for one in active if one.row == row)
                one.output.append(int(result.tokens[place]))
                one.in_flight -= 1
                assert result.logprobs is not None
                logprobs.setdefault(row, []).append(float(result.logprobs[place]))
        steps += 1
    return [(one.output, logprobs[one.row]) for one in requests]


def served(config: ResolvedConfig, lengths: list[tuple[int, int]], chunk: int, again: int) -> Output:
    device = build(config)
    try:
        return serve(device, lengths, chunk, again)
    finally:
        device.handle.shutdown()


@settings(**LIMITS)  # type: ignore[arg-type]
@given(
    family=st.sampled_from(FAMILIES),
    sizes=st.sets(st.integers(1, MAX_SEQS)).map(sorted),
    prefills=st.sets(st.sampled_from([8, 16, 32, 48])).map(sorted),
    lengths=st.lists(st.tuples(st.integers(1, 45), st.integers(1, 9)), min_size=1, max_size=4),
    chunk=st.integers(5, 40),
    again=st.integers(1, 12),
)
def test_replays_equal_eager_steps(
    folder_of: Callable[[str], Path],
    family: str,
    sizes: list[int],
    prefills: list[int],
    lengths: list[tuple[int, int]],
    chunk: int,
    again: int,
) -> None:
    folder = folder_of(family)
    eager = served(configuration(folder, graphs="off"), lengths, chunk, again)
    config = configuration(folder, graphs="dispatch", capture_sizes=sizes, capture_prefill_tokens=prefills)
    assert served(config, lengths, chunk, again) == eager


@pytest.mark.long
def test_every_attention_backend_is_among_what_is_replayed(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[str] = set()

    def noting(name: str) -> object:
        used.add(name)
        return backend_class(name)

    monkeypatch.setattr(builder, "backend_class", noting)
    for family in (*FAMILIES, *SPARSE):
        build(configuration(folder_of(family), graphs="off")).handle.shutdown()
    assert used == set(backend_names())


@pytest.mark.long
@pytest.mark.parametrize("family", [*FAMILIES, *SPARSE])
def test_graphs_of_the_references_replay_as_they_were_captured(family: str, folder_of: Callable[[str], Path]) -> None:
    """Their tensor operations one by one. Products of PyTorch's round by the number of rows, so that tokens of another
    padding are not compared: each replay is, with its twin."""
    config = configuration(folder_of(family), reference=True, graphs="dispatch", capture_prefill_tokens=[16, 48])
    assert [len(tokens) for tokens, _ in served(config, [(21, 6), (3, 4), (30, 5)], 20, 3)] == [6, 4, 5]


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.long) for name in SPARSE])
def test_replays_of_sparse_attention_equal_eager_steps(family: str, folder_of: Callable[[str], Path]) -> None:
    folder, lengths = folder_of(family), [(45, 9), (3, 5), (30, 7)]
    eager = served(configuration(folder, graphs="off"), lengths, 20, 4)
    config = configuration(folder, graphs="dispatch", capture_prefill_tokens=[8, 32, 64])
    assert served(config, lengths, 20, 4) == eager


class Made:
    """What the builder made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decode: CapturedDecode | None = None
        self.prefill: CapturedPrefill | None = None
        made = self

        class Decode(CapturedDecode):
            def __init__(self, *arguments: object, **more: object) -> None:
                super().__init__(*arguments, **more)  # type: ignore[arg-type]
                made.decode = self

        class Prefill(CapturedPrefill):
            def __init__(self, *arguments: object, **more: object) -> None:
                super().__init__(*arguments, **more)  # type: ignore[arg-type]
                made.prefill = self

        monkeypatch.setattr(builder, "CapturedDecode", Decode)
        monkeypatch.setattr(builder, "CapturedPrefill", Prefill)


@pytest.mark.parametrize("family", ["llama", "kimi_linear"])
def test_everything_asked_for_is_captured_at_the_start_and_reported(
    family: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(monkeypatch)
    reported: list[tuple[str, int, int, str]] = []
    config = configuration(folder_of(family), graphs="dispatch", capture_sizes=[1, 4], capture_prefill_tokens=[8, 512])

    def report(phase: str, done: int, total: int, detail: str) -> None:
        reported.append((phase, done, total, detail))

    model = read_model_config(config.model)
    builder.build_device_side(config, model, report=report).handle.shutdown()
    assert made.decode is not None
    assert made.prefill is not None
    assert (made.decode.sizes, made.prefill.sizes) == ([1, 4], [8]), "512 tokens are more than a chunk"
    assert [line for line in reported if line[0] == "capture"] == [
        ("capture", 0, 3, "prefill of 8 tokens"),
        ("capture", 1, 3, "decode of 4 rows"),
        ("capture", 2, 3, "decode of 1 rows"),
        ("capture", 3, 3, "2 sizes of decodes, 1 of prefills"),
    ]


def failing(folder: Path, **scheduler: object) -> str:
    device = build(configuration(folder, graphs="dispatch", **scheduler))
    requests = [Request(prompt=prompt_of(9, row), row=row, max_new_tokens=4) for row in (1, 2, 3)]
    maker = PlanMaker(16, groups_of(device.specs))
    try:
        while True:
            step(device, *maker.plan(requests), requests)
    except StepFailed as error:
        return str(error)
    finally:
        device.handle.shutdown()


def test_metadata_that_is_made_anew_is_found(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Rows, "_views", lambda rows, count: (rows._pages[:count].clone(), rows._seq_lens[:count].clone())
    )

    def fill(self: Rows, bs: int, actual: int, rows: torch.Tensor, lens: torch.Tensor, table: torch.Tensor) -> None:
        self.count = bs
        self.pages = torch.zeros(bs, table.shape[1], dtype=torch.int32)
        self.lengths = torch.zeros(bs, dtype=torch.int32)
        self.pages[:actual], self.lengths[:actual] = table[rows], lens

    monkeypatch.setattr(Rows, "fill", fill)
    message = failing(folder_of("llama"), capture_sizes=[4])
    assert "differs from its eager twin in 3 rows, first at row 0" in message
    assert "read a tensor that is no longer the step's" in message
