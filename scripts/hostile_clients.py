"""Clients that mean no good, and one that does; scripts/measure_attack.py says what the others cost it.

The attackers send bodies that are no requests, read slowly or not at all, leave in the middle of questions and answers,
ask for far too much, send schemas without bottom and expressions without end, and hold connections open.
"""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tokenspeed.cli.bench.wire import Wire, WireError

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate", "/tokenize")
ANSWER_S = 60.0


@dataclass
class Target:
    """A server under attack, and what it answered.

    Attributes:
        host, port, name: where it is, and the model that it serves.
        rng: decides what is sent.
        key: goes with every request, where there is one.
        statuses: how often each status was answered, by attack.
        tried: how often each attack was made.
    """

    host: str
    port: int
    name: str
    rng: random.Random
    key: str = ""
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    tried: Counter[str] = field(default_factory=Counter)

    @classmethod
    def at(cls, url: str, name: str, seed: int, key: str = "") -> "Target":
        parts = urlsplit(url)
        return cls(parts.hostname or "127.0.0.1", parts.port or 80, name, random.Random(seed), key)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def wire(self) -> Wire:
        return Wire(self.url, self.key)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, limit=1 << 16)

    def request(self, path: str, body: bytes, *, length: int | None = None) -> bytes:
        """The bytes of a POST; ``length`` is what it claims to have."""
        size = len(body) if length is None else length
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\n{key}Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
        )
        return head.encode() + body

    async def ask(self, attack: str, path: str, body: bytes) -> int:
        """Sends a body and waits for the whole answer; returns its status, which is counted."""
        wire = self.wire()
        try:
            async with asyncio.timeout(ANSWER_S):
                status, _ = await wire.fetch("POST", path, body)
        finally:
            wire.close()
        self.statuses[attack, status] += 1
        return status

    def streamed(self, **more: Any) -> bytes:
        body = {"model": self.name, "prompt": "Tell me a story.", "stream": True, "ignore_eos": True, **more}
        return json.dumps(body).encode()


async def odd_bodies(target: Target) -> None:
    """Bytes that are no JSON, JSON that is no request, and requests with one thing wrong."""
    rng = target.rng
    odd: Any = rng.choice([None, [], {}, -1, 1e308, [[]] * 50, {"a": {"b": [None]}}, 2**70, True])
    name = rng.choice(["messages", "prompt", "n", "stop", "tools", "logit_bias", "stream", "seed", "input", "text"])
    bodies = [
        rng.randbytes(rng.randrange(2000)),
        json.dumps(odd).encode(),
        json.dumps({"model": target.name, name: odd}).encode(),
        b"[" * 100_000,
        b'{"model": "' + b"x" * 50_000,
        json.dumps({"model": target.name, "prompt": "x", "messages": [], name: odd}).encode(),
    ]
    await target.ask("odd bodies", rng.choice(PATHS), rng.choice(bodies))


async def too_much(target: Target) -> None:
    """More of everything than anybody may have."""
    bodies: list[dict[str, Any]] = [
        {"prompt": "x", "n": 10**9},
        {"prompt": ["x"] * 5000, "max_tokens": 1},
        {"prompt": "x" * 1_000_000},
        {"prompt": "x", "stop": ["y"] * 1000},
        {"prompt": "x", "logit_bias": {str(token): 1 for token in range(20_000)}},
        {"prompt": "x", "max_tokens": 10**12},
        {"prompt": "x", "logprobs": 10**6},
        {"prompt": "x", "best_of": 10**4},
    ]
    body = {"model": target.name, **target.rng.choice(bodies)}
    await target.ask("too much", "/v1/completions", json.dumps(body).encode())


