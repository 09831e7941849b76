"""Calls of Llama 4, and of Llama 3.2 where it is asked so: a Python list of calls, and nothing else.

    [weather(city="Köln", days=2), time(zone="UTC")]

Source: the prompt format page of Llama 4 (section "Tool calling"); ``<|python_start|>`` and ``<|python_end|>`` may
stand around it. The list stands at the beginning of the answer. Nothing marks it, so its names must be declared
functions'. A call is given once it is whole; one whose arguments are not plain values with names is text.

vLLM's template for Llama 4 writes every value of earlier calls between double quotes, as it is, so models come to write
``days="2"`` and line breaks within quotes: where no text is declared a quoted value is what it reads as.
"""

import ast
import json
import re
from typing import Any

from tokenspeed.frontend.parsing.out import Out
from tokenspeed.frontend.parsing.reader import Reader, Steps
from tokenspeed.frontend.parsing.typed import Tools, as_json, converted

_START, _END = "<|python_start|>", "<|python_end|>"

MARKERS = (_START, _END)

_QUOTED = re.compile(r"""'''.*?'''|\"\"\".*?\"\"\"|"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'""", re.DOTALL)
_LINE_BREAK = re.compile(r"(\\.)|[\r\n]", re.DOTALL)


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
            arguments = yield from _arguments(reader, name, tools)
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


def _arguments(reader: Reader, name: str, tools: Tools) -> Steps[str]:
    """Takes the arguments of a call and returns them as JSON text; "" where they are none."""
    pieces: list[str] = []
    if not (yield from reader.python_arguments(pieces.append)):
        return ""
    try:
        written = _QUOTED.sub(_on_one_line, "".join(pieces).strip())
        call = ast.parse("f(" + written, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
            return ""
        values = {str(one.arg): _value(one, name, tools) for one in call.keywords}
        json.dumps(values, allow_nan=False)
        return as_json(values)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return ""


def _value(argument: ast.keyword, name: str, tools: Tools) -> Any:
    value = ast.literal_eval(argument.value)
    types = tools.types(name, str(argument.arg))
    return value if not isinstance(value, str) or "string" in types else converted(value, types)


def _on_one_line(quoted: re.Match[str]) -> str:
    """A text in quotes, its line breaks written as Python wants them."""
    return _LINE_BREAK.sub(lambda found: found[1] or repr(found[0])[1:-1], quoted[0])
