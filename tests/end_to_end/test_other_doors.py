"""The other doors against the real server of the real default model: they say what chat completions say."""

import json
import re
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from running_server import RunningServer

MODEL = "smollm2-135m"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


@pytest.fixture(scope="module")
def said(server: RunningServer) -> str:
    """The greedy answer of chat completions."""
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    text: str = server.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert "Paris" in text
    return text


def test_messages(server: RunningServer, said: str) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "extra_body": {"temperature": 0}}
        message = client.messages.create(**asked, max_tokens=24)
        with client.messages.stream(**asked, max_tokens=24) as stream:
            streamed = "".join(stream.text_stream)
        count = client.messages.count_tokens(model=MODEL, messages=QUESTION)
    assert isinstance(message.content[0], anthropic.types.TextBlock)
    assert message.content[0].text == streamed == said
    assert count.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_responses(server: RunningServer, said: str) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}
        response = client.responses.create(**asked, input=QUESTION)
        assert response.output_text == said
        with client.responses.stream(**asked, input="And of Italy?", previous_response_id=response.id) as stream:
            after = stream.get_final_response()
    spoken = [*QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": "And of Italy?"}]
    body = {"model": MODEL, "messages": spoken, "max_tokens": 24, "temperature": 0}
    whole = server.client.post("/v1/chat/completions", json=body).json()
    assert after.output_text == whole["choices"][0]["message"]["content"]
    assert after.usage is not None and after.usage.input_tokens == whole["usage"]["prompt_tokens"]


def test_generate(server: RunningServer) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 12}
    body = {"text": "Once upon a time", "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    answer = server.client.post("/generate", json=body).json()
    asked = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12, "logprobs": 0}
    choice = server.client.post("/v1/completions", json=asked).json()["choices"][0]
    assert answer["text"] == choice["text"]
    meta = answer["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"] and len(meta["output_token_logprobs"]) == 12
    ours = [triple[0] for triple in meta["output_token_logprobs"]]
    assert ours == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)


CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}


def test_messages_of_a_schema(server: RunningServer) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        form: Any = {"format": {"type": "json_schema", "schema": CITY}}
        message = client.messages.create(model=MODEL, messages=QUESTION, max_tokens=96, output_config=form)
    assert message.stop_reason == "end_turn" and isinstance(message.content[0], anthropic.types.TextBlock)
    jsonschema.validate(json.loads(message.content[0].text), CITY)


def test_responses_of_a_schema(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        form: Any = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
        response = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=96, text=form)
        assert response.status == "completed"
        jsonschema.validate(json.loads(response.output_text), CITY)
        wrong: Any = {"format": {**form["format"], "schema": {"type": "object", "not": {}}}}
        with pytest.raises(openai.BadRequestError, match=re.escape("text.format.schema")):
            client.responses.create(model=MODEL, input=QUESTION, text=wrong)


def test_generate_of_an_expression(server: RunningServer) -> None:
    body = {"text": "Call me at", "sampling_params": {"regex": "[0-9]{3}-[0-9]{4}", "max_new_tokens": 32}}
    answer = server.client.post("/generate", json=body).json()
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", answer["text"]) and answer["meta_info"]["finish_reason"]["type"] == "stop"
