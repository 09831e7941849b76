"""What is asked of a server: random prompts, prefixes in common, growing sessions, or a file's own prompts."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenspeed.cli.bench.answers import Answer, Request
from tokenspeed.cli.bench.endpoint import Api, Endpoint
from tokenspeed.cli.bench.load import Conversation
from tokenspeed.cli.bench.prompts import Lengths, Prompt, PromptMaker, joined
from tokenspeed.cli.records import ServerError


@dataclass(frozen=True)
class Asker:
    """Makes requests of prompts: the server, the API that is used, and where prompts come from."""

    endpoint: Endpoint
    maker: PromptMaker
    api: Api

    def prompt(self, source: random.Random, tokens: int) -> Prompt:
        """New text; for a chat never token ids."""
        return self.maker.text(source, tokens) if self.api == "chat" else self.maker.make(source, tokens)

    def request(self, prompt: Prompt, tokens: int, conversation: int) -> Request:
        """A request of its own, in the shape of the API."""
        asked: Any = [{"role": "user", "content": prompt}] if self.api == "chat" else prompt
        return self.endpoint.request(self.api, asked, tokens, conversation)


class Workload(Protocol):
    """Which requests there are. ``by_turn``: the report tells turns apart."""

    by_turn: bool

    @property
    def described(self) -> str:
        """In words."""

    @property
    def longest(self) -> int:
        """The most tokens that one request and its answer can have, 0 where that is not known."""

    def conversations(self, asker: Asker, source: random.Random, count: int | None) -> Iterator[Conversation]:
        """So many (None: without end), the same ones for the same source."""


class Single:
    """A conversation of one request."""

    def __init__(self, request: Request) -> None:
        self._request = request

    async def next(self, last: Answer | None) -> Request | None:
        return self._request if last is None else None


def _numbers(count: int | None) -> Iterator[int]:
    number = 0
    while count is None or number < count:
        yield number
        number += 1


@dataclass(frozen=True)
class RandomWorkload:
    """Prompts that have nothing in common."""

    input_len: Lengths
    output_len: Lengths
    by_turn = False

    @property
    def described(self) -> str:
        return f"random prompts of {self.input_len} tokens, answers of {self.output_len}"

    @property
    def longest(self) -> int:
        return self.input_len.high + self.output_len.high

    def conversations(self, asker: Asker, source: random.Random, count: int | None) -> Iterator[Conversation]:
        for number in _numbers(count):
            prompt = asker.prompt(source, self.input_len.draw(source))
            yield Single(asker.request(prompt, self.output_len.draw(source), number))


@dataclass(frozen=True)
class SharedPrefixWorkload:
    """Groups of requests; those of a group begin with the same tokens. Groups take turns."""

    prefix_len: int
    groups: int
    input_len: Lengths
    output_len: Lengths
    by_turn = False

    @property
    def described(self) -> str:
        return (
            f"{self.groups} groups that share a prefix of {self.prefix_len} tokens, then {self.input_len} of "
            f"their own, answers of {self.output_len}"
        )

    @property
    def longest(self) -> int:
        return self.prefix_len + self.input_len.high + self.output_len.high

    def conversations(self, asker: Asker, source: random.Random, count: int | None) -> Iterator[Conversation]:
        prefixes = [asker.prompt(source, self.prefix_len) for _ in range(self.groups)]
        for number in _numbers(count):
            own = asker.prompt(source, self.input_len.draw(source))
            prompt = joined(prefixes[number % self.groups], own)
            yield Single(asker.request(prompt, self.output_len.draw(source), number))


@dataclass(frozen=True)
class SessionsWorkload:
    """Agents at work: every turn sends all that was said, the model's last answer, and what a tool returned.

    All sessions begin with the same ``prefix_len`` tokens, as a system message and tool descriptions would be.
    """

    turns: int
    prefix_len: int
    input_len: Lengths
    output_len: Lengths
    by_turn = True

    @property
    def described(self) -> str:
        return (
            f"sessions of {self.turns} turns after a common prefix of {self.prefix_len} tokens; each turn adds "
            f"{self.input_len} tokens and the answer of {self.output_len}"
        )

    @property
    def longest(self) -> int:
        return self.prefix_len + self.turns * (self.input_len.high + self.output_len.high)

    def conversations(self, asker: Asker, source: random.Random, count: int | None) -> Iterator[Conversation]:
        prefix = asker.prompt(source, self.prefix_len)
        for number in _numbers(count):
            yield _Session(asker, self, prefix, random.Random(source.getrandbits(64)), number)


class _Session:
    def __init__(
        self, asker: Asker, workload: SessionsWorkload, prefix: Prompt, source: random.Random, number: int
    ) -> None:
        self._asker = asker
        self._workload = workload
        self._source = source
        self._number = number
        self._turn = -1
        self._prompt = prefix
        self._messages = [{"role": "system", "content": str(prefix)}]

    async def next(self, last: Answer | None) -> Request | None:
        """The next turn; a session ends early where a turn failed, since there is no answer to go on from."""
        self._turn += 1
        if self._turn == self._workload.turns or (last is not None and not last.ok):
            return None
        added = self._asker.prompt(self._source, self._workload.input_len.draw(self._source))
        tokens = self._workload.output_len.draw(self._source)
        endpoint = self._asker.endpoint
        if self._asker.api == "chat":
            if last is not None:
                self._messages.append({"role": "assistant", "content": last.text})
            told = f"The tool returned: {added}" if last is not None else str(added)
            self._messages.append({"role": "user", "content": told})
            return endpoint.request("chat", self._messages, tokens, self._number, self._turn)
        if last is not None:
            self._prompt = joined(self._prompt, await self._said(last.text))
        self._prompt = joined(self._prompt, added)
        return endpoint.request("completions", self._prompt, tokens, self._number, self._turn)

    async def _said(self, text: str) -> Prompt:
        if isinstance(self._prompt, str):
            return text
        return await self._asker.endpoint.tokenize(text) if text else []


@dataclass(frozen=True)
class FileWorkload:
    """The prompts of a file, in their order, from the beginning again where more are asked for."""

    path: Path
    entries: tuple[tuple[Any, int], ...]
    """Prompt or messages, and how many tokens to generate."""
    api: Api
    by_turn = False

    @classmethod
    def read(cls, path: Path, output_len: Lengths, source: random.Random) -> "FileWorkload":
        """Reads JSON lines: {"prompt": text or ids} or {"messages": [...]}, and "max_tokens" where it is not
        ``output_len``. Raises ServerError, which names file and line."""
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ServerError(f"--file {path} cannot be read: {error}") from error
        entries, kinds = [], set()
        for number, line in enumerate(lines, 1):
            if line.strip():
                kind, asked, tokens = _entry(line, f"{path}:{number}")
                kinds.add(kind)
                entries.append((asked, tokens or output_len.draw(source)))
        if not entries:
            raise ServerError(f"--file {path} holds no prompt")
        if len(kinds) > 1:
            raise ServerError(f"--file {path} mixes prompt and messages: put them into two files")
        return cls(path, tuple(entries), "chat" if kinds == {"messages"} else "completions")

    @property
    def described(self) -> str:
        return f"{len(self.entries)} prompts of {self.path.name}"

    @property
    def longest(self) -> int:
        return 0

    def conversations(self, asker: Asker, source: random.Random, count: int | None) -> Iterator[Conversation]:
        del source  # nothing is random about a file
        for number in _numbers(count):
            asked, tokens = self.entries[number % len(self.entries)]
            yield Single(asker.endpoint.request(self.api, asked, tokens, number))


def _entry(line: str, where: str) -> tuple[str, Any, int | None]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ServerError(f"{where}: no JSON ({error})") from None
    kinds = [kind for kind in ("prompt", "messages") if isinstance(found, dict) and found.get(kind)]
    if len(kinds) != 1:
        raise ServerError(f'{where}: a line is an object with "prompt" or "messages"')
    asked = found[kinds[0]]
    if kinds[0] == "messages":
        if not isinstance(asked, list) or not all(isinstance(item, dict) and "role" in item for item in asked):
            raise ServerError(f'{where}: "messages" is a list of objects with "role" and "content"')
    elif not isinstance(asked, str) and not (isinstance(asked, list) and all(type(item) is int for item in asked)):
        raise ServerError(f'{where}: "prompt" is text or a list of token ids')
    tokens = found.get("max_tokens")
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise ServerError(f'{where}: "max_tokens" is a whole number from 1 up')
    return kinds[0], asked, tokens
