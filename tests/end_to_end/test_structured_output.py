"""Structured output on real engines: from the request to the last token, whatever happens in between."""

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from control_plane import submit
from in_process_engine import Run, random_llama, run_requests
from running_server import RunningServer

from tokenspeed.messages import Constraint, SamplingParameters, Submit
from tokenspeed.recipes.resolved import ResolvedConfig

END = 257

SCHEMA: dict[str, Any] = {
    "x-guidance": {"whitespace_pattern": " ?"},
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 5},
        "kind": {"enum": ["small", "large"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
JSON = Constraint(kind="json_schema", text=json.dumps(SCHEMA))
PHONE = Constraint(kind="regex", text="[0-9]{3}-[0-9]{4}( or [0-9]{3}-[0-9]{4}){3}")


def config_of(*, overlap: int, blocks: int = 60, chunk: int = 64, host_blocks: int = 0) -> ResolvedConfig:
    return random_llama(overlap=overlap, blocks=blocks, chunk=chunk, host_blocks=host_blocks)


def asked(handle: int, length: int, constraint: Constraint | None, **sampling: Any) -> Submit:
    prompt = [(11 * i + 5 * handle) % 255 for i in range(length)]
    parameters = SamplingParameters(**{"stop_token_ids": (END,), "seed": handle, **sampling})
    return submit(handle, prompt, 110, declared=False, sampling=parameters, constraint=constraint)


CONSTRAINED = [
    asked(1, 5, JSON),
    asked(2, 40, JSON, temperature=0.5),
    asked(3, 33, PHONE, top_k=1),
    asked(4, 17, JSON, top_p=0.8, frequency_penalty=0.5),
    asked(5, 20, Constraint(kind="choice", text='["left","right","straight on"]')),
]
FREE = [asked(6, 9, None, top_k=1), asked(7, 25, None, temperature=0.9)]


def texts_of(run: Run, requests: Sequence[Submit]) -> dict[int, str]:
    return {one.handle: bytes(token for token in run.tokens[one.handle] if token < 256).decode() for one in requests}


def check(run: Run) -> None:
    texts = texts_of(run, CONSTRAINED)
    for handle in (1, 2, 4):
        jsonschema.validate(json.loads(texts[handle]), SCHEMA)
    assert re.fullmatch(PHONE.text, texts[3])
    assert texts[5] in ("left", "right", "straight on")
    assert {run.channel.last(one.handle).finish_reason for one in CONSTRAINED} == {"stop"}


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """The tokens of each request by itself."""
    tokens: dict[int, list[int]] = {}
    for request in (*CONSTRAINED, *FREE):
        tokens |= run_requests(config_of(overlap=0), [request]).tokens
    return tokens


@pytest.mark.parametrize(("overlap", "chunk"), [(0, 64), (1, 9)])
def test_company_overlap_and_chunks_change_no_token(alone: dict[int, list[int]], overlap: int, chunk: int) -> None:
    run = run_requests(config_of(overlap=overlap, chunk=chunk), [*CONSTRAINED, *FREE], [2] * 7)
    check(run)
    assert run.tokens == alone
    assert run.held == 0


@pytest.mark.parametrize(("overlap", "host_blocks"), [(0, 60), (1, 0)])
def test_retraction_changes_no_token(alone: dict[int, list[int]], overlap: int, host_blocks: int) -> None:
    run = run_requests(config_of(overlap=overlap, blocks=11, host_blocks=host_blocks), [*CONSTRAINED, *FREE])
    assert run.counters.retractions > 0
    check(run)
    assert run.tokens == alone
    assert run.held == 0


def test_rows_beside_constrained_ones_draw_what_they_drew(alone: dict[int, list[int]]) -> None:
    assert run_requests(config_of(overlap=1), FREE).tokens == {one.handle: alone[one.handle] for one in FREE}


def test_a_bad_constraint_is_one_requests_error() -> None:
    bad = asked(8, 9, Constraint(kind="regex", text="(a"))
    with pytest.raises(AssertionError, match="unclosed group"):
        run_requests(config_of(overlap=1), [bad])


# The default model behind HTTP.

TAG = {"triggers": ["A"], "structures": [{"begin": "A(", "schema": {"type": "integer"}, "end": ")"}]}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

KINDS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}}, "json"),
    ({"response_format": {"type": "json_object"}}, "json"),
    ({"guided_regex": r"\d{4}-\d{2}-\d{2}"}, r"\d{4}-\d{2}-\d{2}"),
    ({"structured_outputs": {"choice": ["yes", "no", "perhaps"]}}, "yes|no|perhaps"),
    ({"ebnf": 'root ::= "[" [a-c] ("," [a-c]){2,4} "]"'}, r"\[[abc](,[abc]){2,4}\]"),
    ({"structured_outputs": {"grammar": 'start: "n=" /[0-9]{1,3}/ ";"'}}, r"n=[0-9]{1,3};"),
]


DEEP = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(12_000)) + '\nr12000: "b"'
"""More recursion than a stack holds: a compiler inside the engine would take the engine along."""


