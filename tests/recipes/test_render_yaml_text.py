"""YAML for a reader: what is read again is what was written."""

from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.recipes.render.yaml_text import Comment, comment_lines, write_yaml

# What YAML's own reader refuses in any form (control characters) is not written by anybody.
texts = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\ufeff\ufffe\uffff\u2028\u2029"))
scalars = texts | st.integers() | st.booleans() | st.none() | st.sampled_from(["on", "yes", "1:30", "0x1", "~", "a: b"])
nodes = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)
files = st.lists(st.text(st.sampled_from("ab #-:×–'\"{|\u00a0\t"), max_size=8), min_size=1).map(
    lambda lines: "\n".join([*lines, ""])
)


def plain(node: Any) -> Any:
    """Without comments."""
    if isinstance(node, dict):
        return {key: plain(value) for key, value in node.items() if not isinstance(key, Comment)}
    return [plain(item) for item in node] if isinstance(node, list) else node


def commented(node: Any) -> Any:
    """With a comment before each key of each mapping."""
    if isinstance(node, dict):
        result = {}
        for index, (key, value) in enumerate(node.items()):
            result[Comment(f"note {index}: - {{")] = None
            result[key] = commented(value)
        return result
    return [commented(item) for item in node] if isinstance(node, list) else node


@given(st.dictionaries(texts, nodes, max_size=4))
def test_what_is_written_reads_the_same(document: dict[str, Any]) -> None:
    assert (yaml.safe_load(write_yaml(document)) or {}) == document


@given(st.dictionaries(texts, nodes, min_size=1, max_size=4))
def test_comments_change_nothing(document: dict[str, Any]) -> None:
    assert plain(commented(document)) == document
    assert yaml.safe_load(write_yaml(commented(document))) == document


def test_the_look() -> None:
    document = {
        "name": "kimi",
        Comment("why it is so"): None,
        "list": ["a", "b"],
        "items": [{Comment("first"): None, "name": "x", "value": 1}, {"name": "y", "deep": {"a": None}}],
        "empty": {},
    }
    assert write_yaml(document).splitlines() == [
        "name: kimi",
        "# why it is so",
        "list: [a, b]",
        "items:",
        "  # first",
        "  - name: x",
        "    value: 1",
        "  - name: y",
        "    deep:",
        "      a: null",
        "empty: {}",
    ]


@given(files)
def test_a_file_in_a_value_reads_the_same(text: str) -> None:
    assert yaml.safe_load(write_yaml({"outer": {"file": text}})) == {"outer": {"file": text}}


def test_a_file_is_written_as_it_is() -> None:
    assert write_yaml({"data": {"a.yaml": "a: 1\n\nb:\n  c: 2\n"}}) == (
        "data:\n  a.yaml: |\n    a: 1\n\n    b:\n      c: 2\n"
    )


def test_long_comments_are_wrapped_and_indented_lines_kept() -> None:
    text = write_yaml({Comment("word " * 60 + "\n  kept: " + "x" * 130): None, "a": 1})
    lines = text.splitlines()
    assert all(len(line) <= 112 for line in lines[:-2]) and lines[-2] == "#   kept: " + "x" * 130


def test_lines_at_the_top() -> None:
    assert comment_lines("one\n\n  two") == "# one\n#\n#   two\n"
