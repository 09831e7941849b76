"""What a parsed answer is made of. Chat completions, responses and messages all read these."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call begins; its arguments follow.

    Attributes:
        index: of the call in this answer, from 0.
        id: as the family's template wants it back.
        name: of the function, as the model wrote it; it may be one that was not declared.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of call ``index``; the pieces, joined, are JSON text wherever the model wrote any."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call is complete. A call that the end of the answer cut off has no such part."""

    index: int


Part = Reasoning | Content | CallBegun | CallArguments | CallEnded


@dataclass(slots=True)
class Call:
    """A tool call, whole; ``arguments`` is JSON text, cut off where ``complete`` is false."""

    id: str
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass(slots=True)
class Answer:
    """All parts of one choice, put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)


def put_together(parts: Iterable[Part]) -> Answer:
    """Returns the answer that ``parts``, in their order, make."""
    reasoning: list[str] = []
    content: list[str] = []
    answer, arguments = Answer(), dict[int, list[str]]()
    for part in parts:
        match part:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text):
                content.append(text)
            case CallBegun(index, id_, name):
                answer.calls.append(Call(id_, name))
                arguments[index] = []
            case CallArguments(index, text):
                arguments[index].append(text)
            case CallEnded(index):
                answer.calls[index].complete = True
    for index, pieces in arguments.items():
        answer.calls[index].arguments = "".join(pieces)
    answer.reasoning, answer.content = "".join(reasoning), "".join(content)
    return answer


def merged(parts: list[Part]) -> list[Part]:
    """Returns ``parts`` with neighbours of one kind made one, so that fewer events carry them."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.index == last.index:
            result[-1] = CallArguments(part.index, last.text + part.text)
        else:
            result.append(part)
    return result
