"""Tool calls and reasoning through /v1/chat/completions, streamed and not, over scripted answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from app_server import serving
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed_answers import FAMILIES
from scripted_engine import MODEL
from tool_server import CALLS, CHAT, REASONED, SMALL, Served, joined

from tokenspeed.server.thinking import thinking_variables


@pytest.fixture
async def hermes() -> AsyncIterator[Served]:
    async with Served("hermes", "qwen3", "enable_thinking") as served:
        served.say(FAMILIES["hermes"].two)
        yield served


async def test_a_whole_answer_with_calls(hermes: Served) -> None:
    body = await hermes.post(CALLS)
    choice = body["choices"][0]
    ids = [call.pop("id") for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 2 and all(one.startswith("call_") for one in ids)
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me see.",
        "refusal": None,
        "reasoning_content": "I ask.",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln", "days": 2}'}},
            {"type": "function", "function": {"name": "time", "arguments": "{}"}},
        ],
    }
    assert choice["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": REASONED}
    first = json.dumps(SMALL[0], ensure_ascii=False)
    assert hermes.prompt().startswith(f"<{first}>")


async def test_content_is_null_beside_calls_alone(hermes: Served) -> None:
    hermes.say('<tool_call>{"name": "time", "arguments": {}}</tool_call>')
    message = (await hermes.post(CALLS))["choices"][0]["message"]
    assert message["content"] is None and "reasoning_content" not in message


async def test_a_stream_of_calls(hermes: Served) -> None:
    """Known failure 24: id, type and name once, arguments in pieces, index 0 and 1, one finish."""
    chunks = await hermes.post(CALLS, stream=True)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    begun = [call for delta in deltas for call in delta.get("tool_calls", []) if "id" in call]
    assert [(call["index"], call["type"], call["function"]) for call in begun] == [
        (0, "function", {"name": "weather", "arguments": ""}),
        (1, "function", {"name": "time", "arguments": ""}),
    ]
    pieces = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert len([piece for piece in pieces if piece]) > 10  # as they come, not at the end
    assert joined(chunks)["ends"] == ["tool_calls"]
    assert sum("reasoning_content" in delta for delta in deltas) > 3


async def test_only_the_first_call_is_given_where_they_must_not_be_parallel(hermes: Served) -> None:
    for stream in (False, True):
        found = await hermes.post(CALLS, parallel_tool_calls=False, stream=stream)
        calls = joined(found)["message"]["tool_calls"] if stream else found["choices"][0]["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["weather"]


@pytest.mark.parametrize(("fields", "shown"), [({}, ""), ({"tools": SMALL, "tool_choice": "none"}, "")])
async def test_without_offered_tools_a_call_is_text(hermes: Served, fields: dict[str, Any], shown: str) -> None:
    choice = (await hermes.post(CHAT, **fields))["choices"][0]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert '<tool_call>\n{"name": "weather"' in choice["message"]["content"]
    assert choice["message"]["reasoning_content"] == "I ask."
    assert "weather" not in hermes.prompt()


async def test_length_stays_length(hermes: Served) -> None:
    """Known failure 26: without an end it stays reasoning; and a call that was cut is not finished."""
    cut = (await hermes.post(CALLS, max_tokens=12))["choices"][0]
    assert (cut["finish_reason"], cut["message"]["content"]) == ("length", None)
    assert cut["message"]["reasoning_content"] == "I as"
    text = FAMILIES["hermes"].two
    cut = (await hermes.post(CALLS, max_tokens=len(text[: text.index('n", "days"')].encode())))["choices"][0]
    assert (
        cut["finish_reason"] == "length" and cut["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Köl'
    )


async def test_reasoning_that_the_prompt_opened() -> None:
    async with Served("qwen3_coder", "qwen3", "enable_thinking") as served:
        served.say("deep\n</think>\n\nShallow.")
        asked = {**CHAT, "chat_template_kwargs": {"opened": "<think>\n"}}
        message = (await served.post(asked))["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("deep", "Shallow.")
        usage = (await served.post(asked))["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == len("deep\n</think>")
        plain = (await served.post(CHAT))["choices"][0]["message"]  # not opened: it is text
        assert plain["content"] == "deep\n</think>\n\nShallow."


async def test_reasoning_left_out_and_left_in(hermes: Served) -> None:
    left_out = await hermes.post(CALLS, include_reasoning=False)
    assert "reasoning_content" not in left_out["choices"][0]["message"]
    assert left_out["choices"][0]["message"]["content"] == "Let me see."
    assert left_out["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    left_in = (await hermes.post(CALLS, separate_reasoning=False))["choices"][0]["message"]
    assert left_in["content"] == "<think>\nI ask.\n</think>\n\nLet me see." and len(left_in["tool_calls"]) == 2
    chunks = await hermes.post(CALLS, include_reasoning=False, stream=True)
    assert (
        joined(chunks)["message"]["reasoning_content"] == "" and joined(chunks)["message"]["content"] == "Let me see."
    )


async def test_logprobs_are_of_the_tokens_as_generated(hermes: Served) -> None:
    """Of all of them in their order, whatever they became; a stream gives the same."""
    asked = {"logprobs": True, "top_logprobs": 1}
    whole = (await hermes.post(CALLS, **asked))["choices"][0]["logprobs"]["content"]
    text = FAMILIES["hermes"].two
    assert bytes(byte for entry in whole for byte in entry["bytes"]) == text.encode()
    for each in (1, 5, 500):
        hermes.say(text, each=each)
        assert joined(await hermes.post(CALLS, **asked, stream=True))["logprobs"] == whole


async def test_rounds_do_not_change_the_count_of_reasoning_tokens(hermes: Served) -> None:
    counts = set()
    for each in (1, 2, 7, 500):
        for stop in ([], ["zzz", "k>x"]):
            hermes.say(FAMILIES["hermes"].two, each=each)
            counts.add((await hermes.post(CALLS, stop=stop))["usage"]["completion_tokens_details"]["reasoning_tokens"])
    assert counts == {REASONED}


async def test_a_stop_string_ends_in_the_middle_of_anything(hermes: Served) -> None:
    """Stop strings are looked for in what the model wrote."""
    body = await hermes.post(CALLS, stop=["ask"])
    assert body["choices"][0]["message"] == {
        "role": "assistant", "content": None, "refusal": None, "reasoning_content": "I ",
    }  # fmt: skip
    assert body["usage"]["completion_tokens"] == len("<think>\nI ")
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(">\nI ")
    cut = (await hermes.post(CALLS, stop=["days"]))["choices"][0]
    assert cut["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln", "'


async def test_several_choices(hermes: Served) -> None:
    chunks = await hermes.post(CALLS, n=2, stream=True)
    found = [joined(chunks, index) for index in (0, 1)]
    assert found[0]["ends"] == found[1]["ends"] == ["tool_calls"]
    ids = [call.pop("id") for one in found for call in one["message"]["tool_calls"]]
    assert len(set(ids)) == 4 and found[0]["message"] == found[1]["message"]


# -- what the template gets -------------------------------------------------------------------------------------------


async def test_earlier_calls_results_and_thoughts_reach_the_template(hermes: Served) -> None:
    function = {"name": "weather", "arguments": '{"city": "Köln"}'}
    broken = {"name": "time", "arguments": "oops"}
    messages = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "b",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": function},
                {"id": "c2", "type": "function", "function": broken},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "d"}]},
        {"role": "assistant", "content": "e", "reasoning": "f", "tool_calls": None},
    ]
    await hermes.post({**CHAT, "messages": messages})
    assert hermes.prompt() == (
        "[role=user;content=a;][role=assistant;content=;reasoning_content=b;thinking=b;tool_calls=["
        "{'id': 'c1', 'type': 'function', 'function': {'name': 'weather', 'arguments': {'city': 'Köln'}}}, "
        "{'id': 'c2', 'type': 'function', 'function': {'name': 'time', 'arguments': 'oops'}}];]"
        "[role=tool;content=d;tool_call_id=c1;][role=assistant;content=e;reasoning_content=f;]"
    )


@pytest.mark.parametrize(
    ("switch", "effort", "ends"),
    [
        ("enable_thinking", "none", "False"),
        ("enable_thinking", "off", "False"),
        ("enable_thinking", "high", "Truehigh"),
        ("reasoning_effort", "low", "low"),
        ("reasoning_effort", "none", "none"),
        ("thinking_mode", "none", "]"),
    ],
)
async def test_reasoning_effort_is_the_templates_switch(switch: str, effort: str, ends: str) -> None:
    async with Served("qwen3_coder", "qwen3", switch) as served:
        await served.post(CHAT, reasoning_effort=effort)
        assert served.prompt().endswith(ends)
        await served.post(CHAT, reasoning_effort=effort, chat_template_kwargs={"enable_thinking": "mine"})
        assert "mine" in served.prompt()


def test_efforts_in_the_words_of_templates() -> None:
    def said(effort: str | None, switch: str) -> dict[str, Any]:
        return thinking_variables(effort, switch=switch, reasoning_format="minimax_m3")

    assert said(None, "") == {} and said("off", "thinking") == {"thinking": False}
    assert said("none", "thinking_mode") == {"thinking_mode": "disabled"}
    assert said("max", "thinking_mode") == {"thinking_mode": "enabled", "reasoning_effort": "max"}


async def test_gpt_oss_knows_three_efforts() -> None:
    async with Served("gpt_oss", "gpt_oss", "reasoning_effort") as served:
        assert "low, medium, high" in (await served.refused(CHAT, reasoning_effort="none"))["message"]
        await served.post(CHAT, reasoning_effort="high")
        assert served.prompt().endswith("high")


# -- streamed equals whole --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "kimi_k2", "gpt_oss", "deepseek_v32", "llama4_pythonic"])
def test_a_stream_says_the_same_as_a_whole_answer(name: str) -> None:
    """For any answer, well-formed or not, in rounds of any size, with stop strings or not."""
    family = FAMILIES[name]
    soup = st.lists(st.sampled_from((*family.pieces, "é🙂", " ", "\n", "x", "<think>", "</think>")), max_size=8)
    texts = st.tuples(st.sampled_from(("", family.one, family.two)), soup.map("".join)).map("".join)

    async def check(served: Served, text: str, each: int, fields: dict[str, Any]) -> None:
        served.say(text or "x", each=each)
        asked = {**CHAT, "tools": SMALL, "chat_template_kwargs": {"opened": family.prompt_end}, **fields}
        whole = (await served.post(asked))["choices"][0]
        streamed = joined(await served.post(asked, stream=True))
        assert streamed["ends"] == [whole["finish_reason"]]
        message = {key: whole["message"].get(key) or empty for key, empty in
                   (("content", ""), ("reasoning_content", ""), ("tool_calls", []))}  # fmt: skip
        for call in (*message["tool_calls"], *streamed["message"]["tool_calls"]):
            assert call.pop("id")
        assert streamed["message"] == message

    with asyncio.Runner() as runner:
        served = runner.run(Served(name and family.tools, family.reasoning).__aenter__())

        @given(texts, st.sampled_from((1, 2, 3, 11)), st.sampled_from(({}, {"stop": ["x", "2"]}, {"max_tokens": 40})))
        @settings(max_examples=15, deadline=None)
        def holds(text: str, each: int, fields: dict[str, Any]) -> None:
            runner.run(check(served, text, each, fields))

        try:
            holds()
        finally:
            runner.run(served.__aexit__())


# -- the official client ----------------------------------------------------------------------------------------------


async def test_the_openai_client_reads_both(hermes: Served) -> None:
    from openai.types.chat import ChatCompletionMessageFunctionToolCall

    async with serving(hermes.app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        asked: Any = {"model": MODEL, "messages": CHAT["messages"], "tools": SMALL, "tool_choice": "auto"}
        whole = await client.chat.completions.create(**asked)
        message = whole.choices[0].message
        assert whole.choices[0].finish_reason == "tool_calls" and message.content == "Let me see."
        assert message.tool_calls is not None
        assert all(isinstance(call, ChatCompletionMessageFunctionToolCall) for call in message.tool_calls)
        assert whole.usage is not None and whole.usage.completion_tokens_details is not None
        assert whole.usage.completion_tokens_details.reasoning_tokens == REASONED
        names, arguments = [], []
        async with client.chat.completions.stream(**asked) as stream:
            async for event in stream:
                if event.type == "tool_calls.function.arguments.done":
                    names.append(event.name)
                    arguments.append(event.arguments)
            final = await stream.get_final_completion()
        assert (names, arguments) == (["weather", "time"], ['{"city": "Köln", "days": 2}', "{}"])
        calls = final.choices[0].message.tool_calls
        assert calls is not None and [call.function.name for call in calls] == names
        assert final.choices[0].finish_reason == "tool_calls" and final.choices[0].message.content == "Let me see."
        # and what it got goes back as it is
        again = [
            *CHAT["messages"],
            message,
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"},
        ]
        await client.chat.completions.create(model=MODEL, messages=again)
        assert "role=tool;content=sun" in hermes.prompt() and "reasoning_content=I ask." in hermes.prompt()
