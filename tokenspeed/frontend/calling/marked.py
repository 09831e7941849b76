"""Formats in which a marker begins the calls and an answer goes on around them."""

from collections.abc import Callable
from dataclasses import dataclass

from tokenspeed.frontend.calling.functions import Function, Wanted
from tokenspeed.frontend.calling.lark import Lark

CallWriter = Callable[[Lark, Function], str]
"""One call, as an expression."""


@dataclass(frozen=True)
class Marked:
    """How a family frames its calls.

    Attributes:
        begin: the marker that begins a block of calls.
        call: one call in it.
        before, between, end: what stands behind ``begin``, between two calls of a block, and behind the last.
        one_block: several calls stand in one block; otherwise each has its own, with ``between`` before the next.
        never: other texts that begin a call, which free text must not hold.
    """

    begin: str
    call: CallWriter
    before: str = ""
    between: str = ""
    end: str = ""
    one_block: bool = False
    never: tuple[str, ...] = ()

    def __call__(self, lark: Lark, wanted: Wanted) -> str:
        """Returns the expression of an answer."""
        rest = self._rest(lark, wanted)
        block = lark.rule(f"{lark.written(self.begin)} {rest}")
        more = "" if self.one_block or not wanted.parallel else f" ({lark.written(self.between)} {block})*"
        space = lark.terminal(r"/[ \t\r\n]{0,4}/")
        calls = f"{lark.rule(space)} {block}{more}"
        if wanted.must:
            return calls
        if wanted.answer is not None:
            return f"{lark.json(wanted.answer)} | {lark.rule(calls)}"
        begun = lark.until(self.begin, *self.never)
        free = lark.rule(lark.without(*self.never))
        return f"({begun} {rest})* {free}" if wanted.parallel else f"{free} | {begun} {rest}"

    def _rest(self, lark: Lark, wanted: Wanted) -> str:
        """What stands behind ``begin``, through the end of the block."""
        call = lark.any_of([self.call(lark, function) for function in wanted.functions])
        several = f" ({lark.written(self.between)} {call})*" if self.one_block and wanted.parallel else ""
        return lark.rule(f"{lark.written(self.before)} {call}{several} {lark.written(self.end)}")
