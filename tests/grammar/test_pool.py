"""Compiling beside the loop: nobody waits for anybody, what takes too long is given up, and what was made is kept."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from grammars import vocabulary

from tokenspeed.device.handle import Grammar, TokenMatcher
from tokenspeed.grammar import pool as pool_module
from tokenspeed.grammar.budget import CompiledBudget
from tokenspeed.grammar.narrowed import NarrowedGrammar
from tokenspeed.grammar.pool import Compilation, GrammarPool
from tokenspeed.grammar.rules import RuleCompiler
from tokenspeed.grammar.words import CompiledWords
from tokenspeed.messages import BadWords, Constraint, ConstraintError, Rule, ThinkingBudget


@dataclass
class FakeGrammar:
    text: str
    begin_after: str = ""

    def after(self, text: str, opening: str = "") -> "FakeGrammar":
        return FakeGrammar(self.text, text)

    def matcher(self) -> TokenMatcher:
        raise NotImplementedError


class Panic(BaseException):
    """As PyO3's PanicException, no Exception."""


@dataclass
class FakeCompiler:
    """Texts that begin with "wait" take until ``go`` is set. ``began`` counts compilations under way or over."""

    go: threading.Event = field(default_factory=threading.Event)
    began: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    texts: list[str] = field(default_factory=list)

    def compile(self, rule: Rule) -> FakeGrammar | CompiledWords | CompiledBudget:
        if isinstance(rule, Constraint):
            return self._compiled(rule)
        made = RuleCompiler(vocabulary(), constrains=False).compile(rule)
        assert isinstance(made, CompiledWords | CompiledBudget)
        return made

    def _compiled(self, constraint: Constraint) -> FakeGrammar:
        self.texts.append(constraint.text)
        self.began.release()
        if constraint.text.startswith("wait"):
            self.go.wait(30)
        if constraint.text == "bad":
            raise ConstraintError("it is bad")
        if constraint.text == "panic":
            raise Panic
        return FakeGrammar(constraint.text)

    def close(self) -> None:
        pass


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def compiler() -> Iterator[FakeCompiler]:
    made = FakeCompiler()
    yield made
    made.go.set()


@pytest.fixture
def pool(compiler: FakeCompiler, clock: Clock) -> Iterator[GrammarPool]:
    made = GrammarPool(lambda: compiler, time_limit_s=10, queue_limit_s=30, clock=clock)
    yield made
    made.close()


def regex(text: str, begin_after: str = "") -> Constraint:
    return Constraint(kind="regex", text=text, begin_after=begin_after)


def outcome(compilation: Compilation) -> Grammar | ConstraintError:
    """Waits for the workers, a moment at a time."""
    ticker = threading.Event()
    for _ in range(3000):
        found = compilation.outcome()
        if found is not None:
            return found
        ticker.wait(0.01)
    raise AssertionError("no outcome in 30 s")


def refusal(compilation: Compilation) -> ConstraintError:
    found = outcome(compilation)
    assert isinstance(found, ConstraintError)
    return found


def test_a_slow_text_holds_up_nobody(pool: GrammarPool, compiler: FakeCompiler) -> None:
    slow = pool.compile(regex("wait"))
    assert compiler.began.acquire(timeout=30)
    assert outcome(pool.compile(regex("quick"))) == FakeGrammar("quick")
    assert slow.outcome() is None
    compiler.go.set()
    assert outcome(slow) == FakeGrammar("wait")


def test_equal_texts_are_compiled_once(pool: GrammarPool, compiler: FakeCompiler) -> None:
    first, second = pool.compile(regex("wait")), pool.compile(regex("wait", "</think>"))
    compiler.go.set()
    assert outcome(first) == FakeGrammar("wait")
    assert outcome(second) == FakeGrammar("wait", "</think>")
    assert pool.compile(regex("wait")).outcome() == FakeGrammar("wait"), "at once, out of the cache"
    assert outcome(pool.compile(Constraint(kind="grammar", text="wait"))) == FakeGrammar("wait")
    assert compiler.texts == ["wait", "wait"], "once as a regex, once as a grammar"


def test_refusals_and_panics_are_told_and_kept(pool: GrammarPool, compiler: FakeCompiler) -> None:
    for _ in range(2):
        assert str(refusal(pool.compile(regex("bad")))) == "it is bad"
        panicked = refusal(pool.compile(regex("panic")))
        assert "Panic" in str(panicked) and panicked.code == "invalid_constraint"
    assert compiler.texts == ["bad", "panic"]
    assert outcome(pool.compile(regex("good"))) == FakeGrammar("good"), "the worker lives"


def test_what_takes_too_long_is_given_up_and_its_place_taken(
    pool: GrammarPool, compiler: FakeCompiler, clock: Clock
) -> None:
    slow = [pool.compile(regex(f"wait{at}")) for at in range(2)]
    for _ in slow:
        assert compiler.began.acquire(timeout=30)
    queued = pool.compile(regex("quick"))
    assert queued.outcome() is None, "both workers are busy"
    clock.now = 10.5
    assert "takes longer than 10 s" in str(refusal(slow[0]))
    assert outcome(queued) == FakeGrammar("quick"), "another worker took the place"
    assert refusal(slow[1]).code == "invalid_constraint"
    assert "takes longer" in str(pool.compile(regex("wait0")).outcome()), "kept: it would only take as long again"
    compiler.go.set()
    for at in range(8):
        assert outcome(pool.compile(regex(f"later{at}"))) == FakeGrammar(f"later{at}")


