"""Every kind of constraint lets through what it means and nothing else; what makes no sense is refused in words."""

import json
from typing import Any

import pytest
from grammars import CALL, END, PADDING, SIZE, THINK, allowed, behind, compiled, compiler, ids, piece, text_of

from tokenspeed.device.handle import TokenMatcher
from tokenspeed.grammar.source import MAX_DEPTH
from tokenspeed.messages import MAX_BEGIN_BYTES, MAX_CONSTRAINT_BYTES, Constraint, ConstraintError, ConstraintKind

TAGS = {
    "triggers": ["<f=", "<|call|>"],
    "structures": [
        {"begin": "<f=one>", "schema": {"type": "object", "properties": {}, "maxProperties": 0}, "end": "</f>"},
        {"begin": "<f=two>", "schema": {"type": "null"}, "end": "</f>"},
        {"begin": "<|call|>go<|think|>", "schema": {"const": 7}, "end": "<|call|>"},
    ],
}

TEXTS: list[tuple[ConstraintKind, Any, str, str]] = [
    ("json_object", "", '{"a": [1, {"b": null}]}', "[1]"),
    ("json_schema", {"type": "integer", "minimum": 3, "maximum": 12}, "12", "13"),
    ("json_schema", {"type": "array", "items": {"enum": ["x", 1]}, "maxItems": 2}, '["x",1]', "[2]"),
    ("regex", r"[0-9]{2}-(a|b)+", "42-abba", "4-a"),
    ("choice", ["yes", "no", "ñandú"], "ñandú", "nope"),
    ("grammar", 'root ::= "a" [0-9]+ ";"', "a12;", "b"),
    ("grammar", 'start: "x" /[0-9]/ %json {"type":"null"}', "x7null", "xx"),
    ("structural_tag", TAGS, "hi <f=two>null</f> bye <f=one>{ }</f>", "<f=three"),
]


@pytest.mark.parametrize(("kind", "text", "right", "wrong"), TEXTS, ids=lambda value: str(value)[:24])
def test_each_kind_lets_its_texts_through(kind: ConstraintKind, text: Any, right: str, wrong: str) -> None:
    matcher = behind(kind, text, ids(right))
    rest = allowed(matcher)
    assert matcher.may_end and not matcher.error
    assert not rest & {END, PADDING, SIZE - 1}
    matcher = compiled(kind, text).matcher()
    for at, token in enumerate(ids(wrong)):
        if token not in allowed(matcher):
            break
        matcher.accept(token)
        assert at < len(ids(wrong)) - 1 or not (allowed(matcher) or matcher.may_end), "the wrong text was let through"


def test_only_what_is_whole_may_end() -> None:
    matcher = behind("json_schema", {"type": "object"}, ids('{"a": '))
    assert allowed(matcher) and not matcher.may_end
    for token in ids("1"):
        matcher.accept(token)
    allowed(matcher)
    assert not matcher.may_end
    matcher.accept(ord("}"))
    assert allowed(matcher) == set() and matcher.may_end, "nothing follows an object"


def test_white_space_ends() -> None:
    matcher = behind("json_object", "", ids("{" + " " * 64))
    assert not allowed(matcher) & set(ids(" \n\t\r"))
    own = {"type": "object", "x-guidance": {"whitespace_pattern": " ?"}}
    assert ord(" ") not in allowed(behind("json_schema", own, ids("{ ")))


def test_tokens_of_several_bytes_and_special_tokens() -> None:
    assert piece(b'{"') in allowed(compiled("json_object").matcher())
    assert {THINK, CALL} & allowed(compiled("regex", "(.|\n)*").matcher()) == set()
    matcher = behind("structural_tag", TAGS, [*ids("go "), CALL, *ids("go"), THINK, *ids("7"), CALL])
    assert {*ids("a"), CALL} <= allowed(matcher) and matcher.may_end
    assert allowed(behind("structural_tag", TAGS, [CALL])) == {ord("g")}


