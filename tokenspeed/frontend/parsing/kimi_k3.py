"""Kimi K3's format: channels between special tokens, calls as elements with attributes.

    <|open|>think<|sep|>I ask.<|close|>think<|sep|><|open|>response<|sep|>Let me see.<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>
    <|open|>argument key="city" type="string"<|sep|>Köln<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>

Source: public descriptions of the encoder of moonshotai/Kimi-K3, which has no chat template. A value of type string
is text, every other JSON; all arguments may stand in one ``json`` element instead. ``"`` and ``&`` in attributes are
written ``&quot;`` and ``&amp;``. The prompt may end inside a channel.
A tag that the end of the answer cut off is left out.
"""

import re
from collections.abc import Callable

from tokenspeed.frontend.parsing.out import Out, Trimmed
from tokenspeed.frontend.parsing.reader import Reader, Sink, Steps
from tokenspeed.frontend.parsing.typed import NOT_TEXT, TEXT, Tools, TypedArguments

_OPEN, _CLOSE, _SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
_THINK = f"{_OPEN}think{_SEPARATOR}"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')

MARKERS = (_OPEN, _CLOSE, _SEPARATOR)
OPENING = _THINK
ENDS = (_CLOSE, f"{_OPEN}response{_SEPARATOR}", f"{_OPEN}tools{_SEPARATOR}")
ANSWER = f"{_OPEN}response{_SEPARATOR}"
CLOSING = f"{_CLOSE}think{_SEPARATOR}{ANSWER}"


def grammar(out: Out, *, prompt_end: str, separate: bool) -> Callable[[Reader], Steps[None]]:
    """Returns the grammar of a whole answer; ``prompt_end`` may have opened a channel."""

    def steps(reader: Reader) -> Steps[None]:
        elements = _Elements(out, separate)
        if prompt_end.rstrip().endswith(_THINK):
            elements.opened("think", {})
        while mark := (yield from reader.through((_OPEN, _CLOSE), elements.text)):
            pieces: list[str] = []
            if not (yield from reader.through((_SEPARATOR,), pieces.append)):
                break
            name, _, rest = "".join(pieces).partition(" ")
            if mark == _OPEN:
                elements.opened(name, dict(_ATTRIBUTE.findall(rest)))
                if out.valid_calls and elements.holds_json and (yield from reader.peek()) in ("{", "["):
                    yield from reader.json_value(elements.text)
            else:
                elements.closed(name)
        elements.cut()

    return steps


class _Elements:
    """What the text at this place is, by the elements that are open.

    ``holds_json``: the element opened last holds JSON.
    """

    def __init__(self, out: Out, separate: bool) -> None:
        self._out = out
        self._separate = separate
        self._sink: Sink = out.content
        self._call: TypedArguments | None = None
        self._in_argument = False
        self.holds_json = False

    def text(self, text: str) -> None:
        self._sink(text)

    def opened(self, name: str, attributes: dict[str, str]) -> None:
        self.holds_json = False
        said = {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in attributes.items()}
        if name == "think":
            self._out.in_reasoning = True
            self._sink = self._out.reasoning if self._separate else self._out.content
        elif name == "call" and said.get("tool"):
            self._end_call()
            self._out.begin(said["tool"])
            self._call = TypedArguments(self._out, Tools(()), said["tool"])
        elif name == "argument" and self._call is not None:
            self._close_argument()
            self._call.open(said.get("key", ""), TEXT if said.get("type", "string") == "string" else NOT_TEXT)
            self._sink, self._in_argument = self._call.push, True
            self.holds_json = not self._call.may_be_text
        elif name == "json" and self._call is not None:
            self._sink = Trimmed(self._out.arguments).push
            self.holds_json = True
        elif name in ("response", "tools"):
            self.closed("think")

    def closed(self, name: str) -> None:
        self._close_argument()
        self._out.in_reasoning = False
        self._sink = self._out.content
        if name in ("call", "tools"):
            self._end_call()

    def cut(self) -> None:
        """The answer ended."""
        if self._call is not None and self._in_argument:
            self._call.cut()

    def _close_argument(self) -> None:
        if self._call is not None and self._in_argument:
            self._call.close()
        self._in_argument = False

    def _end_call(self) -> None:
        self._close_argument()
        if self._call is not None:
            self._call.end()
        self._call = None
