"""Calls of earlier answers, written by templates that disagree about their shape."""

from typing import Any

import pytest

from tokenspeed.frontend.chat_template import ChatTemplate, ChatTemplateError

JOINS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ '<' + c.function.name + ':' + c.function.arguments + '>' }}{% endfor %}"
    "{% if m.content is not none %}[{{ m.role }}:{{ m.content }}]{% endif %}{% endfor %}"
)
"""As DeepSeek's up to V3.1: arguments are a text, and an answer without content is not written."""
WALKS = (
    "{% macro shown(content) %}{% if content is string %}{{ content }}"
    "{% elif content is iterable %}{{ content | join }}{% else %}{{ content }}{% endif %}{% endmacro %}"
    "{% for m in messages %}[{{ m.role }}:{{ shown(m.content) }}]"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v | tojson }}{% endfor %}>{% endfor %}{% endfor %}"
)
"""As GLM's and MiniMax's: arguments are an object, and a content that is no text is printed."""
DUMPS = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content.strip() }}]{% for c in m.tool_calls or [] %}<"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}>{% endfor %}"
    "{% endfor %}"
)
"""As Qwen's; it fails on a content that is none."""


def rendered(source: str, arguments: Any = None, content: str | None = None) -> str:
    function = {"name": "weather", "arguments": {"city": "Köln"} if arguments is None else arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
    ]
    return ChatTemplate(source, "", "").render(messages, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (JOINS, '[user:Hi]<weather:{"city": "Köln"}>'),
        (WALKS, '[user:Hi][assistant:]<weather city="Köln">'),
        (DUMPS, '[user:Hi][assistant:]<{"city": "Köln"}>'),
    ],
)
def test_each_shape(source: str, expected: str) -> None:
    assert rendered(source) == expected


def test_a_content_that_is_there_stays() -> None:
    assert rendered(JOINS, content="So.") == '[user:Hi]<weather:{"city": "Köln"}>[assistant:So.]'
    assert rendered(WALKS, content="So.").startswith("[user:Hi][assistant:So.]")


def test_arguments_that_are_no_object_stay_text() -> None:
    assert rendered(JOINS, "oops") == "[user:Hi]<weather:oops>"
    with pytest.raises(ChatTemplateError, match="items"):
        rendered(WALKS, "oops")


def test_arguments_join_texts_and_nothing_else() -> None:
    before = "{{ messages[1].tool_calls[0].function.arguments + '!' }}"
    assert rendered(before) == '{"city": "Köln"}!'
    with pytest.raises(ChatTemplateError, match="unsupported operand"):
        rendered(before.replace("'!'", "1"))
