"""Calls of Qwen3-Coder and Qwen3.5 to 3.8, as tags that hold the names.

    <tool_call>
    <function=weather>
    <parameter=city>
    Köln
    </parameter>
    </function>
    </tool_call>

Source: the chat template of Qwen/Qwen3-Coder-480B-A35B-Instruct (ours, of Qwen3.5: frontend/templates/qwen3_5.jinja).
One line break on each side of a value belongs to the tags. Models leave out the outer tag now and then; then only a
declared function makes a call.
Some begin a call without closing their reasoning (vllm-project/vllm pull request 35687).
"""

from tokenspeed.frontend.parsing.out import Out, Unwrapped
from tokenspeed.frontend.parsing.reader import Reader, Steps
from tokenspeed.frontend.parsing.typed import Tools, TypedArguments, value_through

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NEXT = (_PARAMETER, _FUNCTION_END, _CALL_END)

BEGINNING = f"{_CALL}\n{_FUNCTION}"
MARKERS = (_CALL, _CALL_END)


def grammar(reader: Reader, out: Out, tools: Tools) -> Steps[None]:
    while mark := (yield from reader.through((_CALL, _FUNCTION), out.content)):
        reader.keep()
        function = _FUNCTION
        if mark == _CALL:
            yield from reader.space()
            function = yield from reader.starts(_FUNCTION)
        name = (yield from reader.word()) if function else ""
        yield from reader.space()
        closed = yield from reader.starts(">")
        kept = reader.release()
        if closed and name and (mark == _CALL or name in tools):
            yield from _call(reader, out, tools, name)
        else:
            out.content(mark + kept)


def _call(reader: Reader, out: Out, tools: Tools, name: str) -> Steps[None]:
    out.begin(name)
    arguments = TypedArguments(out, tools, name)
    mark = yield from reader.through(_NEXT, out.content)
    while mark == _PARAMETER:
        mark = yield from _parameter(reader, out, arguments)
    if mark:
        arguments.end()
    if mark == _FUNCTION_END:
        yield from reader.space()
        yield from reader.starts(_CALL_END)


def _parameter(reader: Reader, out: Out, arguments: TypedArguments) -> Steps[str]:
    """Takes one parameter and what stands before the next of the marks, which it returns."""
    header: list[str] = []
    if not (yield from reader.through((">",), header.append)):
        out.content(_PARAMETER + "".join(header))
        return ""
    arguments.open("".join(header).strip())
    ends = (_PARAMETER_END, _FUNCTION_END, _CALL_END)
    end = yield from value_through(reader, out, arguments, ends, Unwrapped(arguments.push).push)
    if not end:
        arguments.cut()
        return ""
    arguments.close()
    return (yield from reader.through(_NEXT, out.content)) if end == _PARAMETER_END else end
