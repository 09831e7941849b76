"""Calls of Llama 4, and of Llama 3.2 where it is asked so: a Python list of calls, and nothing else.

    [weather(city="Köln", days=2), time(zone="UTC")]

Source: the prompt format page of Llama 4 (section "Tool calling"); ``<|python_start|>`` and ``<|python_end|>`` may
stand around it. The list stands at the beginning of the answer. Nothing marks it, so its names must be declared
functions'. A call is given once it is whole; one whose arguments are not plain values with names is text.
"""

import ast
import json

from tokenspeed.frontend.parsing.out import Out
from tokenspeed.frontend.parsing.reader import Reader, Steps
from tokenspeed.frontend.parsing.typed import Tools, as_json

_START, _END = "<|python_start|>", "<|python_end|>"

MARKERS = (_START, _END)


def grammar(reader: Reader, out: Out, tools: Tools) -> Steps[None]:
    reader.keep()
    yield from reader.space()
    yield from reader.starts(_START)
    yield from reader.space()
    if (yield from reader.starts("[")):
        yield from _calls(reader, out, tools)
    else:
        out.content(reader.release())
    yield from reader.rest(out.content)


def _calls(reader: Reader, out: Out, tools: Tools) -> Steps[None]:
    """Takes calls from behind the bracket that opens the list, which the reader keeps, through the end of the list."""
    while True:
        yield from reader.space()
        name = yield from reader.word()
        arguments = ""
        if name in tools and (yield from reader.starts("(")):
            arguments = yield from _arguments(reader)
        kept = reader.release()
        if not arguments:
            out.content(kept)
            return
        out.begin(name)
        out.arguments(arguments)
        out.end()
        reader.keep()
        yield from reader.space()
        if not (yield from reader.starts(",")):
            break
    if not (yield from reader.starts("]")):
        out.content(reader.release())
        return
    reader.release()
    yield from reader.space()
    yield from reader.starts(_END)


def _arguments(reader: Reader) -> Steps[str]:
    """Takes the arguments of a call and returns them as JSON text; "" where they are none."""
    pieces: list[str] = []
    if not (yield from reader.python_arguments(pieces.append)):
        return ""
    try:
        call = ast.parse("f(" + "".join(pieces).strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
            return ""
        values = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        json.dumps(values, allow_nan=False)
        return as_json(values)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return ""
