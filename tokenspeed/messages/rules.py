"""What narrows an answer beside its constraint, as it crosses to the engine: words it may not hold, and a budget of
reasoning."""

import msgspec

from tokenspeed.messages.constraint import Constraint

MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 128


class BadWords(msgspec.Struct, frozen=True, kw_only=True):
    """Texts that the tokens of a choice never make, however they are cut into tokens; none of them empty."""

    words: tuple[str, ...]


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """After ``tokens`` tokens of reasoning the engine writes ``closing`` and lets the choice go on behind it.

    Attributes:
        tokens: the most tokens between the markers; 0 closes reasoning as soon as it is open.
        opening: the text that opens reasoning.
        ends: the texts that end it, whoever writes them.
        closing: what is written where the model has not ended it; it begins with one of ``ends``.
        is_open: the prompt opened it.
        reopens: ``opening`` counts wherever it comes, as in formats that frame every message; else at the beginning of
            the choice only, behind white space.
    """

    tokens: int
    opening: str
    ends: tuple[str, ...]
    closing: str
    is_open: bool = False
    reopens: bool = False


Rule = Constraint | BadWords | ThinkingBudget
"""Something that says which tokens a choice may draw, and that is compiled in the engine."""
