"""/v1/completions, streamed and not."""

from itertools import chain
from typing import Any

import httpx
import pytest
from events import events_of, text_of_chunks
from scripted_engine import EOS, MODEL, Stack, say


async def complete(client: httpx.AsyncClient, prompt: Any, **fields: Any) -> Any:
    answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    return events_of(answer.text) if fields.get("stream") else answer.json()


def prompts_of(stack: Stack) -> list[list[int]]:
    return [memoryview(submit.prompt).cast("i").tolist() for submit in stack.engine.submits]


async def test_a_whole_answer(client: httpx.AsyncClient) -> None:
    body = await complete(client, "Hi")
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "matched_stop": EOS}
    ]
    assert body["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("Hi", [[256, 72, 105]]),
        (["Hi", "é"], [[256, 72, 105], [256, 0xC3, 0xA9]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
async def test_four_kinds_of_prompt(stack: Stack, client: httpx.AsyncClient, prompt: Any, sent: Any) -> None:
    body = await complete(client, prompt)
    assert prompts_of(stack) == sent
    assert [choice["index"] for choice in body["choices"]] == list(range(len(sent)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, sent))


@pytest.mark.parametrize("prompt", [[], [1, "a"], ["a", [1]], [[]], [[1], []], "", [""], {"a": 1}, None, [1.5], [-1]])
async def test_prompts_that_are_none(client: httpx.AsyncClient, prompt: Any) -> None:
    """Known failure 27, the empty prompt among them."""
    answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": prompt})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("prompt")


async def test_streams_of_several_prompts_and_choices(client: httpx.AsyncClient) -> None:
    chunks = await complete(client, ["a", "b"], n=2, stream=True, stream_options={"include_usage": True})
    assert [text_of_chunks(chunks, index) for index in range(4)] == ["hello"] * 4
    ends = [choice["index"] for c in chunks for choice in c["choices"] if choice["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]
    assert chunks[-1]["usage"]["prompt_tokens"] == 4 and chunks[-1]["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize("top", [0, 1, 3])
async def test_legacy_logprobs(stack: Stack, client: httpx.AsyncClient, top: int) -> None:
    """Known failure 23, for plain completions."""
    stack.engine.script = say("aéb")
    logprobs = (await complete(client, "x", logprobs=top))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs["token_logprobs"] == [-0.97, -1.95, -1.69, -0.98]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert [len(entry) for entry in logprobs["top_logprobs"]] == [max(top, 1)] * 4
    assert logprobs["top_logprobs"][0]["a"] == -0.97


async def test_streamed_logprobs_are_the_same(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = say("aéb", each=2)
    for echo in (False, True):
        whole = (await complete(client, "é!", logprobs=2, echo=echo))["choices"][0]
        chunks = await complete(client, "é!", logprobs=2, echo=echo, stream=True)
        assert text_of_chunks(chunks) == whole["text"] == ("é!" if echo else "") + "aéb"
        for key, value in whole["logprobs"].items():
            pieces = [choice["logprobs"][key] for c in chunks for choice in c["choices"] if choice["logprobs"]]
            assert list(chain.from_iterable(pieces)) == value


async def test_echo(stack: Stack, client: httpx.AsyncClient) -> None:
    assert (await complete(client, "Hé: ", echo=True))["choices"][0]["text"] == "Hé: hello"
    assert (await complete(client, [72, 258, 105], echo=True))["choices"][0]["text"] == "Hihello"
    body = await complete(client, "Hi", echo=True, logprobs=1, n=2)
    for choice in body["choices"]:
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["<|bos|>", "H", "i", *"hello"]
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:3] == [-0.72, -1.05]
        assert logprobs["text_offset"] == [0, 0, 1, 2, 3, 4, 5, 6]
    chunks = await complete(client, "Hi", echo=True, n=2, stream=True)
    assert text_of_chunks(chunks, 0) == text_of_chunks(chunks, 1) == "Hihello"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_without_an_answer(stack: Stack, client: httpx.AsyncClient, stream: bool) -> None:
    """Known failure 27: the prompt only."""
    asked = {"echo": True, "max_tokens": 0, "stream": stream}
    body = await complete(client, ["Hi", "you"], **asked)
    texts = (
        [text_of_chunks(body, 0), text_of_chunks(body, 1)] if stream else [choice["text"] for choice in body["choices"]]
    )
    assert texts == ["Hi", "you"] and stack.engine.submits == []
    if not stream:
        assert body["usage"]["completion_tokens"] == 0
        assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_prompt_alone(stack: Stack, client: httpx.AsyncClient, stream: bool) -> None:
    stack.engine.script = say("dropped")
    asked = {"echo": True, "max_tokens": 0, "logprobs": 1, "stream": stream}
    body = await complete(client, "Hi", **asked)
    choices = [choice for chunk in body for choice in chunk["choices"]] if stream else body["choices"]
    assert "".join(choice["text"] for choice in choices) == "Hi"
    (logprobs,) = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert logprobs["token_logprobs"] == [None, -0.72, -1.05]
    if not stream:
        assert body["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs(client: httpx.AsyncClient) -> None:
    body = await complete(client, ["Hi", "y"], prompt_logprobs=0)
    first, second = (choice["prompt_logprobs"] for choice in body["choices"])
    assert first == [
        None,
        {"72": {"logprob": -0.72, "decoded_token": "H"}},
        {"105": {"logprob": -1.05, "decoded_token": "i"}},
    ]
    assert len(second) == 2


async def test_best_of(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = lambda submit: say("cab"[submit.sampling.choice % 3])(submit)
    body = await complete(client, ["x", "y"], best_of=3, n=2)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "a"), (1, "b"), (2, "a"), (3, "b")]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 12, "what was generated and not shown was work all the same"


async def test_defaults_of_the_recipe_are_defaults_only(client: httpx.AsyncClient) -> None:
    from scripted_engine import scripted_config

    from tokenspeed.server.app import create_app

    stack = Stack(scripted_config(default_sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 9}))
    await stack.new_engine()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(stack.llm)), base_url="http://t") as other:
        await complete(other, "x")
        await complete(other, "x", temperature=0, top_p=0.5, max_tokens=4)
    first, second = stack.engine.submits
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.top_p) == (0.6, 20, 0.95)
    assert first.max_new_tokens == 9
    assert (second.sampling.top_k, second.sampling.top_p, second.max_new_tokens) == (1, 0.5, 4)
    await stack.close()
