"""Calls of MiniMax-M2, as tags.

    <minimax:tool_call>
    <invoke name="weather">
    <parameter name="city">Köln</parameter>
    <parameter name="days">2</parameter>
    </invoke>
    </minimax:tool_call>

Source: docs/tool_calling_guide.md of MiniMaxAI/MiniMax-M2 and M2.5, and the chat template (ours: frontend/templates/
minimax.jinja). Values have the types that the tool declares.
"""

from tokenspeed.frontend.parsing.invoke import InvokeTags

MARKERS = ("<minimax:tool_call>", "</minimax:tool_call>")

grammar = InvokeTags(
    openings=MARKERS[:1],
    closings=MARKERS[1:],
    invoke="<invoke",
    invoke_end="</invoke>",
    parameter="<parameter",
    parameter_end="</parameter>",
).grammar()
