"""No text of tokens holds a bad word, and no token that would not complete one is ruled out."""

from collections.abc import Sequence

import numpy as np
import pytest
from grammars import CALL, END, PADDING, SIZE, allowed, compiled, ids, piece, vocabulary
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.device.handle import Grammar, TokenMatcher
from tokenspeed.grammar.delay import free_mask
from tokenspeed.grammar.narrowed import NO_WORD_LEFT, NarrowedGrammar
from tokenspeed.grammar.rules import RuleCompiler
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.grammar.words import CompiledWords, TokenIndex
from tokenspeed.messages import BadWords, Constraint, ConstraintError

SPECIAL, MEANINGLESS = 0, 1


def words_of(tokens: Sequence[bytes], words: Sequence[str]) -> CompiledWords:
    known = Vocabulary(tokens=tokens, special=frozenset((SPECIAL,)), ends=(), encode=lambda text: [])
    index = TokenIndex(known)
    return CompiledWords(index, [word.encode() for word in words], free_mask(len(tokens), ()))


def matcher_of(words: Sequence[str], base: Grammar | None = None) -> TokenMatcher:
    found = RuleCompiler(vocabulary(), constrains=False).compile(BadWords(words=tuple(words)))
    assert isinstance(found, CompiledWords)
    return NarrowedGrammar(base, found, None).matcher()


def let_through(matcher: TokenMatcher, size: int) -> set[int]:
    mask = np.zeros(-(-size // 32), np.int32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]).tolist())


TEXT = st.text("abü", min_size=1, max_size=5)


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=4) | TEXT.map(str.encode), min_size=1, max_size=40),
    words=st.lists(TEXT, min_size=1, max_size=6),
    picks=st.lists(st.integers(0, 1 << 16), max_size=25),
)
def test_a_token_is_ruled_out_where_it_would_complete_a_word(
    pieces: list[bytes], words: list[str], picks: list[int]
) -> None:
    tokens = [b"<special>", b"", *pieces]
    matcher = NarrowedGrammar(None, words_of(tokens, words), None).matcher()
    bad, text = [word.encode() for word in words], b""
    for pick in picks:
        expected = {
            token
            for token, own in enumerate(tokens)
            if token in (SPECIAL, MEANINGLESS) or not any(word in text + own for word in bad)
        }
        found = let_through(matcher, len(tokens))
        assert found == expected
        token = sorted(found)[pick % len(found)]
        matcher.accept(token)
        text += b"" if token == SPECIAL else tokens[token]


def test_a_word_is_found_in_whatever_tokens_spell_it() -> None:
    matcher = matcher_of(["tab", "5 mm"])
    for token in [*ids("s"), piece(b"true"), *ids("t")]:
        assert token in allowed(matcher)
        matcher.accept(token)
    assert not allowed(matcher) & {piece(b"ab")} and ord("a") in allowed(matcher)
    matcher.accept(ord("a"))
    assert ord("b") not in allowed(matcher)
    matcher.accept(CALL)
    assert ord("b") not in allowed(matcher), "clients are not shown a special token: the text would be tab"
    matcher.accept(ord("x"))
    assert allowed(matcher) == set(range(SIZE)) - {END}
    assert matcher.may_end and not matcher.error


def test_words_go_with_a_constraint() -> None:
    grammar = compiled("regex", "(ab|cd){2}")
    matcher = matcher_of(["ba", "dc"], grammar)
    assert allowed(matcher) == {ord("a"), ord("c"), piece(b"ab")}
    for token in [piece(b"ab"), *ids("cd")]:
        assert token in allowed(matcher)
        matcher.accept(token)
    assert allowed(matcher) == set() and matcher.may_end and not matcher.error, "it is whole"
    stuck = matcher_of(["abab", "abc"], grammar)
    stuck.accept(piece(b"ab"))
    assert allowed(stuck) == ({ord("a")}) and not stuck.error, "aba may still come, abab may not"
    stuck.accept(ord("a"))
    assert allowed(stuck) == set() and not stuck.may_end and stuck.error == NO_WORD_LEFT


def test_where_the_text_may_end_words_only_end_it() -> None:
    matcher = matcher_of(["aa"], compiled("regex", "a*"))
    assert ord("a") in allowed(matcher)
    matcher.accept(ord("a"))
    assert not allowed(matcher) and matcher.may_end and not matcher.error


def test_a_hostile_list_is_compiled_and_asked_in_bounded_work() -> None:
    """128 words that are each other's beginnings and ends, over tokens that are runs of the same letter."""
    runs = [b"a" * length for length in range(1, 64)]
    tokens = [b"", b"", *runs, b"b", b"ab", b"ba"]
    words = ["a" * length + "b" for length in range(1, 128)] + ["a" * 128]
    found = words_of(tokens, words)
    matcher = NarrowedGrammar(None, found, None).matcher()
    for _ in range(3):
        matcher.accept(tokens.index(runs[39]))
    left = let_through(matcher, len(tokens))
    assert left == {SPECIAL, MEANINGLESS, *(tokens.index(run) for run in runs if len(run) < 8)}


def test_without_structured_output_only_constraints_are_refused() -> None:
    compiler = RuleCompiler(vocabulary(), constrains=False)
    with pytest.raises(ConstraintError, match="structured output is off"):
        compiler.compile(Constraint(kind="regex", text="a"))
    compiler.close()
    assert PADDING in allowed(matcher_of(["x"]))
