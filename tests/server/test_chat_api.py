"""/v1/chat/completions, streamed and not."""

from typing import Any

import httpx
import pytest
from events import events_of, text_of_chunks
from scripted_engine import CONTEXT, EOS, MODEL, Stack, say, tokens

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


async def chat(client: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 200, answer.text
    return events_of(answer.text) if fields.get("stream") else answer.json()


async def test_a_whole_answer(stack: Stack, client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "abc"})
    assert answer.headers["x-request-id"] == "abc" and stack.engine.submits[0].request_id == "abc"
    body = answer.json()
    assert body.pop("created") > 1.7e9
    assert body == {
        "id": "chatcmpl-abc",
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "matched_stop": EOS,
            }
        ],
        "usage": {
            "prompt_tokens": 22,
            "completion_tokens": 6,
            "total_tokens": 28,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


async def test_a_stream(client: httpx.AsyncClient) -> None:
    chunks = await chat(client, stream=True)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1 and all("usage" not in chunk for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert text_of_chunks(chunks) == "hello"
    assert chunks[-1]["choices"][0]["delta"] == {}


async def test_usage_comes_when_asked_for(client: httpx.AsyncClient) -> None:
    """Known failure 18."""
    assert all("usage" not in chunk for chunk in await chat(client, stream=True, stream_options={}))
    chunks = await chat(client, stream=True, stream_options={"include_usage": True}, n=2)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12 and chunks[-1]["usage"]["prompt_tokens"] == 22
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_finish_reason_is_null_but_once(stack: Stack, client: httpx.AsyncClient, reason: str) -> None:
    """Known failure 19."""
    stack.engine.script = say("abc", ends=reason == "stop")
    chunks = await chat(client, stream=True, max_tokens=3 if reason == "length" else 9)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + [reason]


async def test_one_finish_per_choice(client: httpx.AsyncClient) -> None:
    """Known failure 20, first half."""
    chunks = await chat(client, stream=True, n=2)
    ends = [choice["index"] for c in chunks for choice in c["choices"] if choice["finish_reason"] is not None]
    roles = [choice["index"] for c in chunks for choice in c["choices"] if "role" in choice["delta"]]
    assert sorted(ends) == sorted(roles) == [0, 1]
    assert text_of_chunks(chunks, 0) == text_of_chunks(chunks, 1) == "hello"


@pytest.mark.parametrize("each", [1, 2, 3, 5, 20])
async def test_several_tokens_a_round_lose_no_text(stack: Stack, client: httpx.AsyncClient, each: int) -> None:
    """Known failure 20, second half."""
    stack.engine.script = say("to the very last word", each=each)
    assert text_of_chunks(await chat(client, stream=True, stop=["word!"])) == "to the very last word"


@pytest.mark.parametrize("each", [1, 2, 7])
@pytest.mark.parametrize(("stop", "matched"), [(["STOP", "<end>"], "<end>"), ("<en", "<en")])
async def test_stop_strings_over_several_tokens(
    stack: Stack, client: httpx.AsyncClient, each: int, stop: Any, matched: str
) -> None:
    """Known failure 21."""
    stack.engine.script = say("a < b <end> c STOP", each=each)
    chunks = await chat(client, stream=True, stop=stop)
    assert text_of_chunks(chunks) == "a < b "
    assert chunks[-1]["choices"][0]["matched_stop"] == matched
    whole = await chat(client, stop=stop)
    assert whole["choices"][0]["message"]["content"] == "a < b "
    assert (whole["choices"][0]["finish_reason"], whole["choices"][0]["matched_stop"]) == ("stop", matched)
    assert whole["usage"]["completion_tokens"] == 6
    kept = await chat(client, stop=stop, include_stop_str_in_output=True)
    assert kept["choices"][0]["message"]["content"] == "a < b " + matched


async def test_characters_are_held_until_whole(stack: Stack, client: httpx.AsyncClient) -> None:
    """Known failure 22."""
    stack.engine.script = say("日本 🙂👍 é")
    chunks = await chat(client, stream=True)
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "\ufffd" not in "".join(pieces) and {"日", "本", "🙂", "👍", "é"} <= set(pieces)
    whole = await chat(client)
    assert "".join(pieces) == whole["choices"][0]["message"]["content"] == "日本 🙂👍 é"


async def test_logprobs_without_top_logprobs(stack: Stack, client: httpx.AsyncClient) -> None:
    """Known failure 23, for chats."""
    stack.engine.script = say("aé")
    answer = await chat(client, logprobs=True)
    assert answer["choices"][0]["logprobs"]["content"] == [
        {"token": "a", "logprob": -0.97, "bytes": [97], "top_logprobs": []},
        {"token": "bytes:\\xc3", "logprob": -1.95, "bytes": [0xC3], "top_logprobs": []},
        {"token": "bytes:\\xa9", "logprob": -1.69, "bytes": [0xA9], "top_logprobs": []},
    ]
    assert stack.engine.submits[-1].sampling.logprobs == 0


async def test_streamed_logprobs_are_the_same(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = say("héllo", each=2)
    asked = {"logprobs": True, "top_logprobs": 2, "stop": ["zz"]}
    whole = (await chat(client, **asked))["choices"][0]["logprobs"]["content"]
    chunks = await chat(client, **asked, stream=True)
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == whole and len(whole) == 6
    assert [top["bytes"] for top in whole[0]["top_logprobs"]] == [[104], [105]]
    assert bytes(byte for entry in whole for byte in entry["bytes"]).decode() == "héllo"


async def test_logprobs_are_cut_with_the_text(stack: Stack, client: httpx.AsyncClient) -> None:
    stack.engine.script = lambda submit: say("one END", each=4)(submit)
    answer = await chat(client, logprobs=True, stop=["END"])
    assert len(answer["choices"][0]["logprobs"]["content"]) == len("one ") == answer["usage"]["completion_tokens"]


async def test_prompt_logprobs(client: httpx.AsyncClient) -> None:
    answer = await chat(client, prompt_logprobs=1)
    entries = answer["prompt_logprobs"]
    assert len(entries) == 22 and entries[0] is None
    assert entries[2] == {str(ord("u")): {"logprob": -1.17, "decoded_token": "u"}}


async def test_without_max_tokens_the_rest_of_the_context(stack: Stack, client: httpx.AsyncClient) -> None:
    """Known failure 29, first half."""
    await chat(client)
    assert (stack.engine.submits[0].max_new_tokens, stack.engine.submits[0].declared) == (CONTEXT - 22, False)


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 7}, {"max_completion_tokens": 7}, {"max_tokens": 7, "max_completion_tokens": 7}]
)
async def test_both_names_of_max_tokens(stack: Stack, client: httpx.AsyncClient, fields: dict[str, int]) -> None:
    await chat(client, **fields)
    assert (stack.engine.submits[0].max_new_tokens, stack.engine.submits[0].declared) == (7, True)


