"""Client libraries that are too heavy to be dependencies of the tests: these run where somebody installed them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from parsed_answers import declared
from scripted_engine import MODEL, say, scripted_config
from served_thread import ServedThread

from tokenspeed.recipes.resolved import FormatSettings

pytestmark = pytest.mark.long

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
)
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
WEATHER = declared("weather", city={"type": "string"})
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[ServedThread]:
    config = scripted_config(chat_template=TEMPLATE)
    with ServedThread(config.model_copy(update={"formats": FormatSettings(tools="hermes")})) as served:
        yield served


def test_litellm(server: ServedThread) -> None:
    litellm = pytest.importorskip("litellm")
    asked: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none"}
    server.engine.script = say("hello")
    whole = litellm.completion(**asked, messages=MESSAGES, temperature=0)
    assert whole.choices[0].message.content == "hello" and whole.choices[0].finish_reason == "stop"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 6
    chunks = list(litellm.completion(**asked, messages=MESSAGES, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == 6
    assert litellm.text_completion(**asked, prompt="x").choices[0].text == "hello"
    server.engine.script = say(CALL)
    called = litellm.completion(**asked, messages=MESSAGES, tools=[WEATHER]).choices[0].message.tool_calls[0].function
    assert (called.name, json.loads(called.arguments)) == ("weather", {"city": "Rome"})
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked, messages=MESSAGES, temperature=9)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": "openai/other"}, messages=MESSAGES)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked, messages=[{"role": "user", "content": "x" * 600}])


def test_litellm_by_anthropics_door(server: ServedThread) -> None:
    litellm = pytest.importorskip("litellm")
    server.engine.script = say("hello")
    asked: dict[str, Any] = {"model": f"anthropic/{MODEL}", "api_base": server.url, "api_key": "none"}
    whole = litellm.completion(**asked, messages=MESSAGES, max_tokens=20)
    assert whole.choices[0].message.content == "hello"
    chunks = litellm.completion(**asked, messages=MESSAGES, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"


def test_langchain(server: ServedThread) -> None:
    langchain = pytest.importorskip("langchain_openai")
    asked: dict[str, Any] = {"model": MODEL, "base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    server.engine.script = say("hello")
    chat = langchain.ChatOpenAI(**asked, temperature=0, stream_usage=True)
    whole = chat.invoke([("system", "Be short."), ("user", "Hi")])
    assert whole.content == "hello" and whole.usage_metadata["output_tokens"] == 6
    chunks = list(chat.stream("Hi"))
    assert "".join(str(chunk.content) for chunk in chunks) == "hello"
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 6
    assert chat.batch(["a", "b"])[1].content == "hello"
    responses = langchain.ChatOpenAI(**asked, use_responses_api=True)
    assert responses.invoke("Hi").text == "hello"
    server.engine.script = say(CALL)
    (call,) = chat.bind_tools([WEATHER]).invoke("Hi").tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
    (call,) = responses.bind_tools([WEATHER]).invoke("Hi").tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
    server.engine.script = say('{"city": "Rome"}')
    schema = {"title": "Place", "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    structured = chat.with_structured_output(schema, method="json_schema")
    assert structured.invoke("Where?") == {"city": "Rome"}
