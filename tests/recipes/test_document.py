"""YAML with positions: what is read, where it stands, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.recipes.document import Document, RecipeError, merge, parse_document, parse_scalar, without_nulls


def test_every_key_knows_its_line_and_column() -> None:
    document = parse_document("a: 1\nb:\n  c: [x, y]\n  d: {e: 2}\n", "f.yaml")
    assert document.data == {"a": 1, "b": {"c": ["x", "y"], "d": {"e": 2}}}
    assert str(document.place(("b", "c"))) == "f.yaml:3:3"
    assert str(document.place(("b", "c", 1))) == "f.yaml:3:10"
    assert str(document.place(("b", "d", "e"))) == "f.yaml:4:7"
    # What has no place of its own is named by what is around it.
    assert str(document.place(("b", "d", "missing"))) == "f.yaml:4:3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "f.yaml:2:1: the key 'a' stands twice; the first is at f.yaml:1:1"),
        ("a: [1\n", "f.yaml:2:1: this is no valid YAML"),
        ("- 1\n", "f.yaml:1:1: expected keys and values"),
        ("", "f.yaml:1:1: expected keys and values"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", "f.yaml:3:3: merge keys"),
        ("a: !!python/object:os.system {}\n", "f.yaml:1:4: "),
        ("? [a]\n: 1\n", "f.yaml:1:3: a key must be a word"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, message: str) -> None:
    if "python/object" in text:
        # A tag is no instruction: nothing is constructed, the value is a plain mapping.
        assert parse_document(text, "f.yaml").data == {"a": {}}
        return
    with pytest.raises(RecipeError) as caught:
        parse_document(text, "f.yaml")
    assert str(caught.value).startswith(message)


def test_dates_stay_what_was_written() -> None:
    assert parse_scalar("2026-01-05", "SET date") == "2026-01-05"


def test_null_deletes_lists_replace_and_places_follow() -> None:
    base = parse_document("a: {b: 1, c: 2}\nlist: [1, 2]\nkeep: yes\n", "base.yaml")
    over = parse_document("a: {c: null, d: 4}\nlist: [3]\n", "over.yaml")
    merged = without_nulls(merge(base, over))
    assert merged.data == {"a": {"b": 1, "d": 4}, "list": [3], "keep": True}
    assert str(merged.place(("a", "b"))) == "base.yaml:1:5"
    assert str(merged.place(("a", "d"))) == "over.yaml:1:14"
    assert str(merged.place(("list", 0))) == "over.yaml:2:8"
    assert ("list", 1) not in merged.places


def test_a_null_takes_away_what_lies_deeper_too() -> None:
    top = merge(
        parse_document("a: 2\n", "low"), merge(parse_document("a: null\n", "set"), parse_document("b: 1\n", "flags"))
    )
    assert without_nulls(top).data == {"b": 1}


_values = st.recursive(
    st.integers(-5, 5) | st.text("abc", max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=6,
)
_mappings = st.dictionaries(st.sampled_from("abcd"), _values, max_size=4)


def _without_empty(value: object) -> object:
    """Mappings that hold nothing say nothing."""
    return {key: _without_empty(inner) for key, inner in value.items()} if isinstance(value, dict) else value


@given(_mappings, _mappings)
def test_merging_is_laying_one_on_the_other(low: dict[str, object], high: dict[str, object]) -> None:
    def expected(base: dict[str, object], over: dict[str, object]) -> dict[str, object]:
        result = dict(base)
        for key, value in over.items():
            below = base.get(key)
            result[key] = (
                expected(below if isinstance(below, dict) else {}, value) if isinstance(value, dict) else value
            )
        return result

    merged = merge(Document(low), Document(high))  # type: ignore[arg-type]
    assert _without_empty(merged.data) == _without_empty(expected(low, high))
