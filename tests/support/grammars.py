"""A vocabulary of bytes, and grammars over it, for tests of constraints."""

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from tokenspeed.device.handle import TokenMatcher
from tokenspeed.grammar.llguidance_compiler import CompiledGrammar, LlguidanceCompiler
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.messages import Constraint, ConstraintKind

END, THINK, CALL, PADDING = 256, 257, 258, 259
PIECES = (b'{"', b'":', b'", "', b"ab", b"true", b"123", b"  ", b"}]", b"</think>", b">x", b"> ")
SIZE = 288
"""Logits; the ids behind the pieces mean nothing."""


def vocabulary() -> Vocabulary:
    """Ids 0 to 255 are bytes, then an end token, two special tokens, one without meaning, and PIECES."""
    tokens = [*(bytes((byte,)) for byte in range(256)), b"<end>", b"<|think|>", b"<|call|>", b"", *PIECES]
    return Vocabulary(
        tokens=[*tokens, *[b""] * (SIZE - len(tokens))],
        special=frozenset((END, THINK, CALL)),
        ends=(END,),
        encode=lambda text: list(text.encode()),
    )


def ids(text: str) -> list[int]:
    return list(text.encode())


def piece(text: bytes) -> int:
    return PADDING + 1 + PIECES.index(text)


def text_of(tokens: Iterable[int]) -> str:
    known = vocabulary().tokens
    return b"".join(known[token] for token in tokens).decode("utf-8", "replace")


@cache
def compiler() -> LlguidanceCompiler:
    return LlguidanceCompiler(vocabulary())


def compiled(kind: ConstraintKind, text: Any = "", begin_after: str = "", opening: str = "") -> CompiledGrammar:
    """The grammar of a constraint; other values than text are written as JSON."""
    written = text if isinstance(text, str) else json.dumps(text)
    return compiler().compile(Constraint(kind=kind, text=written)).after(begin_after, opening)


def allowed(matcher: TokenMatcher) -> set[int]:
    """The tokens that may come next."""
    mask = np.full(-(-SIZE // 32), -1, np.int32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def behind(kind: ConstraintKind, text: Any, tokens: Iterable[int], begin_after: str = "") -> TokenMatcher:
    """A matcher that accepted ``tokens``, each of which it allowed."""
    matcher = compiled(kind, text, begin_after).matcher()
    for token in tokens:
        assert token in allowed(matcher), (token, text_of([token]))
        matcher.accept(token)
    return matcher
