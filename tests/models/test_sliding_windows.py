"""Models whose layers have windows: two cache groups, blocks recycled behind the window, equal to transformers."""

from pathlib import Path

import pytest
import torch
from equal_tokens import assert_greedy_equal
from model_checks import TOLERANCE, check_prompt, greedy, run_all, step
from plan_maker import PlanMaker, Request, groups_of
from tiny_models import REFERENCE, build, prompt_of, resolved, save, transformers_model

from tokenspeed.device.builder import POISON_VARIABLE

WINDOW = 24
"""Not a multiple of the granularity, 16, so that a window begins within a block."""

NEW_TOKENS = 66
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
KINDS = {
    "alternating": ("qwen3", {"layer_types": ALTERNATING, "use_sliding_window": True}),
    "only-windows": ("qwen3", {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True}),
    "sinks": ("gpt_oss", {"layer_types": ALTERNATING}),
}


@pytest.fixture(scope="module", params=KINDS, ids=list(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    family, changes = KINDS[request.param]
    model = transformers_model(
        family, num_hidden_layers=3, sliding_window=WINDOW, attn_implementation="eager", **changes
    )
    return model, save(model, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote reads as NaN."""
    monkeypatch.setenv(POISON_VARIABLE, "1")


@pytest.mark.parametrize("kernels", [{}, REFERENCE], ids=["chosen", "reference"])
def test_logits_and_greedy_tokens_past_the_window(pair: tuple[torch.nn.Module, Path], kernels: dict[str, str]) -> None:
    """Prompts within and beyond the window, in chunks shorter and longer than it; tokens far past it."""
    model, folder = pair
    device = build(resolved(folder, kernels=kernels, max_len=160))
    try:
        kinds = {facts.kind for facts in device.specs.groups}
        assert kinds == ({"sliding_window"} if len(device.specs.groups) == 1 else {"full_history", "sliding_window"})
        for length, chunk in ((5, 64), (70, 64), (70, 7), (70, 33)):
            check_prompt(model, device, prompt_of(length), new_tokens=NEW_TOKENS, chunk=chunk)
    finally:
        device.handle.shutdown()


def test_a_prefix_hit_needs_the_last_window_only(pair: tuple[torch.nn.Module, Path]) -> None:
    """A second request starts in the middle of the first one's prompt: on all of its full history, but only on the
    blocks of the last window, the slots before them being null."""
    model, folder = pair
    device = build(resolved(folder, max_len=160))
    try:
        shared, groups = prompt_of(64), groups_of(device.specs)
        maker = PlanMaker(16, groups)
        first = Request(prompt=[*shared, 9, 8, 7], row=1, max_new_tokens=40, chunk=64)
        step(device, *maker.plan([first]), [first])
        assert first.computed == 64
        # The next token sees the positions from 64 - (WINDOW - 1) = 41 on, which begin in slot 2.
        held = [
            blocks if group.window == 0 else [0, 0, *blocks[2:]]
            for group, blocks in zip(groups, first.blocks, strict=True)
        ]
        second = Request(
            prompt=[*shared, 5, 6], row=2, max_new_tokens=40, cached=64, blocks=[list(blocks) for blocks in held]
        )
        run_all(device, maker, [first, second])
        for request in (first, second):
            tokens, logits = greedy(model, list(request.prompt), 40)

            def replay(ids: list[int], count: int) -> list[int]:
                again = Request(prompt=ids, row=3, max_new_tokens=count)
                run_all(device, maker, [again])
                return again.output

            if request.output != tokens:
                assert_greedy_equal(
                    replay, request.prompt, tokens, logits[len(request.prompt) - 1 : -1].numpy(), margin=TOLERANCE
                )
    finally:
        device.handle.shutdown()


def test_company_and_chunks_change_no_bit_while_blocks_are_recycled(pair: tuple[torch.nn.Module, Path]) -> None:
    _, folder = pair
    device = build(resolved(folder, max_len=160, chunk=128, enforce="determinism"))
    try:

        def outputs(chunk: int, together: bool) -> list[list[int]]:
            maker = PlanMaker(16, groups_of(device.specs))
            requests = [
                Request(prompt=prompt_of(length), row=row, max_new_tokens=50, chunk=chunk)
                for row, length in enumerate((40, 3, 64), start=1)
            ]
            for batch in [requests] if together else [[request] for request in requests]:
                run_all(device, maker, batch)
            windowed = [g for g, group in enumerate(groups_of(device.specs)) if group.window]
            for request in requests:
                assert all(request.blocks[group][0] == 0 for group in windowed), "nothing was recycled"
            return [request.output for request in requests]

        alone = outputs(64, together=False)
        assert outputs(64, together=True) == alone
        assert outputs(5, together=True) == alone
    finally:
        device.handle.shutdown()
