"""A client of a running server, for measuring and verifying it: the OpenAI-compatible API as any client sees it."""

import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tokenspeed.cli.records import ServerError

_CONNECT_S = 5.0
_WORDS = "river stone paper window garden bridge winter letter music colour market engine silver forest island harbour"


@dataclass
class StreamedAnswer:
    """One streamed completion.

    Attributes:
        started: when the request was sent, on the monotonic clock.
        arrivals: when each chunk with text came; the first also where it is empty (half a character).
        ended: when the stream ended.
        text, finish_reason: of the only choice.
        prompt_tokens, completion_tokens: as the server counts.
        done: whether the stream ended with [DONE].
    """

    started: float = field(default_factory=time.monotonic)
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    done: bool = False

    @property
    def first_token_s(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.started


class Client:
    """Talks to one server. ``model`` and ``max_len`` are what /v1/models says."""

    def __init__(self, http: httpx.AsyncClient, model: str, max_len: int) -> None:
        self.http = http
        self.model = model
        self.max_len = max_len

    async def stream(self, path: str, **body: Any) -> StreamedAnswer:
        """A streamed answer; raises ServerError with the server's words where it refuses or breaks off."""
        answer = StreamedAnswer()
        request = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **body}
        try:
            async with self.http.stream("POST", path, json=request) as response:
                if response.status_code != 200:
                    raise ServerError(
                        f"{path}: status {response.status_code}: {(await response.aread()).decode()[:500]}"
                    )
                async for line in response.aiter_lines():
                    _take(answer, line)
        except httpx.HTTPError as error:
            raise ServerError(f"{path}: {type(error).__name__} {error}") from error
        answer.ended = time.monotonic()
        return answer

    async def prompt(self, tokens: int) -> list[int]:
        """So many token ids of words in random order: no prefix of it is in any cache."""
        words = _WORDS.split()
        ids: list[int] = []
        while len(ids) < tokens:
            text = " ".join(random.choice(words) for _ in range(tokens))
            ids += await self.post("/tokenize", prompt=text, add_special_tokens=False, key="tokens")
        return ids[:tokens]

    async def post(self, path: str, *, key: str, **body: Any) -> Any:
        """A JSON answer's field; raises ServerError where the server refuses."""
        try:
            response = await self.http.post(path, json={"model": self.model, **body})
        except httpx.HTTPError as error:
            raise ServerError(f"{path}: {type(error).__name__} {error}") from error
        if response.status_code != 200:
            raise ServerError(f"{path}: status {response.status_code}: {response.text[:500]}")
        return response.json()[key]


@asynccontextmanager
async def connect(url: str, api_key: str = "") -> AsyncIterator[Client]:
    """A client of the server at ``url``; raises ServerError where none answers, or where it is not ready."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(None, connect=_CONNECT_S)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=timeout, trust_env=False
    ) as http:
        try:
            ready = await http.get("/ready")
            models = await http.get("/v1/models")
        except httpx.HTTPError as error:
            raise ServerError(f"{url}: no server answers ({error}); tokenspeed status shows yours") from error
        if ready.status_code != 200:
            raise ServerError(f"{url}: the server is not ready: {ready.text[:300]}")
        if models.status_code != 200:
            raise ServerError(f"{url}/v1/models: status {models.status_code}: {models.text[:300]}; see --api-key-file")
        model = models.json()["data"][0]
        yield Client(http, str(model["id"]), int(model.get("max_model_len") or 2048))


def _take(answer: StreamedAnswer, line: str) -> None:
    """Reads one line of the event stream."""
    if not line.startswith("data: "):
        return
    data = line.removeprefix("data: ")
    if data == "[DONE]":
        answer.done = True
        return
    chunk = json.loads(data)
    if "error" in chunk:
        raise ServerError(f"the stream broke off: {chunk['error']}")
    if usage := chunk.get("usage"):
        answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in chunk["choices"]:
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        if text or not answer.arrivals:
            answer.arrivals.append(time.monotonic())
        answer.text += text
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