def test_an_abandoned_text_holds_no_worker_for_ever(pool: GrammarPool, compiler: FakeCompiler, clock: Clock) -> None:
    for at in range(2):
        pool.compile(regex(f"wait{at}")).cancel()
        pool.compile(regex(f"wait{at}"))  # somebody else, who will never ask
        assert compiler.began.acquire(timeout=30)
    clock.now = 10.5
    assert outcome(pool.compile(regex("quick"))) == FakeGrammar("quick")


def test_no_more_threads_are_left_behind_than_may_be(
    pool: GrammarPool, compiler: FakeCompiler, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "MAX_ABANDONED", 1)
    slow = [pool.compile(regex(f"wait{at}")) for at in range(3)]
    for _ in range(2):
        assert compiler.began.acquire(timeout=30)
    clock.now = 11
    assert [one.outcome() is None for one in slow] == [False, False, True]
    assert compiler.began.acquire(timeout=30), "one more worker was started for the third"
    clock.now = 22
    assert refusal(slow[2]).code == "invalid_constraint"
    starved = pool.compile(regex("quick"))
    assert starved.outcome() is None
    clock.now = 53
    assert refusal(starved).code == "constraint_busy"
    compiler.go.set()
    assert outcome(pool.compile(regex("again"))) == FakeGrammar("again"), "the threads that came back work on"


def test_what_nobody_waits_for_is_not_compiled(pool: GrammarPool, compiler: FakeCompiler) -> None:
    for at in range(2):
        pool.compile(regex(f"wait{at}"))
        assert compiler.began.acquire(timeout=30)
    gone = pool.compile(regex("gone"))
    stays, leaves = pool.compile(regex("shared")), pool.compile(regex("shared"))
    gone.cancel()
    leaves.cancel()
    compiler.go.set()
    assert outcome(stays) == FakeGrammar("shared")
    assert "gone" not in compiler.texts
    assert outcome(pool.compile(regex("gone"))) == FakeGrammar("gone"), "who comes later is served"


def test_too_many_at_a_time_are_refused(
    pool: GrammarPool, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "MAX_WAITING", 3)
    waiting = [pool.compile(regex(f"wait{at}")) for at in range(3)]
    with pytest.raises(ConstraintError, match="try again") as refused:
        pool.compile(regex("quick"))
    assert refused.value.code == "constraint_busy"
    compiler.go.set()
    for one in waiting:
        outcome(one)
    assert outcome(pool.compile(regex("quick"))) == FakeGrammar("quick")


def test_the_cache_is_bounded_by_number_and_by_bytes(
    pool: GrammarPool, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "CACHED_GRAMMARS", 3)
    monkeypatch.setattr(pool_module, "CACHED_BYTES", 100)
    for text in ("a", "b", "c", "a", "d", "a", "b"):  # d drives b out, the one used longest ago
        outcome(pool.compile(regex(text)))
    assert compiler.texts == ["a", "b", "c", "d", "b"]
    for text in ("x" * 60, "y" * 60, "x" * 60):
        outcome(pool.compile(regex(text)))
    assert compiler.texts[5:] == ["x" * 60, "y" * 60, "x" * 60]


def test_a_compiler_that_cannot_be_made_is_tried_again(compiler: FakeCompiler, clock: Clock) -> None:
    tries = []

    def load() -> FakeCompiler:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("tokenizer.json is gone")
        return compiler

    pool = GrammarPool(load, clock=clock)
    failed = refusal(pool.compile(regex("x")))
    assert failed.code == "constraint_unavailable" and "tokenizer.json is gone" in str(failed)
    assert outcome(pool.compile(regex("x"))) == FakeGrammar("x")
    assert outcome(pool.compile(regex("y"))) == FakeGrammar("y")
    assert len(tries) == 2
    pool.close()


def test_nothing_is_loaded_before_the_first_constraint(clock: Clock) -> None:
    threads = threading.active_count()
    GrammarPool(lambda: pytest.fail("loaded"), clock=clock)
    assert threading.active_count() == threads


WORDS = BadWords(words=("a",))
BUDGET = ThinkingBudget(tokens=3, opening="<t>", ends=("</t>",), closing="</t>")


def test_the_rules_of_a_request_make_one_grammar(pool: GrammarPool, compiler: FakeCompiler) -> None:
    both = pool.compile(regex("wait", "</t>"), WORDS, BUDGET)
    words = outcome(pool.compile(WORDS))
    assert isinstance(words, NarrowedGrammar) and words.base is None and words.budget is None
    assert both.outcome() is None, "it waits for the slowest"
    compiler.go.set()
    made = outcome(both)
    assert isinstance(made, NarrowedGrammar) and made.base == FakeGrammar("wait", "</t>") and made.budget is not None
    assert made.words is words.words, "a list is compiled once"


def test_one_rule_that_makes_no_sense_refuses_all(pool: GrammarPool) -> None:
    assert str(refusal(pool.compile(regex("bad"), WORDS))) == "it is bad"


def test_a_request_that_left_waits_for_none_of_its_rules(pool: GrammarPool, compiler: FakeCompiler) -> None:
    slow = [pool.compile(regex(f"wait{at}")) for at in range(2)]
    assert all(compiler.began.acquire(timeout=30) for _ in slow)
    pool.compile(regex("gone"), WORDS).cancel()
    compiler.go.set()
    assert outcome(pool.compile(regex("here"))) == FakeGrammar("here")
    assert "gone" not in compiler.texts
