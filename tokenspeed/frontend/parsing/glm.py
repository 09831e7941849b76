"""Calls of GLM-4.5 to 5.3: a name and pairs of tags.

    <tool_call>weather
    <arg_key>city</arg_key>
    <arg_value>Köln</arg_value>
    </tool_call>

GLM-4.7 and later write the same without line breaks. Sources: the chat templates of zai-org/GLM-4.5 and GLM-4.7 (ours:
frontend/templates/glm.jinja). Text is written as it is, every other value as JSON; the tool's declaration tells which.
"""

from tokenspeed.frontend.parsing.out import Out
from tokenspeed.frontend.parsing.reader import Reader, Steps
from tokenspeed.frontend.parsing.typed import Tools, TypedArguments, value_through

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"

MARKERS = (_CALL, _CALL_END, _KEY, _KEY_END, _VALUE, _VALUE_END)


def grammar(reader: Reader, out: Out, tools: Tools) -> Steps[None]:
    while (yield from reader.through((_CALL,), out.content)):
        reader.keep()
        yield from reader.space()
        name = yield from reader.word()
        yield from reader.space()
        mark = (yield from reader.starts(_KEY, _CALL_END)) if name else ""
        kept = reader.release()
        if not mark:
            out.content(_CALL + kept)
            continue
        out.begin(name)
        yield from _arguments(reader, out, TypedArguments(out, tools, name), mark)


def _arguments(reader: Reader, out: Out, arguments: TypedArguments, mark: str) -> Steps[None]:
    """Takes pairs from behind ``mark``, which is the first one's, through the end of the call."""
    while mark == _KEY:
        key: list[str] = []
        mark = yield from reader.through((_KEY_END, _CALL_END), key.append)
        if mark == _KEY_END:
            mark = yield from reader.through((_VALUE, _KEY, _CALL_END), out.content)
        if mark != _VALUE:
            out.content("".join(key))  # a key without a value
            continue
        arguments.open("".join(key).strip())
        mark = yield from value_through(reader, out, arguments, (_VALUE_END, _CALL_END))
        if not mark:
            arguments.cut()
            return
        arguments.close()
        if mark == _VALUE_END:
            mark = yield from reader.through((_KEY, _CALL_END), out.content)
    if mark:
        arguments.end()