def test_a_text_of_which_there_is_one_is_spelled_in_the_models_tokens() -> None:
    matcher = behind("choice", ["ab" * 50_000], [])
    assert allowed(matcher) == {ord("a")}, "encode spells bytes; the piece 'ab' is not how the model writes it"
    for token in ids("ab" * 40):
        assert allowed(matcher) == {token}
        matcher.accept(token)


@pytest.mark.parametrize("fill", [False, True])
def test_masks_depend_on_the_tokens_and_not_on_what_was_filled(fill: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "n": {"type": "number"}},
        "required": ["name"],
    }
    text = ids('{ "name": "x\\ny", "n": 1.5e3 }')
    going = compiled("json_schema", schema).matcher()
    for at, token in enumerate(text):
        fresh = compiled("json_schema", schema).matcher()
        for earlier in text[:at]:
            if fill:
                allowed(fresh)
            fresh.accept(earlier)
        assert allowed(fresh) == allowed(going)
        going.accept(token)


def test_a_constraint_begins_behind_a_text() -> None:
    matcher = compiled("choice", ["yes"], "</think>").matcher()
    for token in [*ids("hm <|think|> </thin"), THINK, *ids("yes </thi")]:
        assert allowed(matcher) == set(range(SIZE)) - {END}
        assert not matcher.may_end
        matcher.accept(token)
    for token in ids("nk>"):
        matcher.accept(token)
    assert allowed(matcher) == {ord("y")}
    whole = compiled("choice", ["yes"], "</think>").matcher()
    whole.accept(piece(b"</think>"))
    assert allowed(whole) == {ord("y")}


def test_reasoning_that_the_model_may_leave_out() -> None:
    def begun(text: str) -> TokenMatcher:
        matcher = compiled("choice", ["<b>", "yes"], "</think>", "<|think|>").matcher()
        for token in ids(text):
            assert token in allowed(matcher)
            matcher.accept(token)
        return matcher

    assert allowed(begun("")) == {ord("y"), ord("<"), THINK}
    assert allowed(begun("<")) == {ord("b"), ord("|")}, "it may be both still"
    assert allowed(begun("<b")) == {ord(">")} and allowed(begun("y")) == {ord("e")}
    assert not begun("<|think|").may_end and allowed(begun("<|think|")) == {ord(">")}
    for matcher in (begun("<|think|>"), begun("")):
        if THINK in allowed(matcher):
            matcher.accept(THINK)
        for token in ids("hm yes</think>"):
            assert allowed(matcher) == set(range(SIZE)) - {END}
            matcher.accept(token)
        assert allowed(matcher) == {ord("y"), ord("<")} and not matcher.may_end
        for token in ids("yes"):
            matcher.accept(token)
        assert allowed(matcher) == set() and matcher.may_end


def test_a_token_that_goes_on_behind_the_text() -> None:
    for last, answer, left in ((b"> ", "yes", "y"), (b">x", "xy", "y")):
        matcher = compiled("choice", [answer], "</think>").matcher()
        for token in [*ids("</think"), piece(last)]:
            matcher.accept(token)
        assert text_of(allowed(matcher)) == left
    matcher = compiled("choice", ["yes"], "</think>").matcher()
    for token in [*ids("</think"), piece(b">x")]:
        matcher.accept(token)
    assert allowed(matcher) == set() and matcher.error and not matcher.may_end


