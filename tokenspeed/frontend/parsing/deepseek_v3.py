"""Calls of DeepSeek-V3, R1 and V3.1, in special tokens.

V3 and R1 write a type, a name and JSON in a fence; V3.1 the name and the JSON alone:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
    ```json
    {"city": "Köln"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Köln"}<｜tool▁call▁end｜>
    <｜tool▁calls▁end｜>

Sources: the chat templates of deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1, and the latter's card (ours, of V3.1:
frontend/templates/deepseek_v3.jinja).
"""

from tokenspeed.frontend.parsing.call_object import arguments_through
from tokenspeed.frontend.parsing.out import Out
from tokenspeed.frontend.parsing.reader import Reader, Steps
from tokenspeed.frontend.parsing.typed import Tools

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE, _FENCE_END = "```json", "\n```"

MARKERS = (_CALLS, _CALLS_END, _CALL, _SEPARATOR, _CALL_END)


def grammar_v3(reader: Reader, out: Out, _tools: Tools) -> Steps[None]:
    while marker := (yield from reader.through((_CALLS, _CALLS_END, _CALL), out.content)):
        if marker == _CALL:
            yield from _fenced(reader, out)


def grammar_v31(reader: Reader, out: Out, _tools: Tools) -> Steps[None]:
    while marker := (yield from reader.through((_CALLS, _CALLS_END, _CALL), out.content)):
        if marker == _CALL:
            header: list[str] = []
            mark = yield from reader.through((_SEPARATOR, _CALL_END, _CALLS_END), header.append)
            yield from _arguments(reader, out, "".join(header), mark)


def _arguments(reader: Reader, out: Out, header: str, mark: str) -> Steps[None]:
    """The rest of a call of V3.1, behind its name and ``mark``."""
    if mark != _SEPARATOR or not header.strip():
        out.content(_CALL + header + mark)
        return
    out.begin(header.strip())
    if (yield from arguments_through(reader, out, (_CALL_END, _CALLS_END))):
        out.end()


def _fenced(reader: Reader, out: Out) -> Steps[None]:
    reader.keep()
    yield from reader.through((_SEPARATOR, _CALL_END, _CALLS_END), _nowhere)
    name: list[str] = []
    mark = yield from reader.through(("\n", _FENCE, _CALL_END, _CALLS_END), name.append)
    kept = reader.release()
    if mark not in ("\n", _FENCE) or not "".join(name).strip():
        out.content(_CALL + kept)
        return
    out.begin("".join(name).strip())
    yield from reader.space()
    if mark == "\n":
        yield from reader.starts(_FENCE)
    end = yield from arguments_through(reader, out, (_FENCE_END, _CALL_END, _CALLS_END))
    if end == _FENCE_END:
        end = yield from reader.through((_CALL_END, _CALLS_END), out.content)
    if end:
        out.end()


def _nowhere(_text: str) -> None:
    """The text was kept by the reader."""
