"""Bad words and budgets of reasoning on real engines: they hold, and what happens meanwhile changes no token."""

from typing import Any

import pytest
from control_plane import submit
from in_process_engine import Run, random_llama, run_requests

from tokenspeed.messages import BadWords, Constraint, SamplingParameters, Submit, ThinkingBudget
from tokenspeed.recipes.resolved import ResolvedConfig

END = 257
WORDS = ("ab", "cc", "bca", "caac")
LETTERS = {ord(letter): 60.0 for letter in "abc"}
"""Far above all others: the texts are of these, and full of the words where nothing forbids them."""
DIGITS = Constraint(kind="regex", text="[0-9]{30}", begin_after="</think>")


def config_of(*, overlap: int, blocks: int = 60, chunk: int = 64, host_blocks: int = 0) -> ResolvedConfig:
    return random_llama(overlap=overlap, blocks=blocks, chunk=chunk, host_blocks=host_blocks)


def asked(handle: int, length: int, words: tuple[str, ...] = (), **fields: Any) -> Submit:
    prompt = [(11 * i + 5 * handle) % 255 for i in range(length)]
    sampling = SamplingParameters(stop_token_ids=(END,), seed=handle, logit_bias=LETTERS)
    bad_words = BadWords(words=words) if words else None
    return submit(handle, prompt, 100, declared=False, sampling=sampling, bad_words=bad_words, **fields)


def thinking(tokens: int, *, is_open: bool = True) -> ThinkingBudget:
    return ThinkingBudget(tokens=tokens, opening="b", ends=("</think>",), closing="</think>", is_open=is_open)


REQUESTS = [
    asked(1, 5),
    asked(2, 40, WORDS),
    asked(3, 33, ("a", "b")),
    asked(4, 17, WORDS, thinking=thinking(23)),
    asked(5, 20, thinking=thinking(0)),
    asked(6, 9, thinking=thinking(40), constraint=DIGITS),
    asked(7, 25, ("a", "c"), thinking=thinking(11, is_open=False)),
]


def check(run: Run) -> None:
    texts = {one.handle: bytes(token for token in run.tokens[one.handle] if token < 256).decode() for one in REQUESTS}
    assert all(word in texts[1] for word in WORDS[:3])
    assert not [word for word in WORDS if word in texts[2]] and len(texts[2]) == 100
    assert set(texts[3]) == {"c"}
    assert texts[4].index("</think>") == 23 and not [word for word in WORDS if word in texts[4]]
    assert texts[5].startswith("</think>") and texts[5].count("</think>") == 1 and len(texts[5]) == 100
    assert texts[6][40:48] == "</think>" and texts[6][48:].isdigit() and len(texts[6]) == 78
    assert texts[7].startswith("b" * 12 + "</think>b"), "one opens, eleven are thought, then the answer"


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """The tokens of each request by itself."""
    tokens: dict[int, list[int]] = {}
    for request in REQUESTS:
        tokens |= run_requests(config_of(overlap=0), [request]).tokens
    return tokens


@pytest.mark.parametrize(("overlap", "chunk"), [(1, 9)])
def test_company_overlap_and_chunks_change_no_token(alone: dict[int, list[int]], overlap: int, chunk: int) -> None:
    run = run_requests(config_of(overlap=overlap, chunk=chunk), REQUESTS, [2] * 7)
    check(run)
    assert run.tokens == alone
    assert run.held == 0


@pytest.mark.parametrize(("overlap", "host_blocks"), [(0, 60), (1, 0)])
def test_retraction_changes_no_token(alone: dict[int, list[int]], overlap: int, host_blocks: int) -> None:
    run = run_requests(config_of(overlap=overlap, blocks=11, host_blocks=host_blocks), REQUESTS)
    assert run.counters.retractions > 0
    check(run)
    assert run.tokens == alone
    assert run.held == 0


def test_words_that_leave_nothing_of_a_constraint_are_one_requests_error() -> None:
    stuck = asked(8, 9, ("bc",), constraint=Constraint(kind="choice", text='["abc"]'))
    with pytest.raises(AssertionError, match="bad_words rule out every token that could come next"):
        run_requests(config_of(overlap=1), [stuck, REQUESTS[1]])
