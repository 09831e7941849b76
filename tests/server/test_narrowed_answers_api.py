"""Bad words and budgets of reasoning at every door: what reaches the engine, what is refused, and what usage says."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parsing_server import FORMATS, ParsingServer, parsing_server
from scripted_engine import MODEL

from tokenspeed.frontend.choice import Choice
from tokenspeed.frontend.parsing.parser import AnswerParser, Parsing
from tokenspeed.frontend.parsing.registry import REASONING_FORMATS, WholeFormat
from tokenspeed.frontend.tokenizer_bytes import SPECIAL_TOKENS, ByteTokenizer
from tokenspeed.grammar.budget import CompiledBudget
from tokenspeed.grammar.delay import free_mask
from tokenspeed.grammar.narrowed import NarrowedGrammar
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.messages import BadWords, RequestOutput, Submit, ThinkingBudget
from tokenspeed.server.thinking import reasoning_end, thinking_budget

USER = [{"role": "user", "content": "Hi"}]
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 99},
}
THINK = ThinkingBudget(tokens=7, opening="<think>", ends=("</think>",), closing="</think>")
TOOL = {"type": "function", "function": {"name": "f"}}


async def submitted(server: ParsingServer, path: str, **fields: Any) -> Submit:
    server.say("x")
    answer = await server.client.post(path, json={"model": MODEL, **DOORS[path], **fields})
    assert answer.status_code == 200, answer.text
    return server.stack.engine.submits[-1]


async def refused(server: ParsingServer, path: str, **fields: Any) -> tuple[int, str, str, str]:
    answer = await server.client.post(path, json={"model": MODEL, **DOORS[path], **fields})
    error = answer.json()["error"]
    return answer.status_code, error.get("code", ""), error.get("param", ""), error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_bad_words_reach_the_engine(path: str) -> None:
    async with parsing_server(*FORMATS) as server:
        sent = await submitted(server, path, bad_words=["zoo", "  cat", "cat", "two words", "\n"])
        assert sent.bad_words == BadWords(words=("\n", "cat", "two words", "zoo")), "each once, however it was given"
        assert (await submitted(server, path, bad_words=[])).bad_words is None
        for given_, param in (
            ([""], "bad_words[0]"),
            (["ok", "  "], "bad_words[1]"),
            (["x" * 129], "bad_words[0]"),
            (["x"] * 129, "bad_words"),
            ("cat", "bad_words"),
        ):
            status, code, where, message = await refused(server, path, bad_words=given_)
            assert (status, code, where) == (400, "invalid_value", param), message


async def test_choices_share_what_narrows_them() -> None:
    async with parsing_server(*FORMATS) as server:
        await submitted(server, "/v1/chat/completions", bad_words=["b"], thinking_token_budget=7, n=3)
        assert [(one.bad_words, one.thinking) for one in server.stack.engine.submits] == [
            (BadWords(words=("b",)), THINK)
        ] * 3


async def test_the_budget_by_each_doors_own_name() -> None:
    async with parsing_server(*FORMATS) as server:
        for path, fields in (
            ("/v1/chat/completions", {"thinking_token_budget": 7}),
            ("/v1/responses", {"thinking_token_budget": 7}),
            ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 7}}),
        ):
            assert (await submitted(server, path, **fields)).thinking == THINK
            assert (await submitted(server, path)).thinking is None
        off = await submitted(server, "/v1/chat/completions", thinking_token_budget=0, reasoning_effort="none")
        assert off.thinking is None, "there is no reasoning"
        off = await submitted(server, "/v1/messages", thinking={"type": "disabled", "budget_tokens": 9})
        assert off.thinking is None
        status, code, param, message = await refused(server, "/v1/completions", thinking_token_budget=7)
        assert (status, code, param) == (400, "unsupported_field", "thinking_token_budget") and "chat" in message


async def test_calls_that_end_reasoning_end_its_budget() -> None:
    async with parsing_server("kimi_k2", "kimi_k2", "thinking") as server:
        sent = await submitted(server, "/v1/chat/completions", thinking_token_budget=7, tools=[TOOL])
        assert sent.thinking is not None and sent.thinking.ends == ("</think>", "<|tool_calls_section_begin|>")
        sent = await submitted(server, "/v1/chat/completions", thinking_token_budget=7)
        assert sent.thinking is not None and sent.thinking.ends == ("</think>",)


async def test_a_model_whose_reasoning_nobody_knows() -> None:
    async with parsing_server("hermes", "", "") as server:
        for path in ("/v1/chat/completions", "/v1/responses"):
            status, code, param, message = await refused(server, path, thinking_token_budget=7)
            assert (status, code, param) == (400, "unsupported_field", "thinking_token_budget")
            assert "--reasoning-format" in message
        sent = await submitted(server, "/v1/messages", thinking={"type": "enabled", "budget_tokens": 7})
        assert sent.thinking is None
        page = (await server.client.get("/metrics")).text
        assert 'tokenspeed_ignored_fields_total{field="thinking.budget_tokens"} 1.0' in page


async def test_a_stop_token_that_would_end_the_closing_text() -> None:
    async with parsing_server(*FORMATS) as server:
        status, code, param, message = await refused(
            server, "/v1/chat/completions", thinking_token_budget=7, stop_token_ids=[ord("/")]
        )
        assert (status, code, param) == (400, "invalid_value", "stop_token_ids") and "47" in message


# What usage says, for every format.


def budget_of(name: str, tokens: int, prompt_end: str, tokenizer: ByteTokenizer) -> tuple[ThinkingBudget, Parsing]:
    parsing = Parsing(reasoning_format=name, prompt_end=prompt_end)
    begin_after, opening = reasoning_end(name, prompt_end, variables={}, switch="", continues=False)
    found = thinking_budget(
        tokens,
        parsing=parsing,
        begin_after=begin_after,
        opening=opening,
        stop_token_ids=(),
        tokenizer=tokenizer,
    )
    assert found is not None
    return found, parsing


@pytest.mark.parametrize(
    ("name", "prompt_end", "is_open"),
    [
        ("gpt_oss", "<|channel|>analysis<|message|>So.<|end|><|start|>assistant", False),
        ("gpt_oss", "<|start|>assistant<|channel|>analysis<|message|>So", True),
        ("kimi_k3", "<|open|>think<|sep|>", True),
        ("kimi_k3", "<|open|>think<|sep|>So.<|close|>think<|sep|><|open|>response<|sep|>", False),
        ("inkling", "<|message_model|>", False),
    ],
)
def test_what_the_prompt_opened(name: str, prompt_end: str, is_open: bool) -> None:
    assert budget_of(name, 5, prompt_end, ByteTokenizer())[0].is_open is is_open


@pytest.mark.parametrize("name", sorted({known: name for name, known in REASONING_FORMATS.items()}.values()))
@given(
    tokens=st.integers(0, 9),
    is_open=st.booleans(),
    marks=st.lists(st.sampled_from(["ab", "mark", "closing", "opening"])),
)
def test_usage_agrees_with_the_budget(name: str, tokens: int, is_open: bool, marks: list[str]) -> None:
    """A choice that says what it likes, as far as the budget lets it, told apart by the format's own parser."""
    known = REASONING_FORMATS[name]
    markers = known.markers if isinstance(known, WholeFormat) else (known.opening, known.closing)
    tokenizer = ByteTokenizer(300, (*SPECIAL_TOKENS, *(one for one in markers if one not in SPECIAL_TOKENS)))
    rule, parsing = budget_of(name, tokens, known.opening if is_open else "x", tokenizer)
    said = {"ab": "ab", "mark": markers[-1], "closing": rule.closing, "opening": rule.opening}
    text = [token for one in ["opening", *marks] for token in tokenizer.encode(said[one], False)] + [*b"thought" * 9]
    vocabulary = Vocabulary(
        tokens=[tokenizer.token_bytes(token) for token in range(300)],
        special=tokenizer.special_ids,
        ends=(257,),
        encode=lambda part: tokenizer.encode(part, False),
    )
    free = free_mask(300, (257,))
    matcher = NarrowedGrammar(None, None, CompiledBudget(rule, vocabulary, free)).matcher()
    choice = Choice(
        0, tokenizer, stop=(), min_tokens=0, include_stop=False, skip_special_tokens=True,
        parser=AnswerParser(parsing), shown=parsing.marker_ids(tokenizer),
    )  # fmt: skip
    mask = np.zeros_like(free)
    blocks = int(is_open)
    generated: list[int] = []
    for token in text:
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        generated.append(token if token in allowed else allowed[0])
        matcher.accept(generated[-1])
        choice.push(RequestOutput(handle=1, token_ids=[generated[-1]]))
    whole = b"".join(map(tokenizer.token_bytes, generated)).decode()
    blocks += whole.count(rule.opening)
    closing = len(tokenizer.encode(rule.closing, False))
    assert choice.reasoning_tokens <= tokens + blocks * (1 + closing)
    if tokens == 0 and is_open:
        assert whole.startswith(rule.closing)
