"""/generate in SGLang's shape, and /v1/embeddings, which this engine cannot serve."""

import asyncio
from typing import Any

import httpx
import pytest
from events import events_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_engine import EOS, MODEL, VOCABULARY, Stack, say, tokens


async def ask(client: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await client.post("/generate", json={"text": "Hi", **fields})
    assert answer.status_code == 200, answer.text
    return events_of(answer.text) if fields.get("stream") else answer.json()


async def test_a_whole_answer(stack: Stack, client: httpx.AsyncClient) -> None:
    body = await ask(client, rid="abc")
    assert stack.engine.submits[0].request_id == "abc" and stack.engine.submits[0].max_new_tokens == 128
    assert body["meta_info"].pop("e2e_latency") >= 0
    assert body == {
        "text": "hello",
        "output_ids": list(b"hello"),
        "meta_info": {
            "id": "abc",
            "finish_reason": {"type": "stop", "matched": EOS},
            "prompt_tokens": 3,
            "completion_tokens": 6,
            "cached_tokens": 3,
        },
    }


async def test_a_stream_says_all_so_far(client: httpx.AsyncClient) -> None:
    chunks = await ask(client, stream=True)
    texts = [chunk["text"] for chunk in chunks]
    assert texts[-1] == "hello" and all("hello".startswith(text) for text in texts) and texts == sorted(texts)
    assert [chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1]] == [True] * (len(chunks) - 1)
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert all(chunk["meta_info"]["completion_tokens"] >= len(chunk["output_ids"]) for chunk in chunks)


