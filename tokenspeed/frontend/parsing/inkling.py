"""Inkling's format: every answer is a row of messages, each with a header and a type of content.

    <|content_thinking|>I ask.<|end_message|><|message_model|>weather<|content_invoke_tool_json|>
    {"name": "weather", "args": {"city": "Köln"}}<|end_message|>
    <|message_model|><|content_text|>Sunny.<|end_message|><|content_model_end_sampling|>

Source: the chat template of thinkingmachines/Inkling as public readers of it describe it. The prompt ends behind
``<|message_model|>``; what stands between that and the type of content is the name of the tool.
"""

from collections.abc import Callable

from tokenspeed.frontend.parsing.call_object import marked_call
from tokenspeed.frontend.parsing.out import Out
from tokenspeed.frontend.parsing.reader import Reader, Steps

_MESSAGE, _TEXT, _THINKING = "<|message_model|>", "<|content_text|>", "<|content_thinking|>"
_CALL, _CALL_TEXT = "<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>"
_KINDS = (_TEXT, _THINKING, _CALL, _CALL_TEXT)
_ENDS = ("<|end_message|>", "<|content_model_end_sampling|>", _MESSAGE)

MARKERS = (*_KINDS, *_ENDS)
OPENING = _THINKING
ENDS = _ENDS
ANSWER = _TEXT
CLOSING = f"{_ENDS[0]}{_MESSAGE}{_TEXT}"


def grammar(out: Out, *, prompt_end: str, separate: bool) -> Callable[[Reader], Steps[None]]:
    """Returns the grammar of a whole answer; ``prompt_end`` is the end of the prompt, with its last header."""

    def steps(reader: Reader) -> Steps[None]:
        if _TEXT in prompt_end[prompt_end.rfind(_MESSAGE) :]:  # a message that is gone on with
            yield from reader.through(_ENDS, out.content)
        while True:
            header: list[str] = []
            kind = yield from reader.through((*_KINDS, *_ENDS), header.append)
            if kind == _CALL:
                yield from marked_call(reader, out, _CALL, _ENDS)
                continue
            if kind not in _KINDS:
                out.content("".join(header))  # text without a header
            elif kind == _THINKING:
                out.in_reasoning = True
                end = yield from reader.through(_ENDS, out.reasoning if separate else out.content)
                out.in_reasoning = not end
            else:
                yield from reader.through(_ENDS, out.content)
            if not kind:
                return

    return steps
