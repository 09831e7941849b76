"""One request and what came of it: the times of its tokens, the server's own counts, or what went wrong."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is sent, encoded before it is due: encoding 32K token ids takes milliseconds.

    Attributes:
        path: of the API, from the server's root.
        payload: the JSON body.
        tokens: how many are to be generated.
        conversation: which one it belongs to.
        turn: its place in the conversation, from 0.
    """

    path: str
    payload: bytes
    tokens: int = 0
    conversation: int = 0
    turn: int = 0


@dataclass
class Answer:
    """What came of one request. All times are of the event loop's clock, in seconds.

    Attributes:
        scheduled: when it was due; latencies count from here, so that a client that is late does not flatter a server
            that made it late (coordinated omission).
        sent: when the client got to it.
        asked: how many tokens were to be generated.
        arrivals: when each chunk with text came, the first also where its text is half a character.
        ended: when the stream ended, or broke.
        prompt_tokens, completion_tokens, cached_tokens: as the server counts; None where it does not say.
        error: the kind of failure, "" for none.
        detail: the server's words about it.
        text: what was generated, reasoning included.
    """

    scheduled: float
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    conversation: int = 0
    turn: int = 0
    asked: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str = ""
    error: str = ""
    detail: str = ""
    text: str = ""

    @classmethod
    def to(cls, request: Request, scheduled: float, sent: float) -> "Answer":
        """An answer to a request, of which nothing has come yet."""
        return cls(scheduled, sent, conversation=request.conversation, turn=request.turn, asked=request.tokens)

    @property
    def ok(self) -> bool:
        """Whether it ended as it should, with a token at least."""
        return not self.error

    @property
    def tokens(self) -> int:
        """Generated tokens: the server's count, or the chunks where it does not say."""
        return len(self.arrivals) if self.completion_tokens is None else self.completion_tokens

    @property
    def first_token_s(self) -> float:
        """Seconds from when it was due to its first token."""
        return self.arrivals[0] - self.scheduled

    @property
    def whole_s(self) -> float:
        """Seconds from when it was due to its last token."""
        return self.arrivals[-1] - self.scheduled

    @property
    def each_token_s(self) -> float | None:
        """Mean seconds a token after the first; None for an answer of one token or one chunk."""
        if self.tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between neighbouring chunks."""
        return [later - sooner for sooner, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str = ""
    message: str = ""


_DECODER = msgspec.json.Decoder(_Chunk)


class StreamReader:
    """Puts the events of a stream into an answer as its bytes arrive."""

    def __init__(self, answer: Answer, clock: Clock) -> None:
        self._answer = answer
        self._clock = clock
        self._rest = b""
        self._parts: list[str] = []
        self._done = False

    def feed(self, data: bytes) -> None:
        """Takes bytes of the body, cut anywhere."""
        now = self._clock()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def finish(self) -> None:
        """The body is whole: what kind of failure it was, where it was one."""
        answer = self._answer
        if self._rest:
            self.feed(b"\n")
        answer.text = "".join(self._parts)
        if answer.error:
            return
        if not self._done:
            self._fail("stream broken", "it ended without [DONE]")
        elif not answer.arrivals:
            self._fail("no tokens", "the stream ended without a token")

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            chunk = _DECODER.decode(data)
        except msgspec.MsgspecError as error:
            self._fail("stream broken", f"an event cannot be read ({error}): {data[:200].decode(errors='replace')}")
            return
        if chunk.error is not None or chunk.object == "error":  # the second way is that of older servers
            self._fail("error event", str(chunk.error or chunk.message)[:300])
        if chunk.usage is not None:
            self._count(chunk.usage)
        for choice in chunk.choices:
            self._take(choice, now)

    def _take(self, choice: _Choice, now: float) -> None:
        answer = self._answer
        text, plain = choice.text or "", choice.text is not None
        said = bool(text)
        if choice.delta is not None:
            delta = choice.delta
            text = (delta.reasoning_content or delta.reasoning or "") + (delta.content or "")
            said = bool(text or delta.tool_calls)
        # A first token may be half a character, whose text comes with the next, or the end itself. The first event of
        # a chat tells the role and no token.
        if said or (not answer.arrivals and (plain or choice.finish_reason)):
            answer.arrivals.append(now)
        if text:
            self._parts.append(text)
        answer.finish_reason = choice.finish_reason or answer.finish_reason

    def _count(self, usage: _Usage) -> None:
        answer = self._answer
        answer.prompt_tokens, answer.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            answer.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _fail(self, kind: str, detail: str) -> None:
        if not self._answer.error:
            self._answer.error, self._answer.detail = kind, detail
