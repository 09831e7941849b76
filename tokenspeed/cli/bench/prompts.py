"""Prompts that no cache has seen: words in random order, as token ids where the server takes them, else as text."""

import random
from dataclasses import dataclass
from typing import Any, TypeAlias

from tokenspeed.cli.bench.endpoint import Api, Endpoint
from tokenspeed.cli.records import ServerError

Prompt: TypeAlias = str | list[int]

_TEXT = (
    "river stone paper window garden bridge winter letter music colour market engine silver forest island harbour "
    "table summer mountain doctor village orange street kitchen teacher morning friend country school mother office "
    "building history picture number system money nature water animal station bottle circle finger ground island "
    "journey captain machine member minute moment object office parent person planet player pocket policy reason"
)
_WORDS = _TEXT.split()
_CALIBRATION_WORDS = 256


@dataclass(frozen=True)
class Lengths:
    """A number of tokens, or a range of them that is drawn from evenly."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, option: str) -> "Lengths":
        """From "512" or "256:1024"; raises ServerError, which names the option."""
        first, _, second = text.partition(":") if ":" in text else (text, "", text)
        if not all(part.isascii() and part.isdecimal() for part in (first, second)):
            raise ServerError(f'{option} {text}: a number of tokens, or a range as in "256:1024"')
        low, high = int(first), int(second)
        if not 1 <= low <= high:
            raise ServerError(f"{option} {text}: from 1 up, and the lower bound first")
        return cls(low, high)

    def draw(self, source: random.Random) -> int:
        """One of them."""
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


class PromptMaker:
    """Makes prompts of about or exactly so many tokens.

    Attributes:
        ids: what prompts of token ids are drawn from; empty where they are text.
        words_a_token: how much text a token is, where prompts are text.
    """

    def __init__(self, ids: list[int], words_a_token: float) -> None:
        self.ids = ids
        self.words_a_token = words_a_token

    @classmethod
    async def of(cls, endpoint: Endpoint, api: Api) -> "PromptMaker":
        """Asks the server how it tokenizes, by /tokenize, or by the usage of one short request."""
        words = [random.choice(_WORDS) for _ in range(_CALIBRATION_WORDS)]
        if endpoint.abilities.tokenizes:
            count = len(await endpoint.tokenize(" ".join(words)))
            ids = sorted(set(await endpoint.tokenize(f" {_TEXT}")))
            return cls(ids if endpoint.abilities.token_ids else [], len(words) / count)
        text = " ".join(words)
        prompt: Any = [{"role": "user", "content": text}] if api == "chat" else text
        answer = await endpoint.send(endpoint.request(api, prompt, 1))
        count = answer.prompt_tokens or 0
        return cls([], len(words) / count if count else 1.0)

    def make(self, source: random.Random, tokens: int) -> Prompt:
        """As token ids where that is possible."""
        return source.choices(self.ids, k=tokens) if self.ids else self.text(source, tokens)

    def text(self, source: random.Random, tokens: int) -> str:
        """As text."""
        return " ".join(source.choices(_WORDS, k=max(1, round(tokens * self.words_a_token))))


def joined(first: Prompt, second: Prompt) -> Prompt:
    """One after the other; both are of one kind."""
    if isinstance(first, str):
        assert isinstance(second, str)
        return f"{first} {second}"
    assert not isinstance(second, str)
    return first + second
