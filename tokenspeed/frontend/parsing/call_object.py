"""A call written as one JSON object: ``{"name": ..., "arguments": {...}}``, in either order."""

import json

from tokenspeed.frontend.parsing.out import Out, Trimmed
from tokenspeed.frontend.parsing.reader import Machine, Reader, Steps
from tokenspeed.frontend.parsing.typed import Tools

_ARGUMENTS = ("arguments", "parameters", "args")


class CallObject:
    """Reads one such object. Arguments go out as they are written, as soon as the name is known.

    Attributes:
        begun: it has a name, so it is a call; to end the call is the caller's.
        complete: its last bracket came.
    """

    def __init__(self, out: Out, declared: Tools | None = None, call_id: str = "") -> None:
        """``declared``: only the name of one of these makes it a call; None: any name does."""
        self._out = out
        self._declared = declared
        self._call_id = call_id
        self._early = ""  # arguments that came before the name
        self.begun = False
        self.complete = False

    def read(self, reader: Reader) -> Steps[None]:
        """Takes the object, or as much as is one; what follows is left to the caller."""
        if not (yield from reader.starts("{")):
            return
        while True:
            yield from reader.space()
            mark = yield from reader.starts('"', "}")
            if mark == '"' and (yield from self._pair(reader)):
                mark = yield from reader.starts(",", "}")
            if mark != ",":
                self.complete = mark == "}"
                return

    def _pair(self, reader: Reader) -> Steps[bool]:
        """Takes a key, whose quote was taken, and its value; returns whether both were whole."""
        pieces: list[str] = []
        yield from reader.string_rest(pieces.append)
        key = _decoded('"' + "".join(pieces))
        yield from reader.space()
        if not (yield from reader.starts(":")):
            return False
        yield from reader.space()
        whole = yield from self._value(reader, key)
        yield from reader.space()
        return whole

    def _value(self, reader: Reader, key: str) -> Steps[bool]:
        if key in _ARGUMENTS and self.begun and (yield from reader.peek()) == "{":
            return (yield from reader.json_value(self._out.arguments))
        pieces: list[str] = []
        whole = yield from reader.json_value(pieces.append)
        value = "".join(pieces)
        if key in _ARGUMENTS:
            self._early = _as_arguments(value)
        elif key == "name" and whole and not self.begun:
            self._begin(_decoded(value))
        if self.begun:
            self._out.arguments(self._early)
            self._early = ""
        return whole and bool(value)

    def _begin(self, name: str) -> None:
        if name and (self._declared is None or name in self._declared):
            self.begun = True
            self._out.begin(name, self._call_id)


def _decoded(value: str) -> str:
    """The text of a JSON string; "" for anything else."""
    try:
        text = json.loads(value, strict=False)
    except ValueError:
        return ""
    return text if isinstance(text, str) else ""


def _as_arguments(value: str) -> str:
    """Arguments are an object, but models write them as JSON text in a string too, or null for none."""
    return _decoded(value) or value if value.startswith('"') else "" if value == "null" else value


def arguments_through(reader: Reader, out: Out, ends: tuple[str, ...]) -> Steps[str]:
    """Takes the arguments of a call through one of ``ends``, which it returns; "" where the answer ended before.

    An end ends them wherever it stands, so that a broken text spoils one call and not the rest; in valid ones it may
    stand in a text.
    """
    if out.valid_calls:
        yield from reader.space()
        yield from reader.json_value(out.arguments)
    return (yield from reader.through(ends, Trimmed(out.arguments).push))


def marked_call(reader: Reader, out: Out, opening: str, ends: tuple[str, ...]) -> Steps[None]:
    """Takes an object from behind ``opening`` through one of ``ends``; as ``arguments_through`` does."""
    if not out.valid_calls:
        marked = MarkedCall(out, opening)
        marked.finish((yield from reader.through(ends, marked.push)))
        return
    yield from reader.space()
    call = CallObject(out)
    yield from call.read(reader)
    if (yield from reader.through(ends, out.content)) or call.complete:
        out.end()


class MarkedCall:
    """An object between markers: push the text between them, then say whether the end marker came.

    What is no call is text, its markers too; what stands behind the object is text.
    """

    def __init__(self, out: Out, opening: str, call_id: str = "") -> None:
        self._out = out
        self._opening = opening
        self._call = CallObject(out, call_id=call_id)
        self._machine = Machine(self._grammar)
        self.push = self._machine.push

    def finish(self, closing: str) -> None:
        """``closing`` is the end marker, "" where the answer ended without it."""
        self._machine.finish()
        if not self._call.begun:
            self._out.content(closing)
        elif closing or self._call.complete:
            self._out.end()

    def _grammar(self, reader: Reader) -> Steps[None]:
        reader.keep()
        yield from reader.space()
        yield from self._call.read(reader)
        kept = reader.release()
        if not self._call.begun:
            self._out.content(self._opening + kept)
        yield from reader.rest(self._out.content)