def body(server: RunningServer, fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me about a person called Ada."}]
    return {"model": server.model, "messages": messages, "max_tokens": 60, "seed": 3, **fields, **more}


def answer_of(server: RunningServer, sent: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=sent, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def streamed(server: RunningServer, sent: dict[str, Any]) -> tuple[str, str | None]:
    text, reason = "", None
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json={**sent, "stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text += choice["delta"].get("content", "")
                reason = choice["finish_reason"] or reason
    return text, reason


@pytest.mark.parametrize(("fields", "expected"), KINDS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("temperature", [pytest.param(0, marks=pytest.mark.long), 1.2])
def test_each_kind_streamed_and_whole(
    server: RunningServer, fields: dict[str, Any], expected: str, temperature: float
) -> None:
    sent = body(server, fields, temperature=temperature)
    choice = answer_of(server, sent)["choices"][0]
    text = choice["message"]["content"]
    assert streamed(server, sent) == (text, choice["finish_reason"])
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict) if expected == "json" else re.fullmatch(expected, text)
    assert choice["finish_reason"] == "stop" or "json_object" in str(fields), "only free JSON may be long"
    if "json_schema" in str(fields):
        jsonschema.validate(json.loads(text), PERSON)


def test_a_structural_tag(server: RunningServer) -> None:
    """Each letter A of the answer begins a tag; the model, asked for Ada, cannot help writing it."""
    sent = body(server, {"structural_tag": TAG}, temperature=0, max_tokens=24)
    text = answer_of(server, sent)["choices"][0]["message"]["content"]
    assert streamed(server, sent)[0] == text
    assert "A" in text and "A" not in re.sub(r"A\(-?\d+\)", "", re.sub(r"A(\((-?\d*)?)?$", "", text)), text


def test_errors_over_the_wire_and_the_server_lives(server: RunningServer) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"guided_json": {"type": "object", "properties": {"foo": "bar"}}}, "guided_json"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_json": "[" * 10_000}, "guided_json"),
        ({"json_schema": json.dumps({"type": "string", "pattern": "a{1,9}(?=b)"})}, "json_schema"),
        ({"ebnf": "root ::= missing"}, "ebnf"),
        ({"ebnf": DEEP}, "ebnf"),
        ({"structural_tag": "{}"}, "structural_tag"),
    ]
    pids = server.engine_pids()
    for fields, param in bad:
        for stream in (False, True) if param == "guided_json" else (False,):
            answer = httpx.post(
                f"{server.url}/v1/chat/completions", json=body(server, fields, stream=stream), timeout=60
            )
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", param), error
            assert error["message"].startswith(f"{param}: ") or "empty" in error["message"]
    assert answer_of(server, body(server, {}, max_tokens=2))["choices"][0]["finish_reason"] == "length"
    assert server.engine_pids() == pids, "it is the engine that was there before"


def test_bad_words_of_the_default_model(server: RunningServer) -> None:
    """Word after word that the model says is forbidden it, at any place in whatever tokens it has for them."""
    words: list[str] = []
    for _ in range(3):
        sent = body(server, {"bad_words": words}, temperature=0, max_tokens=16)
        choice = answer_of(server, sent)["choices"][0]
        text = choice["message"]["content"]
        assert not [word for word in words if word in text], (words, text)
        assert streamed(server, sent) == (text, choice["finish_reason"])
        words.append(next(word for word in re.findall(r"[A-Za-z]{3,}", text)))
    stuck = body(server, {"guided_choice": ["Paris"], "bad_words": ["ari"]})
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=stuck, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "constraint_failed"), answer.text
    assert answer.json()["error"]["param"] == "guided_choice" and "bad_words" in answer.json()["error"]["message"]


@pytest.mark.long
def test_texts_without_end_hold_up_nobody(server: RunningServer) -> None:
    """Compiling these never ends; others, constrained ones too, go on meanwhile."""
    endless = ["start: X\nX: " + " & ".join(f"/.*a{i}{at}.*/" for i in range(40)) for at in range(3)]
    with ThreadPoolExecutor(4) as threads:
        bad = [
            threads.submit(
                httpx.post, f"{server.url}/v1/chat/completions", json=body(server, {"ebnf": text}), timeout=60
            )
            for text in endless
        ]
        good = answer_of(server, body(server, {}, max_tokens=20))
        assert good["choices"][0]["finish_reason"] in ("length", "stop")
        assert not any(one.done() for one in bad), "the good one did not wait"
        for one in bad:
            answer = one.result()
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ebnf")
            assert "takes longer than 5 s" in answer.json()["error"]["message"]
    choice = answer_of(server, body(server, {"regex": "[0-9]"}))["choices"][0]
    assert choice["message"]["content"].isdigit()


def test_several_choices_logprobs_and_min_tokens(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(
        model=server.model,
        prompt="The answer is ",
        max_tokens=12,
        temperature=1.3,
        n=3,
        seed=1,
        logprobs=2,
        extra_body={"guided_regex": "[a-z]{2,12}( [a-z]{2,12})*", "min_tokens": 5, "ignore_eos": True},
    )
    assert len({choice.text for choice in answer.choices}) > 1
    for choice in answer.choices:
        assert re.fullmatch("[a-z]*( [a-z]*)*", choice.text)
        assert len(choice.logprobs.tokens) == 12, "ignore_eos goes on while the grammar may"
        assert "".join(choice.logprobs.tokens) == choice.text