async def test_token_ids_and_sampling_reach_the_engine(stack: Stack, client: httpx.AsyncClient) -> None:
    sampling = {
        "max_new_tokens": 5,
        "min_new_tokens": 2,
        "temperature": 0.3,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "stop_token_ids": [10],
        "sampling_seed": 11,
        "logit_bias": {"65": -100},
        "stop": None,
    }
    body = await ask(client, text=None, input_ids=[72, 105], sampling_params=sampling, priority=4, extra_key="s")
    assert body["text"] == "hello" and body["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    submit = stack.engine.submits[0]
    assert memoryview(submit.prompt).cast("i").tolist() == [72, 105]
    got = submit.sampling
    assert (got.temperature, got.top_p, got.top_k, got.min_p, got.min_tokens) == (0.3, 0.9, 0, 0.1, 2)
    assert (got.presence_penalty, got.frequency_penalty, got.repetition_penalty) == (0.5, -0.5, 1.2)
    assert got.seed == 11 and got.logit_bias == {65: -100.0} and 10 in got.stop_token_ids
    assert (submit.max_new_tokens, submit.priority, submit.namespace) == (5, 4, b"s")


async def test_stop_strings(client: httpx.AsyncClient) -> None:
    body = await ask(client, sampling_params={"stop": ["lo"]})
    assert (body["text"], body["meta_info"]["finish_reason"]["matched"]) == ("hel", "lo")
    assert (await ask(client, sampling_params={"stop": "lo", "no_stop_trim": True}))["text"] == "hello"


async def test_batches_and_several_choices(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = lambda submit: say(f"{len(submit.prompt) // 4}")(submit)
    two = await ask(client, text=["a", "bcd"], rid=["x", "y"], sampling_params=[{"temperature": 0}, {}])
    assert [(one["text"], one["meta_info"]["id"], one["meta_info"]["prompt_tokens"]) for one in two] == [
        ("2", "x", 2),
        ("4", "y", 4),
    ]
    assert [one["meta_info"]["cached_tokens"] for one in two] == [3, 3]
    assert [submit.sampling.top_k for submit in stack.engine.submits] == [1, 0]
    assert isinstance(await ask(client, text=["a"]), list)
    chunks = await ask(client, text=["a", "bcd"], sampling_params={"n": 2}, stream=True)
    last = {chunk["index"]: chunk["text"] for chunk in chunks}
    assert last == {0: "2", 1: "2", 2: "4", 3: "4"}
    ends = [chunk["index"] for chunk in chunks if chunk["meta_info"]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]


async def test_log_probabilities(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = say("aé")
    asked = {"return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 0, "return_text_in_logprobs": True}
    meta = (await ask(client, **asked))["meta_info"]
    assert meta["output_token_logprobs"] == [
        [-0.97, 97, "a"],
        [-1.95, 0xC3, "bytes:\\xc3"],
        [-1.69, 0xA9, "bytes:\\xa9"],
    ]
    assert meta["output_top_logprobs"][0] == [[-0.97, 97, "a"]]
    assert meta["input_token_logprobs"] == [[None, 256, "<|bos|>"], [-0.72, 72, "H"], [-1.05, 105, "i"]]
    assert meta["input_top_logprobs"] == [None, [[-0.72, 72, "H"]], [[-1.05, 105, "i"]]]
    meta = (await ask(client, return_logprob=True, logprob_start_len=2))["meta_info"]
    assert meta["input_token_logprobs"] == [[-1.05, 105, None]] and "input_top_logprobs" not in meta
    meta = (await ask(client, return_logprob=True))["meta_info"]
    assert meta["input_token_logprobs"] == [] and stack.engine.submits[-1].sampling.prompt_logprobs == -1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(min_size=1, max_size=20),
    each=st.integers(1, 9),
    most=st.integers(1, 40),
    stop=st.lists(st.text(min_size=1, max_size=2), max_size=2),
)
async def test_streams_say_the_same_as_whole_answers(
    stack: Stack, client: httpx.AsyncClient, text: str, each: int, most: int, stop: list[str]
) -> None:
    stack.engine.script = say(text, each=each)
    asked = {"sampling_params": {"max_new_tokens": most, "stop": stop}, "return_logprob": True, "rid": "r"}
    whole, last = await ask(client, **asked), (await ask(client, **asked, stream=True))[-1]
    for body in (whole, last):
        body["meta_info"].pop("e2e_latency")
    assert whole == last


@pytest.mark.parametrize(
    ("fields", "param", "code", "says"),
    [
        ({"text": None}, "text", "invalid_value", "either"),
        ({"input_ids": [1]}, "text", "invalid_value", "either"),
        ({"text": []}, "text", "invalid_value", "empty"),
        ({"text": ""}, "text", "empty_prompt", "empty"),
        ({"text": None, "input_ids": [1, [2]]}, "input_ids", "invalid_value", "mixes"),
        ({"text": None, "input_ids": [VOCABULARY]}, "text", "invalid_value", str(VOCABULARY)),
        ({"rid": ["a", "b"]}, "rid", "invalid_value", "2 entries for 1"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params", "invalid_value", "1 entries for 2"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params.n", "invalid_value", "same"),
        ({"text": ["a"] * 600, "sampling_params": {"n": 2}}, "text", "invalid_value", "1024"),
        ({"sampling_params": {"temperature": 9}}, "sampling_params.temperature", "invalid_value", "2"),
        ({"sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens", "invalid_value", "at least one"),
        ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens", "invalid_value", "0"),
        (
            {"sampling_params": {"max_new_tokens": 600}},
            "sampling_params.max_new_tokens",
            "context_length_exceeded",
            "603",
        ),
        ({"sampling_params": {"min_new_tokens": 200}}, "sampling_params.min_new_tokens", "invalid_value", "128"),
        ({"sampling_params": {"stop": ["a", ""]}}, "sampling_params.stop[1]", "invalid_value", "length"),
        ({"sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias", "invalid_value", "'x'"),
        ({"sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex", "unsupported_field", "use stop"),
        ({"sampling_params": {"temprature": 1}}, "sampling_params.temprature", "unknown_field", "temperature"),
        ({"top_logprobs_num": 1}, "top_logprobs_num", "invalid_value", "return_logprob"),
        ({"logprob_start_len": 0}, "logprob_start_len", "invalid_value", "return_logprob"),
        ({"image_data": "x"}, "image_data", "unsupported_field", "pictures"),
        ({"txt": "x"}, "txt", "unknown_field", "did you mean text"),
    ],
)
async def test_refusals(
    stack: Stack, client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str, says: str
) -> None:
    answer = await client.post("/generate", json={"text": "Hi", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert says in error["message"]
    assert stack.engine.submits == []


async def test_fields_without_effect_are_counted(client: httpx.AsyncClient) -> None:
    await ask(client, log_metrics=True, sampling_params={"spaces_between_special_tokens": True})
    page = (await client.get("/metrics")).text
    for field in ("log_metrics", "sampling_params.spaces_between_special_tokens"):
        assert f'tokenspeed_ignored_fields_total{{field="{field}"}} 1.0' in page


async def test_an_engine_that_dies_in_mid_stream(stack: Stack, url: str) -> None:
    stack.engine.script = lambda submit: tokens(submit, [65])
    body = {"text": "x", "stream": True}
    async with httpx.AsyncClient() as client, client.stream("POST", f"{url}/generate", json=body) as answer:
        pieces = answer.aiter_text()
        text = await anext(pieces)
        stack.connection.engine_lost("killed by SIGKILL")
        text += "".join([piece async for piece in pieces])
    *chunks, last = events_of(text)
    assert chunks[0]["text"] == "A" and "SIGKILL" in last["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_engine(stack: Stack, url: str, stream: bool) -> None:
    stack.engine.pause()
    async with httpx.AsyncClient() as client:
        task = asyncio.create_task(client.post(f"{url}/generate", json={"text": ["x", "y"], "stream": stream}))
        await stack.engine.heard(lambda: len(stack.engine.submits) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await stack.engine.heard(lambda: len(stack.engine.aborts) == 2)
    assert stack.llm.open_choices == 0


async def test_embeddings_are_refused_and_why(client: httpx.AsyncClient) -> None:
    async def error(status: int, **fields: Any) -> Any:
        answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": "x", **fields})
        assert answer.status_code == status
        return answer.json()["error"]

    refused = await error(400, encoding_format="float", user="me")
    assert (refused["code"], refused["param"]) == ("embeddings_not_supported", "model")
    assert MODEL in refused["message"] and "pooling" in refused["message"]
    assert (await error(404, model="other"))["code"] == "model_not_found"
    assert (await error(400, encoding_format="hex"))["param"] == "encoding_format"
    assert (await error(400, input=None))["param"] == "input"
