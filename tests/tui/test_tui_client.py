"""The client against a real HTTP server, and against none."""

import asyncio
import socket

import pytest

from tokenspeed_tui.client import STATE_PATH, HttpSource, normalised_url
from tokenspeed_tui.observation import Observation


def first_look(source: HttpSource) -> Observation:
    async def look():
        async for observation in source.observations():
            return observation
        raise AssertionError("a server never ends")

    return asyncio.run(look())


def unused_url() -> str:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{held.getsockname()[1]}"


def test_state_and_probes_are_brought_as_they_came(story, tiny_server):
    state = story.state(story.snapshot()) | {"something new": [1, 2]}
    tiny_server.answers |= {STATE_PATH: (200, state), "/ready": (503, {}), "/progress": (404, {})}
    observation = first_look(HttpSource(tiny_server.url))
    assert observation.state == state
    assert observation.error == ""
    assert (observation.live.passed, observation.ready.passed, observation.progress.passed) == (True, False, None)
    assert sorted(tiny_server.asked) == [("/live", None), ("/progress", None), ("/ready", None), (STATE_PATH, None)]


def test_a_key_is_sent(story, tiny_server):
    first_look(HttpSource(tiny_server.url, api_key="secret"))
    assert {key for _, key in tiny_server.asked} == {"Bearer secret"}


def test_no_server_is_an_observation_with_the_url():
    url = unused_url()
    observation = first_look(HttpSource(url))
    assert observation.state is None
    assert observation.error.startswith(f"no server answers at {url} (the connection failed")
    assert observation.live.passed is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, {}), "gave status 404: is it a TokenSpeed server?"),
        ((401, {}), "gave status 401: it wants a key, give --api-key-file"),
        ((200, b"<html>"), "and no JSON: is it a TokenSpeed server?"),
        ((200, [1]), "and JSON that is no object: is it a TokenSpeed server?"),
    ],
)
def test_another_server_is_named_as_such(tiny_server, answer, words):
    tiny_server.answers[STATE_PATH] = answer
    observation = first_look(HttpSource(tiny_server.url))
    assert observation.state is None
    assert observation.error.endswith(words)
    assert tiny_server.url in observation.error
    assert observation.live.passed is True


def test_urls_as_people_type_them():
    assert normalised_url("localhost:8000") == "http://localhost:8000"
    assert normalised_url("https://host/prefix/") == "https://host/prefix"
    for wrong in ("ftp://host", "http://", "http://host:port"):
        with pytest.raises(ValueError, match=r"give (one|a URL) like"):
            normalised_url(wrong)


def detail_look(server, request: str) -> Observation:
    source = HttpSource(server.url)
    source.watch_request(request)
    return first_look(source)


def test_the_detail_of_a_watched_request_comes_along(story, tiny_server):
    tiny_server.answers[STATE_PATH] = (200, story.state(story.snapshot()))
    tiny_server.answers["/v1/internal/requests/a%2Fb"] = (200, {"handle": 3})
    observation = detail_look(tiny_server, "a/b")
    assert (observation.detail, observation.detail_error) == ({"handle": 3}, "")
    assert first_look(HttpSource(tiny_server.url)).detail is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, {}), "the server knows nothing more of it"),
        ((500, {}), "gave status 500"),
        ((200, b"<html>"), "gave status 200 and no JSON"),
        ((200, [1]), "gave status 200 and JSON that is no object"),
    ],
)
def test_a_detail_that_does_not_come_says_why(story, tiny_server, answer, words):
    tiny_server.answers[STATE_PATH] = (200, story.state(story.snapshot()))
    tiny_server.answers["/v1/internal/requests/3"] = answer
    observation = detail_look(tiny_server, "3")
    assert observation.detail is None
    assert words in observation.detail_error
    assert observation.state is not None
