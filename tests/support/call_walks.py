"""Texts that grammars of calls let through, drawn token by token, and what their parsers read in them."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tokenspeed.frontend.parsing.parser import AnswerParser, Parsing
from tokenspeed.frontend.parsing.parts import Answer, put_together
from tokenspeed.frontend.parsing.registry import REASONING_FORMATS, TOOL_FORMATS, WholeFormat
from tokenspeed.grammar.llguidance_compiler import LlguidanceCompiler
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.messages import Constraint
from tokenspeed.server.calls import call_constraint

END = 256
PIECES = ("</", "\n</", "</parameter>", "\n</parameter>", "</arg_value>", "</tool_call>", "]<]minimax[>[</", '"}')
"""Ends that letters drawn at random would not find."""
PROMPT_ENDS = {"gpt_oss": "<|start|>assistant", "inkling": "<|message_model|>"}


@dataclass(frozen=True)
class Drawn:
    """A text, and whether it ended by itself."""

    text: str
    ended: bool


class Words:
    """A vocabulary of bytes, one family's markers (special tokens or not) and pieces."""

    def __init__(self, tool_format: str, special: bool) -> None:
        self.markers = tuple(TOOL_FORMATS[tool_format].markers)
        names = [*(self.markers if special else ()), *(() if special else self.markers), *PIECES]
        self.tokens = [*(bytes((byte,)) for byte in range(256)), b"<end>", *(name.encode() for name in names)]
        self.special = {name: END + 1 + at for at, name in enumerate(self.markers)} if special else {}
        self.compiler = LlguidanceCompiler(
            Vocabulary(
                tokens=self.tokens,
                special=frozenset((END, *self.special.values())),
                ends=(END,),
                encode=lambda text: list(text.encode()),
            )
        )

    def ids(self, text: str) -> list[int]:
        """Markers as their tokens where they are special, all else as bytes."""
        pieces = re.split("(" + "|".join(map(re.escape, self.special)) + ")", text) if self.special else [text]
        return [one for piece in pieces for one in ([self.special[piece]] if piece in self.special else piece.encode())]

    def draw(self, constraint: Constraint, chance: random.Random, limit: int) -> Drawn:
        """Draws allowed tokens, ends rather than others, up to ``limit``."""
        matcher = self.compiler.compile(constraint).matcher()
        mask = np.zeros(self.compiler.words, np.int32)
        data, ended = b"", False
        for _ in range(limit):
            matcher.fill(mask)
            assert not matcher.error, (matcher.error, data)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            ended = matcher.may_end and (not allowed or chance.random() < 0.4)
            if ended:
                break
            assert allowed, f"a dead end behind {data!r}"
            ascii_ = [token for token in allowed if not 128 <= token <= 255] or allowed
            good = [token for token in ascii_ if token > END or token in b'"}],>\n'] or ascii_
            token = chance.choice(good if chance.random() < 0.5 else ascii_)
            matcher.accept(token)
            data += self.tokens[token]
        return Drawn(data.decode("utf-8", "replace"), ended)

    def accepts(self, constraint: Constraint, text: str) -> str:
        """Returns "" where the whole text is let through and may end, else what is wrong."""
        matcher = self.compiler.compile(constraint).matcher()
        mask = np.zeros(self.compiler.words, np.int32)
        ids = self.ids(text)
        for at, token in enumerate(ids):
            matcher.fill(mask)
            if not mask.view(np.uint32)[token // 32] >> np.uint32(token % 32) & np.uint32(1):
                before = b"".join(self.tokens[one] for one in ids[:at]).decode("utf-8", "replace")
                return f"{self.tokens[token]!r} is refused behind {before!r}"
            matcher.accept(token)
        matcher.fill(mask)
        return "" if matcher.may_end else f"it may not end behind {text!r}"


@cache
def words(tool_format: str, special: bool) -> Words:
    return Words(tool_format, special)


def constraint_for(
    known: Words, tool_format: str, tools: Sequence[Mapping[str, Any]], choice: Any, parallel: bool = True, **more: Any
) -> Constraint:
    more.setdefault("prompt_end", PROMPT_ENDS.get(tool_format, ""))
    asked = call_constraint(
        tools,
        choice,
        parallel=parallel,
        tool_format=tool_format,
        special=known.special,
        **more,
    )
    assert asked is not None
    return asked.constraint


def read(tool_format: str, tools: Sequence[Mapping[str, Any]], drawn: Drawn, parallel: bool = True) -> Answer:
    """What the family's parser makes of it."""
    whole = isinstance(TOOL_FORMATS[tool_format], WholeFormat)
    assert not whole or tool_format in REASONING_FORMATS
    parser = AnswerParser(
        Parsing(
            tool_format=tool_format,
            reasoning_format=tool_format if whole else "",
            tools=tools,
            parallel=parallel,
            prompt_end=PROMPT_ENDS.get(tool_format, ""),
            valid_calls=True,
        )
    )
    return put_together(parser.push(drawn.text) + parser.finish(drawn.ended))
