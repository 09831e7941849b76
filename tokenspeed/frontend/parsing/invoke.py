"""Calls as tags with attributes, which several families write with tags of their own: ``<invoke name="...">``."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tokenspeed.frontend.parsing.out import Out
from tokenspeed.frontend.parsing.reader import Reader, Steps
from tokenspeed.frontend.parsing.typed import NOT_TEXT, TEXT, Tools, TypedArguments, value_through

_NAME = re.compile(r'\bname="([^"]*)"')
_IS_TEXT = re.compile(r'\bstring="(true|false)"')


@dataclass(frozen=True)
class InvokeTags:
    """A family's tags; those with attributes without their end.

    Attributes:
        openings, closing: around all calls of an answer.
        invoke, invoke_end: around a call; its attribute is ``name``.
        parameter, parameter_end: around a value; its attributes are ``name``, and ``string`` where the model says
            itself whether the value is text.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    invoke: str
    invoke_end: str
    parameter: str
    parameter_end: str

    def grammar(self) -> Callable[[Reader, Out, Tools], Steps[None]]:
        """Calls stand behind an opening tag only; any number of them, until the closing one or other text."""

        def steps(reader: Reader, out: Out, tools: Tools) -> Steps[None]:
            while opening := (yield from reader.through(self.openings, out.content)):
                called = False
                space = yield from reader.space()
                while (yield from reader.starts(self.invoke)):
                    called = True
                    yield from self._call(reader, out, tools)
                    yield from reader.space()
                closing = yield from reader.starts(*self.closings)
                if not called:
                    out.content(opening + space + closing)

        return steps

    def _call(self, reader: Reader, out: Out, tools: Tools) -> Steps[None]:
        header: list[str] = []
        mark = yield from reader.through((">", *self.closings), header.append)
        written = "".join(header)
        found = _NAME.search(written)
        if mark != ">" or found is None or not found[1]:
            out.content(self.invoke + written + mark)
            return
        out.begin(found[1])
        arguments = TypedArguments(out, tools, found[1])
        marks = (self.parameter, self.invoke_end, *self.closings)
        mark = yield from reader.through(marks, out.content)
        while mark == self.parameter:
            mark = yield from self._parameter(reader, arguments, marks, out)
        if mark:
            arguments.end()

    def _parameter(self, reader: Reader, arguments: TypedArguments, marks: tuple[str, ...], out: Out) -> Steps[str]:
        """Takes one parameter, and what stands between it and the next of ``marks``, which it returns."""
        header: list[str] = []
        if not (yield from reader.through((">",), header.append)):
            out.content(self.parameter + "".join(header))
            return ""
        written = "".join(header)
        name, said = _NAME.search(written), _IS_TEXT.search(written)
        types = None if said is None else TEXT if said[1] == "true" else NOT_TEXT
        arguments.open(name[1] if name else written.strip(), types)
        ends = (self.parameter_end, self.invoke_end, *self.closings)
        end = yield from value_through(reader, out, arguments, ends)
        if not end:
            arguments.cut()
            return ""
        arguments.close()
        if end != self.parameter_end:
            return end
        return (yield from reader.through(marks, out.content))
