"""Calls as JSON objects in ``<tool_call>`` tags: Hermes, Qwen2.5 and Qwen3.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Köln"}}
    </tool_call>

Sources: the Hermes function-calling card, Qwen3's chat template (ours: frontend/templates/qwen3.jinja). The end tag
ends a call wherever it stands, in a string too.
"""

from tokenspeed.frontend.parsing.call_object import marked_call
from tokenspeed.frontend.parsing.out import Out
from tokenspeed.frontend.parsing.reader import Reader, Steps
from tokenspeed.frontend.parsing.typed import Tools

MARKERS = ("<tool_call>", "</tool_call>")


def grammar(reader: Reader, out: Out, _tools: Tools) -> Steps[None]:
    opening, closing = MARKERS
    while (yield from reader.through((opening,), out.content)):
        yield from marked_call(reader, out, opening, (closing,))
