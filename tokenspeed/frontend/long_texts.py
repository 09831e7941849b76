"""Long texts, so that they delay nobody else: where they are worked on, and which need not be read to their end."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tokenspeed.frontend.errors import ContextLengthExceeded, RequestRefused, prompt_name
from tokenspeed.frontend.tokenizer import Tokenizer

_Result = TypeVar("_Result")

THREAD_ABOVE_CHARACTERS = 4096
"""Longer texts are rendered and tokenized on a worker thread, so that the event loop goes on serving streams."""

ALONE_ABOVE_CHARACTERS = 1 << 16
"""Of still longer ones one is worked on at a time: they take one core, and shorter ones do not wait for them."""

PIECE_CHARACTERS = 1 << 16
"""A text that is probably too long is tokenized so much at a time, until it is known to be."""

PROBABLY_CHARACTERS = 16
"""Tokens of text have about four characters. A text with more than so many for each token that a prompt may have is
looked at piece by piece first; a shorter one is tokenized at once."""

MARGIN = 2
"""Pieces that together have so many times the tokens that a prompt may have prove that the text has too many: where it
is cut it has a few tokens more in pieces than as a whole, not twice as many."""


class TextDesk:
    """Where texts are worked on. Lives in one event loop."""

    def __init__(self) -> None:
        self._alone = asyncio.Lock()

    async def work(self, work: Callable[[], _Result], characters: int) -> _Result:
        """Returns what ``work`` does, which has texts of so many characters to do with."""
        if characters <= THREAD_ABOVE_CHARACTERS:
            return work()
        if characters <= ALONE_ABOVE_CHARACTERS:
            return await asyncio.to_thread(work)
        async with self._alone:
            return await asyncio.to_thread(work)


@dataclass(frozen=True, slots=True)
class PromptBound:
    """How long prompts may be.

    Attributes:
        context: tokens of prompt and answer together.
        most: tokens of a prompt; 0 for what the context allows.
    """

    context: int
    most: int

    def check_text(self, tokenizer: Tokenizer, text: str, field: str = "prompt") -> None:
        """Raises RequestRefused where ``text`` is far beyond the bound. One that is a little beyond it passes: its
        tokens have to be counted. ``field`` is the caller's name for it."""
        within = min(self.context, self.most or self.context)
        if len(text) <= max(PROBABLY_CHARACTERS * within, PIECE_CHARACTERS):
            return
        tokens = 0
        for at in range(0, len(text), PIECE_CHARACTERS):
            tokens += len(tokenizer.encode(text[at : at + PIECE_CHARACTERS], add_special_tokens=False))
            if tokens > MARGIN * within:
                raise self._too_long(tokens // MARGIN, field)

    def check_messages(self, count: int) -> None:
        """Raises RequestRefused where a conversation has more messages than tokens fit."""
        if count > min(self.context, self.most or self.context):
            raise self._too_long(count)

    def check_tokens(self, count: int, field: str = "prompt") -> None:
        """Raises RequestRefused for a prompt of more tokens than ``most``; the context is looked at with the answer."""
        if 0 < self.most < count:
            raise RequestRefused(
                f"{prompt_name(field)} has {count} tokens, and this server takes {self.most} at most",
                "prompt_too_long",
                field,
            )

    def _too_long(self, least: int, field: str = "prompt") -> RequestRefused:
        if 0 < self.most < self.context:
            return RequestRefused(
                f"{prompt_name(field)} has more than {least} tokens, and this server takes {self.most} at most",
                "prompt_too_long",
                field,
            )
        return ContextLengthExceeded(self.context, least, None, field, at_least=True)
