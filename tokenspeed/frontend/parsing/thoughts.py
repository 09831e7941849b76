"""Reasoning between two markers at the beginning of an answer.

The families, and where their markers can be read: Qwen3's, DeepSeek-R1's to V4's, GLM-4.5's to 5's, Kimi K2
Thinking's and MiniMax-M2's chat templates all write ``<think>`` and ``</think>`` (this repository's own are in
frontend/templates, what they write in tests/frontend/golden); MiniMax-M3's writes ``<mm:think>``, Mistral's Magistral
``[THINK]``.

Rules that hold for all: the opening marker counts at the beginning of the answer only, so that an answer may speak of
``<think>``; where the prompt ends with it, the answer begins inside; without a closing marker all of it is reasoning.
Line breaks next to the markers belong to them, because templates write them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tokenspeed.frontend.parsing.out import Out, Trimmed
from tokenspeed.frontend.parsing.reader import Reader, Sink, Steps

_LINE_BREAKS = "\r\n"


@dataclass(frozen=True)
class Thoughts:
    """One family's markers."""

    opening: str = "<think>"
    closing: str = "</think>"

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt that ends so leaves reasoning open."""
        return prompt.rstrip().endswith(self.opening)

    def grammar(
        self, out: Out, answer: Sink, *, inside: bool, separate: bool, calls: tuple[str, ...] = ()
    ) -> Callable[[Reader], Steps[None]]:
        """Returns the grammar; what is no reasoning goes to ``answer``.

        ``inside``: the prompt opened reasoning. ``separate`` false leaves reasoning in the content, markers and all.
        ``calls``: beginnings of calls that end reasoning too.
        """

        def steps(reader: Reader) -> Steps[None]:
            out.in_reasoning = inside
            space = yield from reader.space()
            opened = yield from reader.starts(self.opening)
            if inside or opened:
                out.in_reasoning = True
                yield from self._inside(reader, out, answer, space + opened, separate, calls)
            else:
                answer(space)
            yield from reader.rest(answer)

        return steps

    def _inside(
        self, reader: Reader, out: Out, answer: Sink, begun: str, separate: bool, calls: tuple[str, ...]
    ) -> Steps[None]:
        sink = Trimmed(out.reasoning, _LINE_BREAKS).push if separate else out.plain
        if not separate:
            out.plain(begun)
        elif self.opening not in begun:
            sink(begun)  # white space that no marker explains
        end = yield from reader.through((self.closing, *calls), sink)
        if not end:
            return
        out.in_reasoning = False
        if end in calls:
            answer(end)
            return
        breaks = yield from reader.lines()
        if not separate:
            out.plain(end + breaks)
