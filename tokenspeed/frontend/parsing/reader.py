"""Text that arrives in pieces, read as if it were whole.

A grammar is a generator: where it needs more text it yields, and it goes on at that place once there is more. It reads
through the methods of a Reader alone, each of which takes the same text whatever the pieces were; that is why no split
can change what comes out.
"""

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import TypeVar

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""A grammar, or a part of one, that returns a ``_T``."""
Sink = Callable[[str], None]
"""Takes text, piece by piece."""

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[\w.:\-]*")


class Reader:
    """The text that was not read yet.

    Attributes:
        ended: no more will come.
        complete: no more will come because the model ended its answer, not because it was cut off.
    """

    def __init__(self) -> None:
        self._text = ""
        self.ended = False
        self.complete = False
        self._kept: list[str] | None = None

    def feed(self, text: str) -> None:
        self._text += text

    def through(self, markers: tuple[str, ...], sink: Sink) -> Steps[str]:
        """Gives what stands before the first of ``markers`` to ``sink`` and takes the marker too.

        Returns the marker, "" where the text ended without one. No marker may begin another.
        """
        pattern = _pattern(markers)
        while True:
            found = pattern.search(self._text)
            hold = len(self._text) if self.ended else _possible_start(markers, self._text)
            if found is not None and found.start() <= hold:
                self._pass(found.start(), sink)
                return self.take(len(found[0]))
            self._pass(hold, sink)
            if self.ended:
                return ""
            yield

    def rest(self, sink: Sink) -> Steps[None]:
        """Gives everything to ``sink``."""
        while True:
            self._pass(len(self._text), sink)
            if self.ended:
                return
            yield

    def space(self) -> Steps[str]:
        """Takes white space."""
        return (yield from self._while(_SPACE))

    def word(self) -> Steps[str]:
        """Takes letters, digits and the marks that names have."""
        return (yield from self._while(_WORD))

    def lines(self) -> Steps[str]:
        """Takes line breaks."""
        return (yield from self._while(_LINES))

    def starts(self, *options: str) -> Steps[str]:
        """Takes the option that the text goes on with, the longest of several; returns it, "" where there is none."""
        while not self.ended and any(one.startswith(self._text) and one != self._text for one in options):
            yield
        return self.take(max((len(one) for one in options if self._text.startswith(one)), default=0))

    def peek(self) -> Steps[str]:
        """Returns the next character without taking it; "" at the end of the text."""
        while not self._text and not self.ended:
            yield
        return self._text[:1]

    def take(self, count: int) -> str:
        """Takes so many characters, which must be there."""
        taken, self._text = self._text[:count], self._text[count:]
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def keep(self) -> None:
        """From here on, what is taken is kept, so that it can be given back as text by ``release``."""
        self._kept = []

    def release(self) -> str:
        """Returns what was taken since ``keep``, and keeps no more."""
        kept, self._kept = self._kept or [], None
        return "".join(kept)

    def json_value(self, sink: Sink) -> Steps[bool]:
        """Gives one JSON value to ``sink`` as it is written, and returns whether it ended.

        An object or array ends with the bracket that matches its first; what is between is not checked. A text ends
        with its quote; anything else before a comma, a closing bracket or white space.
        """
        first = yield from self.peek()
        if first == '"':
            self._pass(1, sink)
            return (yield from self.string_rest(sink))
        if first and first in "{[":
            return (yield from self._bracketed(sink, _BRACKET))
        sink((yield from self._while(_SCALAR)))
        return bool(self._text)

    def python_arguments(self, sink: Sink) -> Steps[bool]:
        """Gives the rest of a call's arguments, behind their opening bracket, through the closing one, to ``sink``."""
        return (yield from self._bracketed(sink, _PYTHON_BRACKET, 1))

    def string_rest(self, sink: Sink, quote: str = '"') -> Steps[bool]:
        """Gives what follows an opening quote, through the closing one, to ``sink``; returns whether that came."""
        part = _STRING_PARTS[quote]
        while True:
            whole = part.match(self._text)
            assert whole is not None  # it matches nothing too
            end = whole.end()
            if self._text[end : end + 1] == quote:
                self._pass(end + 1, sink)
                return True
            self._pass(len(self._text) if self.ended else end, sink)
            if self.ended:
                return False
            yield

    def _bracketed(self, sink: Sink, pattern: re.Pattern[str], depth: int = 0) -> Steps[bool]:
        while True:
            found = pattern.search(self._text)
            if found is None:
                self._pass(len(self._text), sink)
                if self.ended:
                    return False
                yield
                continue
            self._pass(found.end(), sink)
            if found[0] in _STRING_PARTS:
                if not (yield from self.string_rest(sink, found[0])):
                    return False
            else:
                depth += 1 if found[0] in "{[(" else -1
                if depth == 0:
                    return True

    def _while(self, pattern: re.Pattern[str]) -> Steps[str]:
        pieces = []
        while True:
            found = pattern.match(self._text)
            assert found is not None  # all of them match nothing too
            pieces.append(self.take(found.end()))
            if self._text or self.ended:
                return "".join(pieces)
            yield

    def _pass(self, count: int, sink: Sink) -> None:
        if count:
            sink(self.take(count))


_LINES = re.compile(r"[\r\n]*")
_SCALAR = re.compile(r"[^\s,{}\[\]]*")
_BRACKET = re.compile(r'["{}\[\]]')
_PYTHON_BRACKET = re.compile(r"""["'{}\[\]()]""")
_STRING_PARTS = {quote: re.compile(rf"(?:[^{quote}\\]++|\\.)*+", re.DOTALL) for quote in "\"'"}


@cache
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(marker) for marker in markers))


def _possible_start(markers: tuple[str, ...], text: str) -> int:
    """Where the longest end of ``text`` that begins a marker starts; the length of ``text`` where there is none."""
    for at in range(max(0, len(text) - max(map(len, markers)) + 1), len(text)):
        if any(marker.startswith(text[at:]) for marker in markers):
            return at
    return len(text)


class Machine:
    """A grammar at work: text in by ``push``, and ``finish`` once; what it says goes where the grammar sends it."""

    def __init__(self, grammar: Callable[[Reader], Steps[None]]) -> None:
        self._reader = Reader()
        self._steps = grammar(self._reader)
        next(self._steps, None)  # to the place where it waits for text; what it knows before that is known then

    def push(self, text: str) -> None:
        """Takes the next piece."""
        self._reader.feed(text)
        next(self._steps, None)

    def finish(self, complete: bool = False) -> None:
        """No more text will come; ``complete``: because the model ended its answer."""
        self._reader.ended, self._reader.complete = True, complete
        for _ in self._steps:
            pass
