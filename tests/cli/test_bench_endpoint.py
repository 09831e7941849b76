"""What a server lacks is told by name and worked around; where nothing can be measured, an error says why."""

import random
from typing import Any

import pytest
from stand_in_endpoint import Manner, stand_in

from tokenspeed.cli.bench.endpoint import Endpoint, connect, takes_chat
from tokenspeed.cli.bench.prompts import PromptMaker
from tokenspeed.cli.records import ServerError


async def seen(manner: Manner, **options: Any) -> Endpoint:
    """The endpoint as it is found, without what is sent to it later."""
    with stand_in(manner) as url:
        endpoint = await connect(url, **options)
        endpoint.wire.close()
    return endpoint


async def test_a_server_that_lacks_nothing_has_no_notes() -> None:
    endpoint = await seen(Manner())
    assert endpoint.notes == []
    abilities = endpoint.abilities
    assert (abilities.tokenizes, abilities.token_ids, abilities.exact_lengths, abilities.usage) == (
        "prompt",
        True,
        True,
        True,
    )
    assert abilities.max_len == 4096
    assert endpoint.facts == {"model": {"id": "stand-in", "max_model_len": 4096}, "version": {"version": "1.2.3"}}


LACKS: list[tuple[dict[str, Any], str]] = [
    ({"tokenize": ""}, "no /tokenize: prompts are text"),
    ({"ready": 404}, "no /ready: taken to be ready"),
    ({"max_len": None}, "no max_model_len: requests may be longer"),
    ({"refuses": ("ignore_eos",)}, "ignore_eos and min_tokens are refused"),
    ({"refuses": ("stream_options", "min_tokens")}, "no usage in streams: generated tokens are counted chunks"),
    ({"usage": ""}, "no usage in streams: generated tokens are counted chunks"),
    ({"ids": False}, "prompts of token ids are refused: they are sent as text"),
    ({"models": ("stand-in", "other")}, "2 models are served: the first was taken"),
]


@pytest.mark.parametrize(("changes", "note"), LACKS)
async def test_what_a_server_lacks_is_a_note(changes: dict[str, Any], note: str) -> None:
    endpoint = await seen(Manner(**changes))
    assert [told for told in endpoint.notes if told.startswith(note)], endpoint.notes


async def test_the_tokenizer_of_llama_cpp_is_understood() -> None:
    endpoint = await seen(Manner(tokenize="content"))
    assert (endpoint.abilities.tokenizes, endpoint.abilities.token_ids) == ("content", True)


async def test_requests_ask_only_for_what_the_server_takes() -> None:
    manner = Manner(refuses=("stream_options", "ignore_eos"))
    with stand_in(manner) as url:
        endpoint = await connect(url)
        answer = await endpoint.send(endpoint.request("completions", "a b c", 5))
        endpoint.wire.close()
    assert {"stream_options", "ignore_eos", "min_tokens"} & set(manner.requests[-1]) == set()
    assert (answer.tokens, answer.completion_tokens, answer.ok) == (5, None, True)


async def test_answers_have_the_servers_counts() -> None:
    with stand_in(Manner()) as url:
        endpoint = await connect(url)
        shown: list[int] = []
        request = endpoint.request("chat", [{"role": "user", "content": "a b c d"}], 5, 3, 2)
        answer = await endpoint.send(request, None, lambda seen: shown.append(len(seen.arrivals)))
        endpoint.wire.close()
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (4, 5, 2)
    assert (answer.conversation, answer.turn, answer.text, answer.finish_reason) == (3, 2, "word " * 5, "length")
    assert answer.asked == 5
    assert len(answer.arrivals) == 5 == shown[-1]
    assert answer.scheduled == answer.sent <= answer.arrivals[0] <= answer.arrivals[-1] <= answer.ended


BREAKS = [
    ("silently", "stream broken", "it ended without [DONE]"),
    ("error", "error event", "{'message': 'the engine gave up'}"),
    ("mid-chunk", "connection lost", "connection lost: the server closed it in the middle of an answer"),
]


@pytest.mark.parametrize(("breaks", "kind", "detail"), BREAKS)
async def test_a_stream_that_breaks_is_a_failed_answer(breaks: str, kind: str, detail: str) -> None:
    with stand_in(Manner(breaks=breaks)) as url:
        endpoint = await connect(url)
        answer = await endpoint.send(endpoint.request("completions", "a", 5))
        endpoint.wire.close()
    assert (answer.error, answer.detail, len(answer.arrivals)) == (kind, detail, 2)


async def test_a_request_that_takes_too_long_has_failed() -> None:
    with stand_in(Manner(holds_from=3)) as url:
        endpoint = await connect(url, timeout_s=300)
        assert endpoint.timeout_s == 300
        endpoint.timeout_s = 0.05
        answer = await endpoint.send(endpoint.request("completions", "a", 5))
        endpoint.wire.close()
    assert (answer.error, answer.detail) == ("timeout", "not answered within 0.05 s")


async def test_a_refusal_has_the_servers_words() -> None:
    with stand_in(Manner(chat=False)) as url:
        endpoint = await connect(url)
        assert await takes_chat(endpoint) == "status 400: messages is refused"
        endpoint.wire.close()


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"key": "right"}, {"api_key": "wrong"}, "/v1/models: status 401: this key is none of ours; see --api-key-file"),
    ({"ready": 503}, {}, "the server is not ready: it loads"),
    ({"models": ()}, {}, "/v1/models: status 200, names no model; say which model"),
    ({}, {"model": "other"}, "serves stand-in, not other"),
    ({"refuses": ("prompt",)}, {}, "/v1/completions: status 400: prompt is refused"),
    ({"chat": False}, {"api": "chat"}, "/v1/chat/completions: status 400: messages is refused"),
]


@pytest.mark.parametrize(("changes", "options", "told"), REFUSED)
async def test_where_nothing_can_be_measured_an_error_says_why(
    changes: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    with stand_in(Manner(**changes)) as url, pytest.raises(ServerError) as raised:
        await connect(url, **options)
    assert told in str(raised.value)


async def test_nobody_answers() -> None:
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9/v1/models: no connection: .*refused"):
        await connect("http://127.0.0.1:9")


@pytest.mark.parametrize("changes", [{}, {"tokenize": ""}, {"tokenize": "", "usage": ""}])
async def test_prompts_have_the_length_that_is_asked_for(changes: dict[str, Any]) -> None:
    with stand_in(Manner(**changes)) as url:
        endpoint = await connect(url)
        maker = await PromptMaker.of(endpoint, "completions")
        endpoint.wire.close()
    made = maker.make(random.Random(1), 100)
    assert isinstance(made, str if changes else list)
    assert len(made.split() if isinstance(made, str) else made) == 100
    assert len(maker.text(random.Random(1), 50).split()) == 50
    assert made == maker.make(random.Random(1), 100) != maker.make(random.Random(2), 100)
