"""Reading answers off a connection: however the bytes are cut, the same comes out, and a damaged one is named."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.cli.bench.answers import Answer, StreamReader
from tokenspeed.cli.bench.wire import MessageReader, Wire, WireError

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"6;note=x\r\nHello \r\n5\r\nwo\r\nr\r\n1\r\nd\r\n0\r\nTrailer: y\r\n\r\n"
)
SIZED = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nHello"
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\n\r\nHello"
EMPTY = b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@given(cuts=st.sets(st.integers(1, len(CHUNKED) - 1)))
def test_the_cuts_of_a_message_make_no_difference(cuts: set[int]) -> None:
    for message, body, status in (
        (CHUNKED, b"Hello wo\r\nrd", 200),
        (SIZED, b"Hello", 404),
        (UNTIL_CLOSED, b"Hello", 200),
    ):
        reader, found, at = MessageReader(), b"", 0
        for cut in [*sorted(cut for cut in cuts if cut < len(message)), len(message)]:
            found += reader.feed(message[at:cut])
            at = cut
        assert (found, reader.status) == (body, status)
        assert reader.complete is (message is not UNTIL_CLOSED)
        assert reader.keeps_open is (message is not UNTIL_CLOSED)
        reader.end()
        assert reader.complete


def test_an_answer_without_a_body_is_complete_and_may_end_the_connection() -> None:
    reader = MessageReader()
    reader.feed(EMPTY)
    assert (reader.complete, reader.keeps_open) == (True, False)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "no HTTP: the answer begins with 'SSH-2.0-OpenSSH_9.6'"),
        (b"HTTP/1.1 OK\r\n\r\n", "no HTTP: the answer begins with 'HTTP/1.1 OK'"),
        (b"x" * 70_000, "no HTTP: the head of the answer does not end"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "no HTTP: a chunk of size b'zz'"),
    ],
)
def test_what_is_no_http_is_said(data: bytes, told: str) -> None:
    with pytest.raises(WireError, match=told):
        MessageReader().feed(data)


@pytest.mark.parametrize("whole", [CHUNKED, SIZED])
def test_a_message_that_is_cut_off_is_an_error(whole: bytes) -> None:
    reader = MessageReader()
    reader.feed(whole[:-2])
    with pytest.raises(WireError, match="connection lost"):
        reader.end()


EVENTS = (
    b": a comment\r\n\r\n"
    b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    b'data: {"choices": [{"delta": {"reasoning_content": "so"}}]}\n\n'
    b'data:{"choices": [{"delta": {"content": " t\xc3\xbc"}, "finish_reason": null}]}\r\n\r\n'
    b'data: {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}\n\n'
    b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4, "prompt_tokens_details": null}}\n\n'
    b"data: [DONE]"
)


@given(cuts=st.sets(st.integers(1, len(EVENTS) - 1)))
def test_the_cuts_of_a_stream_make_no_difference(cuts: set[int]) -> None:
    answer = Answer(0)
    times = iter(range(1000))
    reader, at = StreamReader(answer, lambda: float(next(times))), 0
    for cut in [*sorted(cuts), len(EVENTS)]:
        reader.feed(EVENTS[at:cut])
        at = cut
    reader.finish()
    assert (answer.error, answer.text, answer.finish_reason) == ("", "so tü", "stop")
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (7, 4, None)
    # The role is no token; a call of a tool is.
    assert len(answer.arrivals) == 3


def read(*events: bytes) -> Answer:
    answer = Answer(0)
    reader = StreamReader(answer, lambda: 1.0)
    for event in events:
        reader.feed(b"data: " + event + b"\n\n")
    reader.finish()
    return answer


def test_a_first_token_without_text_has_come() -> None:
    half = read(b'{"choices": [{"text": ""}]}', b'{"choices": [{"text": "x"}]}', b"[DONE]")
    assert (len(half.arrivals), half.ok) == (2, True)
    end = read(b'{"choices": [{"delta": {}, "finish_reason": "stop"}]}', b"[DONE]")
    assert (len(end.arrivals), end.ok) == (1, True)


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([b'{"choices": [{"text": "x"}]}'], "stream broken"),
        ([b"[DONE]"], "no tokens"),
        ([b"{", b"[DONE]"], "stream broken"),
        ([b'{"error": {"message": "gone"}}', b"[DONE]"], "error event"),
        ([b'{"choices": [{"text": "x"}]}', b'{"object": "error", "message": "gone"}', b"[DONE]"], "error event"),
    ],
)
def test_a_stream_that_fails_says_how(events: list[bytes], kind: str) -> None:
    assert read(*events).error == kind


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[str]:
    """The URL of a server whose connections ``handler`` takes."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/v1/"


def answering(connections: list[str], answers: int) -> Handler:
    """Answers so many requests on a connection and closes it after the last without a word."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append("")
        for _ in range(answers):
            head = await reader.readuntil(b"\r\n\r\n")
            connections[-1] = head.decode().split("\r\n")[0]
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    return handle


async def test_connections_are_used_again_and_replaced_once_the_server_has_closed_them() -> None:
    connections: list[str] = []
    async with listening(answering(connections, answers=2)) as url:
        wire = Wire(url, "key")
        for _ in range(5):
            assert await wire.fetch("GET", "/ready") == (200, b"ok")
        wire.close()
    assert connections == ["GET /base/ready HTTP/1.1"] * 3


async def test_a_server_that_hangs_up_is_a_lost_connection() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\nHell")
        writer.close()

    async with listening(hang_up) as url:
        with pytest.raises(WireError, match="connection lost") as raised:
            await Wire(url).fetch("GET", "/")
    assert raised.value.kind == "connection lost"


async def test_a_server_without_tls_is_told_apart_from_one_that_refuses() -> None:
    async def speak_plainly(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with listening(speak_plainly) as url:
        with pytest.raises(WireError, match=r"no connection: .*SSL"):
            await Wire(url.replace("http:", "https:")).fetch("GET", "/")
    with pytest.raises(WireError, match="no connection: Connection refused"):
        await Wire(url).fetch("GET", "/")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("ftp://x", "no http:// or https:// address"),
        ("http://", "no http:// or https:// address"),
        ("http://me:secret@x", "a key is given with --api-key-file"),
    ],
)
def test_an_address_that_is_none_is_refused(url: str, told: str) -> None:
    with pytest.raises(WireError, match=told):
        Wire(url)


def test_addresses_may_leave_out_what_goes_without_saying() -> None:
    assert Wire("localhost:8000/v1").url == "http://localhost:8000"
    assert Wire("https://[::1]/api/v1/").url == "https://[::1]:443/api"
