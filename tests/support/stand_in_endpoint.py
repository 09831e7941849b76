"""An OpenAI-compatible server that is told what it lacks and where it breaks, on a real port, in its own thread."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

MODEL = "stand-in"


@dataclass
class Manner:
    """How the server behaves; without changes it can everything.

    Attributes:
        tokenize: the field that /tokenize takes; "" for none. A token is a word, its id its length.
        ready: status of /ready.
        key: what clients have to send.
        refuses: fields of a request that are answered with 400.
        ids: whether prompts may be token ids.
        chat: whether there is a chat template.
        usage: "full", "plain" (without cached tokens) or "" for none.
        breaks: after two tokens the stream ends "silently", with an "error" event, or "mid-chunk".
        holds_from: a stream is never finished once it has so many tokens.
        pause_s: before each token, so that they come apart.
        requests: the bodies that came, in their order.
    """

    tokenize: str = "prompt"
    ready: int = 200
    models: tuple[str, ...] = (MODEL,)
    max_len: int | None = 4096
    key: str = ""
    refuses: tuple[str, ...] = ()
    ids: bool = True
    chat: bool = True
    usage: str = "full"
    breaks: str = ""
    holds_from: int = 1_000_000
    pause_s: float = 0.0
    requests: list[dict[str, Any]] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)


@contextmanager
def stand_in(manner: Manner) -> Iterator[str]:
    """The URL of a server that behaves so."""
    told: list[str] = []
    ends: list[Callable[[], object]] = []
    started = threading.Event()

    async def run() -> None:
        ended = asyncio.Event()
        ends.append(partial(asyncio.get_running_loop().call_soon_threadsafe, ended.set))
        server = await asyncio.start_server(_Handler(manner, ended).serve, "127.0.0.1", 0)
        told.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        started.set()
        await ended.wait()

    # Connections that clients keep open are cancelled at the end by asyncio.run.
    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield told[0]
    finally:
        ends[0]()
        thread.join(20)
        assert not thread.is_alive()


class _Handler:
    def __init__(self, manner: Manner, ended: asyncio.Event) -> None:
        self._manner = manner
        self._ended = ended

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until the client or an answer ends it."""
        try:
            while True:
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
                headers = dict(line.split(": ", 1) for line in lines if line)
                data = await reader.readexactly(int(headers.get("content-length", "0")))
                body = json.loads(data) if data else {}
                if self._manner.key and headers.get("authorization") != f"bearer {self._manner.key}":
                    _write(writer, 401, {"error": {"message": "this key is none of ours"}})
                    continue
                if not await self._answer(first.split()[1], body, writer):
                    return
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays open."""
        manner = self._manner
        match path:
            case "/v1/models":
                entry = {} if manner.max_len is None else {"max_model_len": manner.max_len}
                _write(writer, 200, {"data": [{"id": name, **entry} for name in manner.models]})
            case "/ready":
                _write(writer, manner.ready, {"error": {"message": "it loads"}})
            case "/version":
                _write(writer, 200, {"version": "1.2.3"})
            case "/tokenize" if manner.tokenize and manner.tokenize in body:
                _write(writer, 200, {"tokens": [len(word) for word in body[manner.tokenize].split()]})
            case "/v1/completions" | "/v1/chat/completions":
                return await self._complete(body, writer)
            case _:
                _write(writer, 404, {"detail": "no such path"})
        return True

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        manner = self._manner
        manner.requests.append(body)
        refused = [name for name in manner.refuses if name in body]
        if isinstance(body.get("prompt"), list) and not manner.ids:
            refused.append("prompt")
        if "messages" in body and not manner.chat:
            refused.append("messages")
        if refused:
            _write(writer, 400, {"error": {"message": f"{refused[0]} is refused"}})
            return True
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            async for event in _stream(manner, body, self._ended):
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                await writer.drain()
        except RuntimeError:
            return False
        writer.write(b"0\r\n\r\n")
        return True


def _write(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status} Said\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


def prompt_tokens(body: dict[str, Any]) -> int:
    """What the stand-in counts: ids, or words."""
    if "messages" in body:
        return sum(len(message["content"].split()) for message in body["messages"])
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) else len(prompt.split())


async def _stream(manner: Manner, body: dict[str, Any], ended: asyncio.Event) -> AsyncIterator[bytes]:
    chat = "messages" in body
    if chat:
        yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    for number in range(body["max_tokens"]):
        if manner.breaks and number == 2:
            if manner.breaks == "error":
                yield _event({"error": {"message": "the engine gave up"}})
                yield b"data: [DONE]\n\n"
            if manner.breaks == "mid-chunk":
                raise RuntimeError("the stand-in breaks off, as it was told to")
            return
        await asyncio.sleep(manner.pause_s)
        text = {"delta": {"content": "word "}} if chat else {"text": "word "}
        last = number + 1 == body["max_tokens"]
        yield _event({"choices": [{"index": 0, **text, "finish_reason": "length" if last else None}]})
        if number + 1 == manner.holds_from:
            manner.held.set()
            await ended.wait()
    if manner.usage and body.get("stream_options", {}).get("include_usage"):
        count = prompt_tokens(body)
        usage: dict[str, Any] = {"prompt_tokens": count, "completion_tokens": body["max_tokens"]}
        if manner.usage == "full":
            usage["prompt_tokens_details"] = {"cached_tokens": count // 2}
        yield _event({"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
