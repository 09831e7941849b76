"""The parts of parsed answers in the shapes of chat completions."""

from collections.abc import Sequence

from tokenspeed.frontend.parsing.parts import Answer, CallArguments, CallBegun, Content, Part, Reasoning
from tokenspeed.messages import FinishReason
from tokenspeed.server.responses import (
    AssistantMessage,
    CallDelta,
    ChatDelta,
    ChatFinishReason,
    FunctionCall,
    FunctionDelta,
    ToolCall,
)


def message_of(answer: Answer, *, shows_reasoning: bool) -> AssistantMessage:
    """The message of a whole choice. ``content`` is null where there is none beside reasoning or calls."""
    message = AssistantMessage(content=answer.content)
    if not answer.content and (answer.calls or answer.reasoning):
        message.content = None
    if answer.reasoning and shows_reasoning:
        message.reasoning_content = answer.reasoning
    if answer.calls:
        message.tool_calls = [
            ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in answer.calls
        ]
    return message


def deltas_of(parts: Sequence[Part], *, shows_reasoning: bool) -> list[ChatDelta]:
    """The deltas of a stream for ``parts``: id and name of a call stand in its first one only."""
    deltas = []
    for part in parts:
        match part:
            case Reasoning(text):
                if shows_reasoning:
                    deltas.append(ChatDelta(reasoning_content=text))
            case Content(text):
                deltas.append(ChatDelta(content=text))
            case CallBegun(index, id_, name):
                function = FunctionDelta(name=name, arguments="")
                deltas.append(
                    ChatDelta(tool_calls=[CallDelta(index=index, id=id_, type="function", function=function)])
                )
            case CallArguments(index, text):
                deltas.append(ChatDelta(tool_calls=[CallDelta(index=index, function=FunctionDelta(arguments=text))]))
    return deltas


def finish_reason_of(reason: FinishReason, called: bool) -> ChatFinishReason:
    """A choice that ended by itself after calls ended for their sake."""
    return "tool_calls" if called and reason == "stop" else reason
