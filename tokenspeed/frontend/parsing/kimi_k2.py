"""Calls of Kimi K2 to K2.6: an id, then JSON arguments, in a section of special tokens.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Köln"}
    <|tool_call_end|><|tool_calls_section_end|>

Source: docs/tool_call_guidance.md of moonshotai/Kimi-K2-Instruct and its chat template (ours: frontend/templates/
kimi.jinja). The id is ``functions.NAME:INDEX``, counted over the whole conversation; the template wants it back as it
was, so it is given as it was written. The section may begin before reasoning was closed.
"""

from tokenspeed.frontend.parsing.call_object import arguments_through
from tokenspeed.frontend.parsing.out import Out
from tokenspeed.frontend.parsing.reader import Reader, Steps
from tokenspeed.frontend.parsing.typed import Tools

SECTION = "<|tool_calls_section_begin|>"
_SECTION_END = "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

MARKERS = (SECTION, _SECTION_END, _CALL, _ARGUMENTS, _CALL_END)


def grammar(reader: Reader, out: Out, _tools: Tools) -> Steps[None]:
    while marker := (yield from reader.through((SECTION, _SECTION_END, _CALL), out.content)):
        if marker == _CALL:
            yield from _call(reader, out)


def _call(reader: Reader, out: Out) -> Steps[None]:
    header: list[str] = []
    mark = yield from reader.through((_ARGUMENTS, _CALL_END, _SECTION_END), header.append)
    written = "".join(header)
    id_ = written.strip()
    before, colon, index = id_.removeprefix("functions.").rpartition(":")
    name = before if colon else index
    if mark != _ARGUMENTS or not name:
        out.content(_CALL + written + mark)
        return
    out.begin(name, id_)
    if (yield from arguments_through(reader, out, (_CALL_END, _SECTION_END))):
        out.end()
