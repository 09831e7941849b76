"""Writes grammars in llguidance's Lark: literals, special tokens, JSON by a schema, and text up to a marker."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,64}"
"""Between the tokens of JSON; an end for a model that would write blanks for ever."""


NUMBER = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/"
"""A number of JSON and of Python that no reader takes for an infinity."""
_SCALARS = ("string", "integer", "number", "boolean", "null")
"""Types without white space in them."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

NOTHING = '""'
"""The expression of the empty text."""


class Lark:
    """Collects rules; each method returns an expression that stands for what was asked.

    A marker is written as its token where it is a special token of the model, as text where it is not.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        """``special``: the names of the model's special tokens and their ids."""
        self._special = special
        names = "|".join(re.escape(name) for name in sorted(filter(None, special), key=len, reverse=True))
        self._pattern = re.compile(f"({names})") if names else None
        self._names: dict[str, str] = {}
        self.free = self.terminal(r"/(.|\n)*/")

    def is_special(self, name: str) -> bool:
        return name in self._special

    def rule(self, body: str, lazy: bool = False) -> str:
        """A rule; a ``lazy`` one is a single lexeme that ends as soon as it may."""
        return self._named(("[lazy]" if lazy else "") + ": " + body, "r")

    def terminal(self, body: str) -> str:
        """A lexeme, as long as it may be."""
        return self._named(": " + body, "T")

    def _named(self, definition: str, prefix: str) -> str:
        return self._names.setdefault(definition, f"{prefix}{len(self._names)}")

    def written(self, text: str) -> str:
        """The text as it stands, special tokens in it as themselves."""
        return " ".join(self._pieces(text)) or NOTHING

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON text that conforms to a schema."""
        if schema.get("type") in _SCALARS:
            return self.rule("%json " + json.dumps({key: schema[key] for key in schema if key != "x-guidance"}))
        options = {"whitespace_pattern": _WHITESPACE, **(schema.get("x-guidance") or {})}
        return self.rule("%json " + json.dumps({**schema, "x-guidance": options}))

    def any_of(self, alternatives: Sequence[str]) -> str:
        return self.rule(" | ".join(dict.fromkeys(alternatives)))

    def without(self, *never: str) -> str:
        """A lexeme of text in which none of ``never`` stands, spelled in ordinary tokens either."""
        if not never:
            return self.free
        found = " | ".join(map(_literal, never))
        return self.terminal(f"{self.free} & ~{self.terminal(f'{self.free} ({found}) {self.free}')}")

    def until(self, marker: str, *never: str, text: str = "") -> str:
        """Text through the first ``marker``, none of ``never`` before it; ``text`` is a lexeme that says more of it."""
        first, *rest = self._pieces(marker)
        if not rest and not self.is_token(first):
            return self.rule(f"{text or self.without(*never)} {first}", lazy=True)
        before = text or self.without(*dict.fromkeys((marker, *never)))
        if self.is_token(first):
            return self.rule(" ".join((self.rule(before), first, *rest)))
        # Inside a lexeme no special token can stand, so one ends with the text that comes before the token.
        return self.rule(" ".join((self.terminal(f"{before} {first}"), *rest)))

    @staticmethod
    def is_token(piece: str) -> bool:
        return piece.startswith("<[")

    def source(self, start: str) -> str:
        """The whole grammar; ``start`` is the expression of an answer."""
        rules = [name + definition for definition, name in self._names.items()]
        return "\n".join(("%llguidance {}", f"start: {start}", *rules))

    def _pieces(self, text: str) -> list[str]:
        pieces = self._pattern.split(text) if self._pattern else [text]
        return [f"<[{self._special[one]}]>" if one in self._special else _literal(one) for one in pieces if one]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
