"""Calls of Llama 3.1 to 3.3, and of Llama 4 where it is asked so: the whole answer is a JSON object, or several.

    {"name": "weather", "parameters": {"city": "Köln"}}

Source: the prompt format page of Llama 3.1 (section "JSON based tool calling") and its chat template, and vLLM's for
Llama 4, which puts several objects side by side; models put semicolons or commas between them. The first stands at the
beginning of the answer or behind ``<|python_tag|>``. Nothing marks it as a call, so its name must be a
declared function's: an answer that happens to be JSON stays an answer.
"""

from tokenspeed.frontend.parsing.call_object import CallObject
from tokenspeed.frontend.parsing.out import Out
from tokenspeed.frontend.parsing.reader import Reader, Steps
from tokenspeed.frontend.parsing.typed import Tools

_TAG = "<|python_tag|>"

MARKERS = (_TAG,)


def grammar(reader: Reader, out: Out, tools: Tools) -> Steps[None]:
    space = yield from reader.space()
    if (yield from reader.peek()) == "{":
        yield from _calls(reader, out, tools, space)
    else:
        out.content(space)
    while (yield from reader.through((_TAG,), out.content)):
        yield from _calls(reader, out, tools, _TAG)


def _calls(reader: Reader, out: Out, tools: Tools, before: str) -> Steps[None]:
    """Takes objects while they are calls; ``before`` is what stood before the first, text if that is none."""
    while True:
        reader.keep()
        space = yield from reader.space()
        call = CallObject(out, tools)
        yield from call.read(reader)
        kept = reader.release()
        if not call.begun:
            out.content(before + kept)
            return
        if call.complete:
            out.end()
        space = yield from reader.space()
        before = yield from reader.starts(";", ",")
        if not before and (yield from reader.peek()) != "{":
            out.content(space)
            return
        before = before or space
