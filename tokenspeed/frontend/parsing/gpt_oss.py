"""gpt-oss's harmony format: every answer is a row of messages, each with a header that says its channel and recipient.

    <|channel|>analysis<|message|>I ask.<|end|>
    <|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Köln"}<|call|>
    <|start|>assistant<|channel|>final<|message|>Sunny.<|return|>

Source: the OpenAI harmony response format guide and the chat template of openai/gpt-oss-20b (ours:
frontend/templates/ harmony.jinja). The channel analysis is reasoning; a message to somebody is a call, whose
recipient stands before or behind the channel; final, and commentary to nobody, are the answer. The prompt ends inside
a header. A header that the end of the answer cut off is left out.
"""

import re
from collections.abc import Callable

from tokenspeed.frontend.parsing.call_object import arguments_through
from tokenspeed.frontend.parsing.out import Out
from tokenspeed.frontend.parsing.reader import Reader, Sink, Steps

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_IN_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

MARKERS = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)
OPENING = f"{_CHANNEL}analysis{_MESSAGE}"
ENDS = (*_ENDS, _START)
ANSWER = f"{_CHANNEL}final{_MESSAGE}"
CLOSING = f"<|end|>{_START}assistant{ANSWER}"
EFFORTS = ("low", "medium", "high")


def grammar(out: Out, *, prompt_end: str, separate: bool) -> Callable[[Reader], Steps[None]]:
    """Returns the grammar of a whole answer; ``prompt_end`` is the end of the prompt, with its last header."""

    def steps(reader: Reader) -> Steps[None]:
        header = prompt_end[prompt_end.rfind(_START) :] if _START in prompt_end else ""
        if header and _MESSAGE not in header:
            end = yield from _message(reader, out, header, separate)
        else:
            end = yield from _body(reader, out, header, separate)
        while end:
            if end != _START:
                end = yield from reader.through((_START, _CHANNEL), out.content)
            if end:
                end = yield from _message(reader, out, end, separate)

    return steps


def _message(reader: Reader, out: Out, header: str, separate: bool) -> Steps[str]:
    """Takes the rest of a header and the message; returns the marker that ended it, "" at the end of the answer."""
    pieces: list[str] = []
    mark = yield from reader.through((_MESSAGE,), pieces.append)
    rest = "".join(pieces)
    if not mark:
        out.content("" if _CHANNEL in header + rest or _RECIPIENT.search(rest) else rest)
        return ""
    return (yield from _body(reader, out, header + rest, separate))


def _body(reader: Reader, out: Out, header: str, separate: bool) -> Steps[str]:
    recipient, channel = _RECIPIENT.search(header), _IN_CHANNEL.search(header)
    sink: Sink = out.content
    if recipient is not None:
        out.begin(recipient[1].removeprefix("functions."))
        end = yield from arguments_through(reader, out, (*_ENDS, _START))
        if end or reader.complete:
            out.end()
        return end
    if channel is not None and channel[1] == "analysis":
        out.in_reasoning = True
        sink = out.reasoning if separate else out.content
    end = yield from reader.through((*_ENDS, _START), sink)
    out.in_reasoning = out.in_reasoning and not end
    return end