REFUSED: list[tuple[ConstraintKind, Any, str]] = [
    ("json_schema", '{"type":"object","properties":{"foo":"bar"}}', "schema must be an object or boolean"),
    ("json_schema", "", "not valid JSON"),
    ("json_schema", "{", "not valid JSON"),
    ("json_schema", "[1]", "must be an object"),
    ("json_schema", '{"a": NaN}', "line 1"),
    ("json_schema", "9" * 5000, "not valid JSON"),
    ("json_schema", "true", "must be an object"),
    ("json_schema", {"not": {"type": "string"}}, "not"),
    ("json_schema", {"$ref": "https://example.com/schema"}, "example.com"),
    ("json_schema", {"$ref": "#"}, "no text matches"),
    ("json_schema", {"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ("json_schema", {"type": "integer", "minimum": 5, "maximum": 1}, "Unsatisfiable"),
    ("json_schema", "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH}"),
    ("json_schema", "[" * 100_000, f"more than {MAX_DEPTH}"),
    ("json_schema", {"const": "x" * MAX_CONSTRAINT_BYTES}, f"at most {MAX_CONSTRAINT_BYTES}"),
    ("regex", "", "the regex is empty"),
    ("regex", "(a", "unclosed group"),
    ("regex", "()", "nothing but the empty text"),
    ("choice", [], "at least one"),
    ("choice", ["a", ""], "none of them empty"),
    ("choice", "yes", "not valid JSON"),
    ("choice", {"a": 1}, "list of strings"),
    ("grammar", "", "the grammar is empty"),
    ("grammar", 'root ::= "a', "cannot be read as EBNF"),
    ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply"),
    ("grammar", "start: missing", "unknown name"),
    ("grammar", "start: start", "no text matches"),
    ("structural_tag", {}, "triggers must be a list"),
    ("structural_tag", {"triggers": ["<"], "structures": []}, "structures must be a list"),
    ("structural_tag", {"triggers": ["<"], "structures": [{"begin": "x"}]}, "starts with none of the triggers"),
    ("structural_tag", {"triggers": ["<"], "structures": [{"begin": "<", "schema": 3}]}, "must be a JSON schema"),
    ("structural_tag", {"triggers": ["<"], "structures": [{"begin": "<", "name": "x"}]}, "'name'"),
    ("structural_tag", {"triggers": ["a<|call|>"], "structures": [{"begin": "a<|call|>"}]}, "special token behind"),
    ("structural_tag", {"format": {}}, "has a format"),
    ("structural_tag", {"tags": 1}, "'tags'"),
    ("structural_tag", [], "must be an object"),
]


@pytest.mark.parametrize(("kind", "text", "said"), REFUSED, ids=lambda value: str(value)[:24])
def test_what_makes_no_sense_is_refused_in_words(kind: ConstraintKind, text: Any, said: str) -> None:
    with pytest.raises(ConstraintError) as refused:
        compiled(kind, text)
    assert said in str(refused.value)
    assert refused.value.code == "invalid_constraint"
    assert len(str(refused.value)) < 1000


def test_a_marker_may_not_be_a_book() -> None:
    with pytest.raises(ConstraintError, match=f"begin_after has {MAX_BEGIN_BYTES + 1} bytes"):
        compiler().compile(Constraint(kind="json_object", begin_after="x" * (MAX_BEGIN_BYTES + 1)))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "((((a{0,9}){0,9}){0,9}){0,9}){0,9}"),
        ("regex", "(x+x+)+y"),
        ("regex", "(a?){3000}a{3000}"),
        ("regex", "a{1000000000}"),
        ("regex", "|".join(f"w{i}" for i in range(20_000))),
        ("json_schema", {"type": "integer", "multipleOf": 9973}),
        ("json_schema", {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijkl"]}),
        ("json_schema", {"enum": [f"v{i}" for i in range(20_000)]}),
        ("json_schema", {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}),
        ("grammar", 'start: a\na: a a | "x" | ""'),
    ],
    ids=lambda value: str(value)[:24],
)
def test_the_worst_texts_end_in_a_grammar_or_a_refusal(kind: ConstraintKind, text: Any) -> None:
    """Bounded by the compiler's fuel; a hundred steps of what compiles run through or end with an error."""
    try:
        matcher = compiled(kind, text).matcher()
    except ConstraintError:
        return
    for _ in range(100):
        tokens = allowed(matcher)
        if not tokens:
            assert matcher.may_end or matcher.error
            return
        matcher.accept(min(tokens))


def test_choices_are_no_patterns() -> None:
    """Characters that mean something to a regular expression, or to Lark, stand for themselves."""
    for choice in (
        '"',
        "\\",
        "a\nb",
        "/x/",
        "%json {}",
        "|",
        "é\u0001",
        "<[258]>",
        "a.b*",
        "x{2}",
        "(a)",
        "[a]",
        "^$",
        "a b#&~-",
        "\t",
        "\r\n",
        "\x00",
    ):
        matcher = behind("choice", json.dumps([choice]), ids(choice))
        assert allowed(matcher) == set() and matcher.may_end
