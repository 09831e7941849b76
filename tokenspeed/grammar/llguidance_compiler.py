"""Constraints compiled by llguidance: masks by a lexer of derivatives under an Earley parser.

Willard and Louf, "Efficient Guided Generation for Large Language Models" (2023) is the idea; llguidance is by the
guidance-ai project. All its work on a grammar runs without the GIL and is bounded by its own fuel (``LIMITS``).
"""

import logging
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from tokenspeed.device.handle import TokenMatcher
from tokenspeed.grammar.delay import DelayedMatcher, UndecidedMatcher, free_mask
from tokenspeed.grammar.source import grammar_source
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.messages import Constraint, ConstraintError

logger = logging.getLogger(__name__)

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # about 2 s of compiling at most
    step_lexer_fuel=200_000,  # about 14 ms of one step
    step_max_items=50_000,  # about 3 ms of one step
    max_lexer_states=8_000,  # one to two kB each, for every request that reaches them
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""What a grammar may take; beyond it the request ends with an error that says which limit."""

FORCED_CHARACTERS = 64
"""Text of which there is only one is spelled in the model's own tokens so far ahead; a constant of a megabyte would
otherwise be tokenized whole at every step."""

_LONGEST_ERROR = 400
_NOTHING_FOLLOWS = ("NoExtension", "NoExtensionBias")
"""What is no error here: an empty mask says it, and ``may_end`` whether the text is whole."""


class _Tokenizer:
    """What LLTokenizer wants of an object; the names are llguidance's."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, vocabulary: Vocabulary, end: int) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special)
        self.eos_token_id = end
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text[:FORCED_CHARACTERS])


class LlguidanceCompiler:
    """Compiles for one vocabulary. ``compile`` may run on several threads at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        ends = list(vocabulary.ends) or [0]  # llguidance wants one; a model without gives up its first token
        self._tokenizer = LLTokenizer(_Tokenizer(vocabulary, ends[0]), eos_token=ends)  # type: ignore[arg-type]
        self.words = -(-len(vocabulary.tokens) // 32)
        self._free = free_mask(len(vocabulary.tokens), ends)
        self._beginnings: dict[bytes, list[int]] = {}

    def compile(self, constraint: Constraint) -> "CompiledGrammar":
        """Returns the grammar, its first mask computed already.

        Raises ConstraintError for a text that is no grammar, that is too large, or that matches no text at all.
        """
        matcher = LLMatcher(self._tokenizer, grammar_source(constraint, self._vocabulary), log_level=0, limits=LIMITS)
        first = LlguidanceMatcher(matcher, self._free)
        mask = np.zeros(self.words, np.int32)
        if not first.error:
            first.fill(mask)
        if first.error:
            raise ConstraintError(first.error)
        if not mask.any():
            raise ConstraintError(
                "the constraint matches nothing but the empty text"
                if first.may_end
                else "no text matches the constraint"
            )
        for warning in matcher.get_grammar_warnings():
            logger.debug("a %s: %s", constraint.kind, warning)
        return CompiledGrammar(matcher, self._free, self._vocabulary.tokens, self._tokenizer, self._beginnings)


class CompiledGrammar:
    """A grammar at its beginning; see tokenspeed.device.handle.Grammar."""

    def __init__(
        self,
        beginning: LLMatcher,
        free: NDArray[np.int32],
        tokens: Sequence[bytes],
        tokenizer: LLTokenizer,
        beginnings: dict[bytes, list[int]],
        begin_after: bytes = b"",
        opening: bytes = b"",
    ) -> None:
        """``beginnings``: the tokens that are a beginning of an opening, once they were looked for."""
        self._beginning = beginning
        self._free = free
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._beginnings = beginnings
        self._begin_after = begin_after
        self._opening = opening

    def after(self, text: str, opening: str = "") -> "CompiledGrammar":
        """Returns the same grammar, to begin behind the first ``text`` of a choice; behind "" it begins at once.

        ``opening``: it begins at once in a choice that does not begin with this text.
        """
        return CompiledGrammar(
            self._beginning,
            self._free,
            self._tokens,
            self._tokenizer,
            self._beginnings,
            text.encode(),
            opening.encode(),
        )

    def matcher(self) -> TokenMatcher:
        """Returns a matcher of its own for one choice. Forward thread only."""
        matcher = self._from_beginning()
        if not self._begin_after:
            return matcher
        delayed = DelayedMatcher(matcher, self._begin_after, self._tokens, self._free, self._tokenizer.tokenize_bytes)
        if not self._opening:
            return delayed
        return UndecidedMatcher(self._from_beginning(), delayed, self._opening, self._tokens, self._beginnings)

    def _from_beginning(self) -> "LlguidanceMatcher":
        return LlguidanceMatcher(self._beginning.deep_copy(), self._free)


class LlguidanceMatcher:
    """See tokenspeed.device.handle.TokenMatcher."""

    def __init__(self, matcher: LLMatcher, free: NDArray[np.int32]) -> None:
        self._matcher = matcher
        self._free = free

    def fill(self, mask: NDArray[np.int32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        np.bitwise_and(mask, self._free, out=mask)  # whether the text may end is told apart

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def error(self) -> str:
        if not self._matcher.is_error():
            return ""
        text = self._matcher.get_error().replace("<non-verbose/>", "").strip()
        return "" if text in _NOTHING_FOLLOWS else text[:_LONGEST_ERROR] or "the grammar cannot go on"

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