async def endless_constraints(target: Target) -> None:
    """Schemas without bottom, expressions without end."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    wide, costly = (
        {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(size)}}
        for size in (20_000, target.rng.randrange(4000, 8000))
    )
    constraints: list[dict[str, Any]] = [
        {"structured_outputs": {"json": deep}},
        {"structured_outputs": {"json": wide}},
        {"structured_outputs": {"json": costly}},
        {"structured_outputs": {"regex": "(" * 5000}},
        {"structured_outputs": {"regex": "((a{1,100}){1,100}){1,100}"}},
        {"structured_outputs": {"regex": "(a|aa|a*)*" * 200 + "$"}},
        {"structured_outputs": {"grammar": "root ::= " + "(" * 2000}},
        {"structured_outputs": {"choice": ["x" * 500] * 5000}},
    ]
    body = {"model": target.name, "prompt": "x", "max_tokens": 4, **target.rng.choice(constraints)}
    await target.ask("endless constraints", "/v1/completions", json.dumps(body).encode())


async def leaves(target: Target) -> None:
    """Goes away in the middle of its question, before the answer, or in the middle of it."""
    rng = target.rng
    whole = target.request("/v1/completions", target.streamed(max_tokens=400, n=rng.choice([1, 1, 4])))
    reader, writer = await target.connect()
    try:
        writer.write(whole[: rng.randrange(1, len(whole))] if rng.random() < 0.4 else whole)
        await writer.drain()
        for _ in range(rng.randrange(4)):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(100), 0.1)
    finally:
        writer.transport.abort()


async def reads_slowly(target: Target) -> None:
    """Asks for a long answer with much in it, and takes next to nothing of it."""
    reader, writer = await target.connect()
    try:
        writer.write(target.request("/v1/completions", target.streamed(max_tokens=400, logprobs=5, n=2)))
        await writer.drain()
        for _ in range(4):
            await reader.read(10)
            await asyncio.sleep(0.25)
    finally:
        writer.transport.abort()


async def dribbles(target: Target) -> None:
    """Says that it has a body, and sends a byte of it now and then."""
    _, writer = await target.connect()
    try:
        writer.write(target.request("/v1/completions", b"{", length=1000))
        for _ in range(4):
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.25)
    finally:
        writer.transport.abort()


ATTACKS: tuple[Callable[[Target], Awaitable[None]], ...] = (
    odd_bodies, too_much, endless_constraints, leaves, leaves, reads_slowly, dribbles,
)  # fmt: skip


async def attack(
    target: Target,
    stop: asyncio.Event,
    connections: int,
    attacks: Iterable[Callable[[Target], Awaitable[None]]] = ATTACKS,
) -> None:
    """Runs an attacker of each kind until ``stop``, with ``connections`` idle ones beside them."""
    held: list[asyncio.StreamWriter] = []

    async def hold() -> None:
        for _ in range(connections):
            with contextlib.suppress(OSError):
                held.append((await target.connect())[1])

    async def again(one: Callable[[Target], Awaitable[None]]) -> None:
        while not stop.is_set():
            target.tried[one.__name__] += 1
            with contextlib.suppress(OSError, WireError, asyncio.IncompleteReadError):
                await one(target)
            await asyncio.sleep(target.rng.uniform(0.0, 0.1))

    try:
        await asyncio.gather(hold(), *(again(one) for one in attacks))
    finally:
        for writer in held:
            writer.transport.abort()


async def good_requests(target: Target, until: Callable[[int], bool], tokens: int = 16) -> list[float]:
    """Asks, one request after the other, until ``until(requests so far)``; returns the seconds that each took.

    Raises AssertionError where one is not answered as it should be.
    """
    wire = target.wire()
    body = target.streamed(max_tokens=tokens, temperature=0, stream_options={"include_usage": True})
    times: list[float] = []
    while not until(len(times)):
        began = time.perf_counter()
        async with asyncio.timeout(ANSWER_S):
            status, answer = await wire.fetch("POST", "/v1/completions", body)
        times.append(time.perf_counter() - began)
        *_, last, done = answer.decode().strip().split("\n\n")
        assert (status, done) == (200, "data: [DONE]"), f"{status}: {answer[-300:]!r}"
        assert json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"] == tokens, last
        assert answer.count(b'"finish_reason":"length"') == 1
    wire.close()
    return times
