"""One choice's parser, put together of the family's grammars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenspeed.frontend.parsing.out import Out
from tokenspeed.frontend.parsing.parts import Part, merged
from tokenspeed.frontend.parsing.reader import Machine, Reader, Sink, Steps
from tokenspeed.frontend.parsing.registry import REASONING_FORMATS, TOOL_FORMATS, ToolFormat, WholeFormat
from tokenspeed.frontend.parsing.typed import Tools
from tokenspeed.frontend.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Parsing:
    """What is to be told apart in the choices of one request.

    Attributes:
        tool_format, reasoning_format: names of the registry, "" for none. A format that frames the whole answer is
            named by both.
        tools: the declared tools as the request has them; without any, calls are not looked for.
        parallel: whether more than the first call is given.
        separate: whether reasoning becomes reasoning, or stays in the content as the model wrote it.
        prompt_end: the last characters of the prompt, which may have opened reasoning.
        valid_calls: a constraint lets through valid calls only: an end marker in a text of their arguments ends
            nothing, and no call ends reasoning.
    """

    tool_format: str = ""
    reasoning_format: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    parallel: bool = True
    separate: bool = True
    prompt_end: str = ""
    valid_calls: bool = False

    @cached_property
    def markers(self) -> frozenset[str]:
        """The texts that the parser must see even where they are special tokens."""
        tools, reasoning = TOOL_FORMATS.get(self.tool_format), REASONING_FORMATS.get(self.reasoning_format)
        found = set(tools.markers) if tools is not None and self.tools else set[str]()
        if isinstance(reasoning, WholeFormat):
            found.update(reasoning.markers)
        elif reasoning is not None:
            found.update((reasoning.opening, reasoning.closing))
        return frozenset(found)

    def marker_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The special tokens among the markers: they must not be left out of the text."""
        markers = self.markers
        return frozenset(one for one in tokenizer.special_ids if markers and tokenizer.token_name(one) in markers)

    @property
    def calls_in_reasoning(self) -> tuple[str, ...]:
        """The beginnings of calls that end reasoning, beside its closing marker."""
        tools = TOOL_FORMATS.get(self.tool_format) if self.tools and not self.valid_calls else None
        return tools.ends_reasoning if isinstance(tools, ToolFormat) else ()

    @property
    def needed(self) -> bool:
        """Whether there is anything to tell apart."""
        return bool(self.reasoning_format or (self.tool_format and self.tools))


class AnswerParser:
    """Takes the text of one choice in pieces and says what it is; how it was cut makes no difference to the whole."""

    def __init__(self, parsing: Parsing) -> None:
        self._out = Out(calls=bool(parsing.tools), parallel=parsing.parallel, valid_calls=parsing.valid_calls)
        self._behind: Machine | None = None
        reasoning = REASONING_FORMATS.get(parsing.reasoning_format)
        if isinstance(reasoning, WholeFormat):
            grammar = reasoning.grammar(self._out, prompt_end=parsing.prompt_end, separate=parsing.separate)
            self._machine = Machine(grammar)
            return
        tools = TOOL_FORMATS.get(parsing.tool_format) if parsing.tools else None
        answer: Sink = self._out.plain
        if isinstance(tools, ToolFormat):
            answer = self._behind_reasoning(tools, Tools(parsing.tools))
        self._machine = _rest_of(answer)
        if reasoning is not None:
            inside = reasoning.opened_by(parsing.prompt_end)
            self._machine = Machine(
                reasoning.grammar(
                    self._out, answer, inside=inside, separate=parsing.separate, calls=parsing.calls_in_reasoning
                )
            )

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next belongs to reasoning, as far as is known."""
        return self._out.in_reasoning

    def push(self, text: str) -> list[Part]:
        """Takes the next piece and returns what became certain."""
        self._machine.push(text)
        return merged(self._out.take())

    def finish(self, complete: bool = False) -> list[Part]:
        """The choice ended: returns what is left. Nothing may be pushed after it.

        ``complete``: one of the model's own end tokens ended it. Where such a token ends a call, it is no text.
        """
        self._machine.finish(complete)
        if self._behind is not None:
            self._behind.finish(complete)
        self._out.flush()
        return merged(self._out.take())

    def _behind_reasoning(self, tools: ToolFormat, declared: Tools) -> Sink:
        """Where the text behind the reasoning goes, which may hold calls."""
        self._behind = Machine(lambda reader: tools.grammar(reader, self._out, declared))
        return self._behind.push


def _rest_of(answer: Sink) -> Machine:
    def grammar(reader: Reader) -> Steps[None]:
        yield from reader.rest(answer)

    return Machine(grammar)
