"""Latent attention that expands the keys and values of prompts: the numbers of transformers at every chunk size, behind
prefixes and beside absorbed rows; and when it does not."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from equal_tokens import assert_greedy_equal
from model_checks import TOLERANCE, all_logprobs, greedy, run_all
from plan_maker import PlanMaker, Request, groups_of
from tiny_models import build, prompt_of, resolved, save, transformers_model

from tokenspeed.device.attention.backends.paged_mla import Backend
from tokenspeed.device.builder import POISON_VARIABLE, DeviceBuild
from tokenspeed.layers import latent_attention

KERNEL = "attention.mla_extend_expanded"
PROMPT = prompt_of(40)
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "deepseek_v3": ("deepseek_v3", {}),
    "without a compressed query": ("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": None}),
    "growing queries": ("mistral4", {}),
    "nothing rotated, states beside it": ("kimi_linear", {}),
}
LONG = ("without a compressed query",)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote reads as NaN."""
    monkeypatch.setenv(POISON_VARIABLE, "1")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in CASES]
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    family, changes = CASES[request.param]
    model = transformers_model(family, **changes)
    return model, save(model, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    model = transformers_model("deepseek_v3")
    return model, save(model, tmp_path_factory.mktemp("deepseek"))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The tokens that each form computed, of extending rows, in the first layer of a group."""
    seen: Counter[str] = Counter()
    methods = {"expanded": Backend.attend_expanded, "absorbed": Backend.attend_latent}
    for form, method in methods.items():

        def count(backend: Backend, place: int, *more: object, form: str = form, method: object = method) -> None:
            if place == 0:
                runs = [run for run in backend._runs if run.expanded == (form == "expanded")]
                seen[form] += sum(run.stop - run.start for run in runs)
            method(backend, place, *more)  # type: ignore[operator]

        monkeypatch.setattr(Backend, method.__name__, count)
    return seen


@contextmanager
def started(folder: Path, counted: Counter[str], **settings: str) -> Iterator[DeviceBuild]:
    """Built, warmed up and with nothing counted."""
    device = build(resolved(folder, chunk=256, **settings))
    counted.clear()
    try:
        yield device
    finally:
        device.handle.shutdown()


def expected_logprobs(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([PROMPT])).logits[0], dim=-1).numpy()


def test_every_chunk_size_gives_the_numbers_of_transformers(
    pair: tuple[torch.nn.Module, Path], counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expanded wherever there is a chunk, whatever it costs."""
    monkeypatch.setattr(latent_attention, "pairs_per_expansion", lambda latent: 1e-9)
    model, folder = pair
    expected = expected_logprobs(model)
    with started(folder, counted) as device:
        assert device.specs.kernels[KERNEL] == "cpu_attention_mla_extend_expanded"
        for chunk in (1, 2, 7, 16, 17, 33, 40):
            counted.clear()
            _, rows = all_logprobs(device, PROMPT, chunk)
            np.testing.assert_allclose(rows, expected, atol=TOLERANCE, rtol=TOLERANCE, err_msg=f"chunk {chunk}")
            assert counted == {"expanded": len(PROMPT), "absorbed": 0}


def generated(device: DeviceBuild, prompts: list[list[int]], count: int, chunk: int) -> list[list[int]]:
    requests = [
        Request(prompt=prompt, row=row, max_new_tokens=count, chunk=chunk)
        for row, prompt in enumerate(prompts, start=1)
    ]
    run_all(device, PlanMaker(16, groups_of(device.specs)), requests)
    return [request.output for request in requests]


@pytest.mark.parametrize("chunk", [5, 13, 64])
def test_expanded_rows_absorbed_rows_and_decodes_go_together(
    pair: tuple[torch.nn.Module, Path], counted: Counter[str], chunk: int
) -> None:
    """By the rule: first chunks are expanded, short ones behind a prefix not. Some prompts decode before others end."""
    model, folder = pair
    prompts = [PROMPT, prompt_of(3, 1), prompt_of(17, 2)]
    following, logits = greedy(model, PROMPT, 12)
    with started(folder, counted) as device:

        def generate(ids: list[int], count: int) -> list[int]:
            return generated(device, [ids, *prompts[1:]], count, chunk)[0]

        assert_greedy_equal(generate, PROMPT, following, logits[len(PROMPT) - 1 : -1].numpy(), margin=TOLERANCE)
    assert counted["expanded"] >= min(chunk, 40) + 3 + min(chunk, 17)
    assert counted["absorbed"] > 0 or chunk == 64


def test_a_chunk_behind_a_prefix_that_another_request_left(
    deepseek: tuple[torch.nn.Module, Path], counted: Counter[str]
) -> None:
    """Long enough, it is expanded, prefix and all; its first token, and those that decode, are the model's."""
    model, folder = deepseek
    prompt = prompt_of(32) + prompt_of(24, 5)
    following, logits = greedy(model, prompt, 8)
    with started(folder, counted) as device:

        def generate(ids: list[int], count: int) -> list[int]:
            maker = PlanMaker(16, groups_of(device.specs))
            first = Request(prompt=ids[:32], row=1, max_new_tokens=1)
            run_all(device, maker, [first])
            counted.clear()
            blocks = [list(held) for held in first.blocks]
            second = Request(prompt=ids, row=2, max_new_tokens=count, cached=32, blocks=blocks)
            run_all(device, maker, [second])
            return second.output

        assert_greedy_equal(generate, prompt, following, logits[len(prompt) - 1 : -1].numpy(), margin=TOLERANCE)
    assert counted == {"expanded": 24, "absorbed": 0}


def test_under_determinism_nothing_is_expanded(deepseek: tuple[torch.nn.Module, Path], counted: Counter[str]) -> None:
    """There a token's bits must not hang on its chunk."""
    _, folder = deepseek
    with started(folder, counted, enforce="determinism") as device:
        assert KERNEL not in device.specs.kernels
        _, whole = all_logprobs(device, PROMPT, 64)
        _, cut = all_logprobs(device, PROMPT, 7)
    np.testing.assert_array_equal(whole, cut)
    assert counted == {"absorbed": 2 * len(PROMPT)}


def test_latents_wider_than_half_their_heads_are_never_expanded(tmp_path: Path, counted: Counter[str]) -> None:
    """A latent of 32 for keys and values of 40 and 36: a pair would cost more than absorbed."""
    model = transformers_model("deepseek_v3", qk_nope_head_dim=40, v_head_dim=36)
    with started(save(model, tmp_path), counted) as device:
        assert KERNEL not in device.specs.kernels
        _, rows = all_logprobs(device, PROMPT, 64)
    np.testing.assert_allclose(rows, expected_logprobs(model), atol=TOLERANCE, rtol=TOLERANCE)
    assert counted == {"absorbed": len(PROMPT)}
