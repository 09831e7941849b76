"""What the models' own chat templates write for an answer with calls, our parsers read back as the same calls.

The texts are made here, after the templates that are named; these are not part of this repository.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed_answers import FAMILIES, parse

from tokenspeed.frontend.parsing.parts import put_together
from tokenspeed.frontend.parsing.typed import as_json

Call = tuple[str, dict[str, Any]]
Writer = Callable[[Sequence[Call]], str]


def deepseek_v3(calls: Sequence[Call], dumps: Callable[[Any], str] = json.dumps) -> str:
    """DeepSeek-V3-0324's and R1's own, and vLLM's for them."""
    each = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(given_)}\n```<｜tool▁call▁end｜>"
        for name, given_ in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    """DeepSeek-V3.1's own."""
    each = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(given_)}<｜tool▁call▁end｜>" for name, given_ in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def glm(calls: Sequence[Call], between: str, inside: str) -> str:
    text = ""
    for name, given_ in calls:
        text += f"{between}<tool_call>{name}{inside}"
        for key, value in given_.items():
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += f"<arg_key>{key}</arg_key>{inside}<arg_value>{written}</arg_value>{inside}"
        text += "</tool_call>"
    return text


def glm_without_lines(calls: Sequence[Call]) -> str:
    """llama.cpp's for GLM-4.5, which leaves the line behind a name out, and GLM-4.7's own."""
    return glm(calls, "\n", "")


def llama3_json(calls: Sequence[Call]) -> str:
    """vLLM's for Llama 3.1 and 3.2 (of one call), and for Llama 4, where objects stand side by side."""
    return "".join(f'{{"name": "{name}", "parameters": {json.dumps(given_)}}}' for name, given_ in calls)


def python_list(calls: Sequence[Call]) -> str:
    """As Meta's page writes it: values are Python's."""
    written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given_.items())})" for name, given_ in calls)
    return f"[{', '.join(written)}]"


def quoted_list(calls: Sequence[Call]) -> str:
    """vLLM's for Llama 4: every value between double quotes, as it is."""

    def pairs(given_: dict[str, Any]) -> str:
        return ", ".join(f'{key}="{value}"' for key, value in given_.items())

    return "[" + ", ".join(f"{name}({pairs(given_)})" for name, given_ in calls) + "]"


def mistral_list(calls: Sequence[Call]) -> str:
    """Mistral-Small-3.1's own, and vLLM's for Mistral: ids stand behind the arguments."""
    objects = (
        f'{{"name": {json.dumps(name)}, "arguments": {json.dumps(given_)}, "id": "abcdefgh{at}"}}'
        for at, (name, given_) in enumerate(calls)
    )
    return f"[TOOL_CALLS] [{', '.join(objects)}]"


def mistral_named(calls: Sequence[Call]) -> str:
    """Mistral-Small-3.2's and Magistral's own."""
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given_)}" for name, given_ in calls)


def mistral_with_ids(calls: Sequence[Call]) -> str:
    """mistral-common's version 11."""
    return "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]abcdefgh{at}[ARGS]{json.dumps(given_)}" for at, (name, given_) in enumerate(calls)
    )


WRITERS: dict[str, tuple[str, Writer]] = {
    "deepseek v3": ("deepseek_v3", deepseek_v3),
    "deepseek v3, unescaped": ("deepseek_v3", lambda calls: deepseek_v3(calls, as_json)),
    "deepseek v3.1": ("deepseek_v31", deepseek_v31),
    "glm 4.5": ("glm45", lambda calls: glm(calls, "\n", "\n")),
    "glm without lines": ("glm45", glm_without_lines),
    "llama json": ("llama3_json", llama3_json),
    "llama python": ("llama4_pythonic", python_list),
    "llama quoted": ("llama4_pythonic", quoted_list),
    "mistral list": ("mistral", mistral_list),
    "mistral named": ("mistral", mistral_named),
    "mistral ids": ("mistral", mistral_with_ids),
}

TEXT = st.text(st.sampled_from(list("aZ9 é🙂{}[]()<>,:;'=`#\n\t")), max_size=12).filter(
    lambda text: "\n```" not in text
)
PLAIN = st.text(st.sampled_from(list("aZ9 é🙂{}[]()<>,:;'=#\n")), max_size=12)
NUMBER = st.integers(-(10**6), 10**6)
VALUE = st.recursive(
    NUMBER | st.booleans() | st.none() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
)
TYPED: dict[str, st.SearchStrategy[Any]] = {
    "city": TEXT,
    "days": NUMBER,
    "exact": st.booleans(),
    "places": st.lists(VALUE, max_size=3),
    "more": st.dictionaries(TEXT, VALUE, max_size=3),
}
QUOTED = {**TYPED, "city": PLAIN, "places": st.lists(NUMBER, max_size=3), "more": st.just({})}
"""What can stand between quotes as it is: nothing with double quotes or backslashes in it."""


def calls_of(given_: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[list[Call]]:
    weather = st.tuples(st.just("weather"), st.fixed_dictionaries({}, optional=given_))
    return st.lists(weather | st.just(("time", {})), min_size=1, max_size=3)


@pytest.mark.parametrize("name", WRITERS)
@given(data=st.data())
@settings(max_examples=30)
def test_calls_are_read_back(name: str, data: st.DataObject) -> None:
    family, write = WRITERS[name]
    calls = data.draw(calls_of(QUOTED if name == "llama quoted" else TYPED))
    silent = family.startswith("llama")
    found = put_together(
        parse(FAMILIES[family].parsing(prompt_end=""), ("" if silent else "Let me see.") + write(calls))
    )
    assert [(call.name, json.loads(call.arguments or "{}")) for call in found.calls] == list(calls)
    assert all(call.complete for call in found.calls)
    assert (found.content, found.reasoning) == ("" if silent else "Let me see.", "")


def test_a_quoted_value_stays_text_where_text_is_declared() -> None:
    found = put_together(parse(FAMILIES["llama4_pythonic"].parsing(), '[weather(city="2", days="2", exact="True")]'))
    assert json.loads(found.calls[0].arguments) == {"city": "2", "days": 2, "exact": True}


def test_an_object_that_is_no_call_behind_one_that_is() -> None:
    found = put_together(parse(FAMILIES["llama3_json"].parsing(), '{"name": "time", "parameters": {}} {"a": 1} end'))
    assert [call.name for call in found.calls] == ["time"] and found.content == '{"a": 1} end'