async def test_every_sampling_field_reaches_the_engine(stack: Stack, client: httpx.AsyncClient) -> None:
    await chat(
        client,
        temperature=0.3,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias={"65": -100, "66": 3},
        seed=11,
        min_tokens=2,
        stop_token_ids=[10],
        ignore_eos=True,
        priority=-4,
        cache_salt="s",
        max_tokens=5,
    )
    submit = stack.engine.submits[0]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.3, 0.9, 5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.2)
    assert sampling.logit_bias == {65: -100.0, 66: 3.0} and sampling.seed == 11 and sampling.min_tokens == 2
    assert sampling.stop_token_ids == (10,) and (submit.priority, submit.namespace) == (-4, b"s")


async def test_top_k_minus_one_is_all(stack: Stack, client: httpx.AsyncClient) -> None:
    await chat(client, top_k=-1, temperature=None)
    assert stack.engine.submits[0].sampling.top_k == 0


async def test_fields_without_effect_are_counted(client: httpx.AsyncClient) -> None:
    await chat(client, user="me", metadata={"a": "b"}, store=True, service_tier="auto")
    await chat(client, user="me")
    page = (await client.get("/metrics")).text
    assert 'tokenspeed_ignored_fields_total{field="user"} 2.0' in page
    assert 'tokenspeed_ignored_fields_total{field="store"} 1.0' in page


async def test_nulls_and_harmless_values_are_as_good_as_absent(stack: Stack, client: httpx.AsyncClient) -> None:
    await chat(
        client,
        tools=None,
        tool_choice="none",
        functions=[],
        response_format={"type": "text"},
        modalities=["text"],
        stop=None,
        seed=None,
        n=None,
        stream=None,
        logit_bias=None,
        stream_options=None,
    )
    assert len(stack.engine.submits) == 1


async def test_messages_in_parts_and_resent_answers(stack: Stack, client: httpx.AsyncClient) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": "a", "name": "Ann"},
        {"role": "assistant", "content": "b", "refusal": None, "annotations": [], "audio": None, "tool_calls": None},
        {"role": "user", "content": "c"},
    ]
    await chat(client, messages=messages)
    prompt = memoryview(stack.engine.submits[0].prompt).cast("i").tolist()
    assert bytes(i for i in prompt if i < 256) == b"system\none\ntwo\nuser\na\nassistant\nb\nuser\nc\nassistant\n"


async def test_continue_final_message(stack: Stack, client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "I say"}]
    await chat(client, messages=messages, continue_final_message=True)
    await chat(client, messages=messages[:1], add_generation_prompt=False)
    prompts = [memoryview(submit.prompt).cast("i").tolist() for submit in stack.engine.submits]
    assert bytes(prompts[0][-6:]) == b"\nI say" and prompts[1][-2:] == [259, 10]


async def test_special_tokens_are_hidden_unless_asked_for(stack: Stack, client: httpx.AsyncClient) -> None:
    def script(submit: Any) -> Any:
        yield from tokens(submit, [72, 258, 105])
        yield from say("!")(submit)

    stack.engine.script = script
    assert (await chat(client))["choices"][0]["message"]["content"] == "Hi!"
    shown = await chat(client, skip_special_tokens=False)
    assert shown["choices"][0]["message"]["content"] == "H<|im_start|>i!"
