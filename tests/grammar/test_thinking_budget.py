"""Reasoning ends at its budget, wherever it began, and what follows is as free as it was."""

import pytest
from grammars import CALL, END, SIZE, THINK, allowed, compiled, ids, piece, vocabulary
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.device.handle import Grammar, TokenMatcher
from tokenspeed.grammar.budget import CompiledBudget
from tokenspeed.grammar.narrowed import NarrowedGrammar
from tokenspeed.grammar.rules import RuleCompiler
from tokenspeed.grammar.words import CompiledWords
from tokenspeed.messages import BadWords, ThinkingBudget

CLOSING = ids("</think>")
FREE = set(range(SIZE)) - {END}


def budget(tokens: int, **fields: object) -> ThinkingBudget:
    given_ = {"opening": "<think>", "ends": ("</think>", "<call>"), "closing": "</think>", **fields}
    return ThinkingBudget(tokens=tokens, **given_)  # type: ignore[arg-type]


def matcher_of(rule: ThinkingBudget, base: Grammar | None = None, words: tuple[str, ...] = ()) -> TokenMatcher:
    compiler = RuleCompiler(vocabulary(), constrains=False)
    found = compiler.compile(rule)
    bad = compiler.compile(BadWords(words=words)) if words else None
    assert isinstance(found, CompiledBudget) and (bad is None or isinstance(bad, CompiledWords))
    return NarrowedGrammar(base, bad, found).matcher()


def take(matcher: TokenMatcher, tokens: list[int]) -> None:
    for token in tokens:
        assert token in allowed(matcher), (token, chr(token))
        matcher.accept(token)


def closes(matcher: TokenMatcher, closing: list[int] = CLOSING) -> None:
    """What must come next is the closing text, and nothing else."""
    for token in closing:
        assert allowed(matcher) == {token} and not matcher.may_end
        matcher.accept(token)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_prompt_that_opened_reasoning(tokens: int) -> None:
    matcher = matcher_of(budget(tokens, is_open=True))
    take(matcher, ids("x" * tokens))
    closes(matcher)
    assert allowed(matcher) == FREE and matcher.may_end
    take(matcher, ids("<think> is free in an answer"))


@pytest.mark.parametrize("begin", ["<think>", "\n <think>"])
def test_reasoning_that_the_model_opens(begin: str) -> None:
    matcher = matcher_of(budget(2))
    take(matcher, ids(begin))
    take(matcher, ids("ab"))
    closes(matcher)
    assert allowed(matcher) == FREE


@pytest.mark.parametrize("answer", ["Hi <think>", "<thin", "", "   "])
def test_an_answer_without_reasoning_is_free(answer: str) -> None:
    matcher = matcher_of(budget(0))
    take(matcher, ids(answer))
    assert allowed(matcher) == FREE and matcher.may_end


@pytest.mark.parametrize("end", [ids("</think>"), [piece(b"</think>")], [*ids("</think"), piece(b">x")], ids("<call>")])
def test_reasoning_that_the_model_ends_in_time(end: list[int]) -> None:
    matcher = matcher_of(budget(20, is_open=True))
    take(matcher, [*ids("ab"), *end, *ids("y" * 30)])
    assert allowed(matcher) == FREE


def test_a_constraint_begins_behind_the_forced_end() -> None:
    matcher = matcher_of(budget(3, is_open=True), compiled("regex", "[0-9]{2}", "</think>"))
    assert not matcher.may_end
    take(matcher, ids("abc"))
    closes(matcher)
    assert allowed(matcher) >= set(ids("0123456789")) and ord("a") not in allowed(matcher)
    undecided = compiled("regex", "[0-9]{2}", "</think>", "<think>")
    matcher = matcher_of(budget(0), undecided)
    take(matcher, ids("<think>"))
    closes(matcher)
    take(matcher, ids("42"))
    assert allowed(matcher) == set() and matcher.may_end


def test_bad_words_do_not_keep_reasoning_from_ending() -> None:
    matcher = matcher_of(budget(1, is_open=True), words=("think", "ink>a"))
    take(matcher, ids("x"))
    closes(matcher)
    assert allowed(matcher) == FREE - {ord("a"), piece(b"ab"), piece(b"</think>")}


def test_a_grammar_that_frames_the_answer_has_the_last_word() -> None:
    """Behind the end of the reasoning it wants a call, where the budget would begin an answer."""
    grammar = compiled("grammar", 'start: "[" /[a-z]/* "]" "call"')
    rule = budget(2, opening="[", ends=("]",), closing="]answer", reopens=True)
    matcher = matcher_of(rule, grammar)
    take(matcher, ids("[ab"))
    closes(matcher, ids("]"))
    assert allowed(matcher) == {ord("c")}
    take(matcher, ids("call"))
    assert matcher.may_end or not allowed(matcher)
    free = matcher_of(rule)
    take(free, ids("[ab"))
    closes(free, ids("]answer"))
    take(free, ids("s ["))
    closes(free, ids("]answer"))


# Text that opens and ends reasoning often.
PICKS = st.lists(
    st.sampled_from([*ids("<think>"), piece(b"</think>"), ord("a"), ord(" "), THINK, CALL]), min_size=1, max_size=60
)


@given(picks=PICKS, tokens=st.integers(0, 6), is_open=st.booleans(), reopens=st.booleans())
def test_no_text_reasons_beyond_its_budget_and_the_past_alone_decides(
    picks: list[int], tokens: int, is_open: bool, reopens: bool
) -> None:
    rule = budget(tokens, is_open=is_open, reopens=reopens)
    matcher = matcher_of(rule)
    said: list[int] = []
    for pick in picks:
        choices = allowed(matcher)
        said.append(pick if pick in choices else min(choices))
        matcher.accept(said[-1])
    again = matcher_of(rule)  # as after a retraction: nothing is filled in between
    for token in said:
        again.accept(token)
    assert allowed(again) == allowed(matcher) and again.may_end == matcher.may_end
    if is_open:
        known = vocabulary().tokens
        inside, thought = b"", 0
        for token in said:
            inside += known[token]
            thought += 1
            if b"</think>" in inside or b"<call>" in inside:
                break
        assert thought <= tokens + len(CLOSING)
