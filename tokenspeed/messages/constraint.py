"""What the text of a choice must look like, as it crosses to the engine, which compiles it."""

from typing import Literal, get_args

import msgspec

ConstraintKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]
CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = get_args(ConstraintKind)

MAX_CONSTRAINT_BYTES = 256 << 10
"""The longest text of a constraint in UTF-8; the frontend refuses longer ones, and so does the engine."""

MAX_BEGIN_BYTES = 256
"""The longest ``begin_after`` in UTF-8, and the longest ``opening``."""


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint of one choice. Equal constraints are compiled once.

    Attributes:
        kind: how ``text`` is meant.
            "json_object": any JSON object; ``text`` is empty.
            "json_schema": a JSON schema, as JSON.
            "regex": a regular expression that the whole text matches (the syntax of Rust's regex, without
                look-around).
            "choice": a JSON list of strings, one of which the text is.
            "grammar": a context-free grammar, as Lark (llguidance's dialect) or as EBNF with ``root ::= ...``.
            "structural_tag": free text with tags whose content is constrained, as JSON
                ``{"triggers": [...], "structures": [{"begin", "schema", "end"}, ...]}``.
        text: at most MAX_CONSTRAINT_BYTES in UTF-8.
        begin_after: the text of the choice is free up to and with the first occurrence of these characters (the end
            of the reasoning, spelled as its tokens are), and constrained from there; "" constrains all of it.
        opening: goes with ``begin_after``: only a text that begins with these characters (those that open reasoning) is
            free up to there; any other is constrained from its beginning. "": every text is free up to there.
    """

    kind: ConstraintKind
    text: str = ""
    begin_after: str = ""
    opening: str = ""


class ConstraintError(ValueError):
    """A constraint that cannot be compiled; the message says why, in the words of the one who wrote it.

    Attributes:
        code: "invalid_constraint" where the constraint is at fault, "constraint_too_costly" where compiling took more
            than it may, "constraint_busy" where the engine is at fault, "constraint_unavailable" where it cannot
            compile any.
    """

    def __init__(self, message: str, code: str = "invalid_constraint") -> None:
        super().__init__(message)
        self.code = code
