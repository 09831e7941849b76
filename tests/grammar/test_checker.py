"""What a text does to the compiler, it does to a process of its own."""

import json
import os
from collections.abc import Iterator

import pytest
from grammars import CALL, allowed, ids, vocabulary

from tokenspeed.grammar.checker import NICE, CheckedCompiler
from tokenspeed.messages import Constraint, ConstraintError, ConstraintKind


@pytest.fixture(scope="module")
def compiler() -> Iterator[CheckedCompiler]:
    made = CheckedCompiler(vocabulary(), limit_s=0.5)
    yield made
    made.close()


ENDLESS = "start: X\nX: " + " & ".join(f"/.*a{i}.*/" for i in range(40))
RULES = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(12_000)) + '\nr12000: "b"'
REFERENCES = {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(4000)}}
REFERENCES["$defs"] |= {"d4000": {"type": "null"}}  # type: ignore[operator]


@pytest.mark.parametrize(
    ("kind", "text", "said", "code"),
    [
        ("grammar", ENDLESS, "takes longer than 0.5 s", "constraint_too_costly"),
        ("grammar", RULES, "depth of recursion", "constraint_too_costly"),
        ("json_schema", json.dumps(REFERENCES), "depth of recursion", "constraint_too_costly"),
        ("regex", "(a", "unclosed group", "invalid_constraint"),
        ("json_schema", "", "not valid JSON", "invalid_constraint"),
    ],
    ids=["endless", "rules", "references", "regex", "empty"],
)
def test_it_may_die_of_a_text(compiler: CheckedCompiler, kind: ConstraintKind, text: str, said: str, code: str) -> None:
    with pytest.raises(ConstraintError) as refused:
        compiler.compile(Constraint(kind=kind, text=text))
    assert said in str(refused.value)
    assert refused.value.code == code
    matcher = compiler.compile(Constraint(kind="choice", text='["yes"]')).matcher()
    assert allowed(matcher) == {ord("y")}, "the next one is served"


def test_special_tokens_have_their_ids_there_too(compiler: CheckedCompiler) -> None:
    for text in (f'start: <[{CALL}]> "a"', 'start: <|call|> "a"'):
        matcher = compiler.compile(Constraint(kind="grammar", text=text)).matcher()
        assert allowed(matcher) == {CALL}
    with pytest.raises(ConstraintError, match="unknown special token"):
        compiler.compile(Constraint(kind="grammar", text='start: <|never|> "a"'))
    tag = {"triggers": ["<|call|>"], "structures": [{"begin": "<|call|>x"}]}
    assert allowed(compiler.compile(Constraint(kind="structural_tag", text=json.dumps(tag))).matcher())


def test_what_passes_is_compiled_for_the_real_tokens(compiler: CheckedCompiler) -> None:
    matcher = compiler.compile(Constraint(kind="regex", text="(ab)+")).matcher()
    for token in ids("ab"):
        assert token in allowed(matcher)
        matcher.accept(token)
    assert matcher.may_end


def test_a_text_that_kills_its_process_leaves_the_checker(compiler: CheckedCompiler) -> None:
    compiler.compile(Constraint(kind="regex", text="a"))
    (checker,) = compiler._idle
    for text in (RULES, ENDLESS):
        with pytest.raises(ConstraintError):
            compiler.compile(Constraint(kind="grammar", text=text))
    assert compiler._idle == [checker]
    assert checker.is_alive, "another one would cost a core for as long as it starts"


def test_it_gives_way_to_the_engine(compiler: CheckedCompiler) -> None:
    compiler.compile(Constraint(kind="regex", text="a"))
    process = compiler._idle[0]._process.pid
    assert os.getpriority(os.PRIO_PROCESS, process) == os.getpriority(os.PRIO_PROCESS, 0) + NICE
    assert os.getsid(process) == os.getsid(0), "Linux weighs sessions before it looks at niceness"
    assert os.getpgid(process) == process, "a terminal's Ctrl-C ends the engine, which ends it"


def test_a_checker_that_died_idle_is_nobodys_fault(compiler: CheckedCompiler) -> None:
    compiler.compile(Constraint(kind="regex", text="a"))
    for checker in compiler._idle:
        checker.kill()
    assert allowed(compiler.compile(Constraint(kind="regex", text="b")).matcher()) == {ord("b")}
