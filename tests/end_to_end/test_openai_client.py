"""The official client against the real server of the real default model."""

import openai
import pytest
from running_server import RunningServer


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


def test_a_chat_says_something_true(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2-135m", messages=MESSAGES, max_tokens=24, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_as_a_whole_answer(client: openai.OpenAI) -> None:
    asked = {"model": "smollm2-135m", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason and set(reasons[:-1]) == {None}


def test_completions_with_choices_seed_and_logprobs(client: openai.OpenAI) -> None:
    asked = {"model": "smollm2-135m", "prompt": "Once upon a time", "max_tokens": 12, "seed": 5, "n": 2, "logprobs": 2}
    first, second = client.completions.create(**asked), client.completions.create(**asked)
    assert [c.text for c in first.choices] == [c.text for c in second.choices]
    assert first.choices[0].text != first.choices[1].text
    logprobs = first.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 12
    assert "".join(logprobs.tokens) == first.choices[0].text
    assert all(value <= 0 for value in logprobs.token_logprobs)


def test_a_stop_string_is_not_shown_and_counts(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="smollm2-135m", prompt="1, 2, 3, 4, 5,", max_tokens=24, temperature=0)
    cut = client.completions.create(
        model="smollm2-135m", prompt="1, 2, 3, 4, 5,", max_tokens=24, temperature=0, stop=[", 8"]
    )
    assert ", 8" in whole.choices[0].text
    assert cut.choices[0].text == whole.choices[0].text.split(", 8")[0]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < whole.usage.completion_tokens


def test_a_second_turn_reads_its_prefix_from_the_cache(client: openai.OpenAI) -> None:
    system = {"role": "system", "content": "You are a careful assistant. " * 30}
    asked = {"model": "smollm2-135m", "max_tokens": 4, "temperature": 0}
    client.chat.completions.create(**asked, messages=[system, *MESSAGES])
    again = client.chat.completions.create(**asked, messages=[system, {"role": "user", "content": "And of Italy?"}])
    assert again.usage.prompt_tokens_details.cached_tokens >= 64


def test_errors_have_the_openai_shape(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="smollm2-135m"):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="smollm2-135m", prompt=[5] * 3000, max_tokens=4)
    assert long.value.code == "context_length_exceeded"
    assert "3000" in str(long.value) and "2048" in str(long.value)
    with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
        client.completions.create(model="smollm2-135m", prompt="x", extra_body={"frequncy_penalty": 1})


def test_a_model_that_gives_no_embeddings_says_what_would_allow_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"api\.embeddings\.pooling") as refused:
        client.embeddings.create(model="smollm2-135m", input="x")
    assert refused.value.code == "embeddings_not_supported"


def test_tokenize_and_detokenize_are_inverse(server: RunningServer) -> None:
    text = "Grüße, 12345 — 你好 🙂"
    ids = server.client.post("/tokenize", json={"model": "smollm2-135m", "prompt": text}).json()["tokens"]
    back = server.client.post("/detokenize", json={"model": "smollm2-135m", "tokens": ids}).json()
    assert back["prompt"] == text
