"""Calls of Mistral's models, behind ``[TOOL_CALLS]``.

Up to tokenizer version 7 a JSON list, from 11 on a name and JSON for each call:

    [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Köln"}}]
    [TOOL_CALLS]weather[ARGS]{"city": "Köln"}[TOOL_CALLS]time[ARGS]{}

Source: the instruct tokenizers of mistral-common and the chat templates of the models' cards. Version 11 may put
``[CALL_ID]`` and an id behind the name. Ids have nine letters and digits, which the templates check.
"""

import re

from tokenspeed.frontend.parsing.call_object import CallObject
from tokenspeed.frontend.parsing.out import Out, new_short_id
from tokenspeed.frontend.parsing.reader import Reader, Steps
from tokenspeed.frontend.parsing.typed import Tools

_CALLS, _ARGUMENTS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID = re.compile(r"[A-Za-z0-9]{9}")

MARKERS = (_CALLS, _ARGUMENTS, _CALL_ID)


def grammar(reader: Reader, out: Out, _tools: Tools) -> Steps[None]:
    while (yield from reader.through((_CALLS,), out.content)):
        reader.keep()
        yield from reader.space()
        if (yield from reader.starts("[")):
            yield from _list(reader, out)
        else:
            yield from _named(reader, out)


def _list(reader: Reader, out: Out) -> Steps[None]:
    """Takes the list from behind its bracket; the reader keeps since the marker."""
    before = _CALLS
    while True:
        yield from reader.space()
        call = CallObject(out, call_id=new_short_id())
        yield from call.read(reader)
        kept = reader.release()
        if not call.begun:
            out.content(before + kept)
            return
        if call.complete:
            out.end()
        reader.keep()
        yield from reader.space()
        if not (yield from reader.starts(",")):
            break
        before = ""
    if not (yield from reader.starts("]")):
        out.content(reader.release())
    reader.release()


def _named(reader: Reader, out: Out) -> Steps[None]:
    """Takes a name, perhaps an id, and the arguments; the reader keeps since the marker."""
    name = yield from reader.word()
    call_id: list[str] = []
    mark = (yield from reader.starts(_ARGUMENTS, _CALL_ID)) if name else ""
    if mark == _CALL_ID:
        mark = yield from reader.through((_ARGUMENTS, _CALLS), call_id.append)
    if name and not mark and (yield from reader.peek()) == "{":
        mark = _ARGUMENTS  # some write the arguments right behind the name
    kept = reader.release()
    if mark != _ARGUMENTS:
        out.content(_CALLS + kept)
        return
    written = "".join(call_id).strip()
    out.begin(name, written if _ID.fullmatch(written) else new_short_id())
    yield from reader.space()
    first = yield from reader.peek()
    whole = (yield from reader.json_value(out.arguments)) if first == "{" else bool(first)
    if whole:
        out.end()
