"""The templates of the families: what they make of conversations, as text that was read, and as transformers does.

Run with TOKENSPEED_UPDATE_GOLDEN=1 to write the texts anew, and read the difference before it is committed.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tokenspeed.frontend.chat_template import ChatTemplate, ChatTemplateError
from tokenspeed.frontend.family_text import FAMILY_TEXTS, PLAIN, FamilyText, family_text
from tokenspeed.frontend.tool_declaration import declare_tools, sorted_deep

GOLDEN = Path(__file__).parent / "golden"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the <weather> of a place.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "a name, 名字"},
                    "days": {"type": "integer"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                },
                "required": ["city"],
            },
        },
    }
]


def called(name: str, at: int, **arguments: Any) -> dict[str, Any]:
    return {"id": f"functions.{name}:{at}", "type": "function", "function": {"name": name, "arguments": arguments}}


HI = {"role": "user", "content": "Hi & <hello> 你好"}
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    HI,
    {"role": "assistant", "content": "Hello!", "reasoning_content": "A greeting."},
    {"role": "user", "content": "Two cities?"},
]
CALLS = [
    *TURNS,
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I ask.",
        "tool_calls": [called("weather", 0, city="Köln", days=2)],
    },
    {"role": "tool", "name": "weather", "tool_call_id": "functions.weather:0", "content": "sunny"},
]
ANSWERED = [*CALLS, {"role": "assistant", "content": "Sun.", "reasoning_content": "Done."}, HI]

CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "plain": ([HI], {}),
    "system": ([SYSTEM, HI], {}),
    "turns": ([SYSTEM, *TURNS], {}),
    "no prompt for an answer": (TURNS[:2], {"add_generation_prompt": False}),
    "tools": ([SYSTEM, HI], {"tools": TOOLS}),
    "tools without system": ([HI], {"tools": TOOLS}),
    "calls and results": (CALLS, {"tools": TOOLS}),
    "answered and asked again": (ANSWERED, {"tools": TOOLS}),
    "thinking on": (CALLS, {"thinking": True, "enable_thinking": True, "reasoning_effort": "max"}),
    "thinking on with tools": (ANSWERED, {"tools": TOOLS, "thinking": True, "enable_thinking": True}),
    "thinking off": (TURNS, {"thinking": False, "enable_thinking": False, "reasoning_effort": "low"}),
}
FAMILIES = sorted({text.template: text for text in FAMILY_TEXTS.values()}.items())


def rendered(text: FamilyText, case: str) -> str:
    messages, settings = CASES[case]
    variables = dict(settings)
    opens = variables.pop("add_generation_prompt", True)
    template = ChatTemplate(text.chat_template(), text.begin, text.end)
    return template.render(messages, add_generation_prompt=opens, variables=variables)


def dated(text: str) -> str:
    return re.sub(r"\d{4}-\d\d-\d\d", "DATE", text)


@pytest.mark.parametrize(("name", "text"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_what_a_family_makes_of_conversations(name: str, text: FamilyText) -> None:
    shown = "".join(f"=== {case}\n{dated(rendered(text, case))}\n" for case in CASES)
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("TOKENSPEED_UPDATE_GOLDEN"):
        golden.write_text(shown, "utf-8")
    assert shown == golden.read_text("utf-8"), "a template changed; TOKENSPEED_UPDATE_GOLDEN=1 writes the texts anew"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("name", "text"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_transformers_makes_the_same(name: str, text: FamilyText, case: str) -> None:
    messages, settings = CASES[case]
    if name == "kimi" and "tools" in settings:  # the tokenizer's own code does this there
        tools = sorted_deep(settings["tools"])
        settings = {**settings, "tools": tools, "tools_ts_str": declare_tools(tools)}
    expected, _ = render_jinja_template(
        [messages],
        chat_template=text.chat_template(),
        bos_token=text.begin,
        eos_token=text.end,
        **{"add_generation_prompt": True, **settings},
    )
    assert rendered(text, case) == expected[0]


@pytest.mark.parametrize(("name", "text"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_every_marker_that_is_written_is_a_token(name: str, text: FamilyText) -> None:
    """A marker that were several tokens could not steer."""
    tokens = {*text.special, *text.tags}
    written = "".join(rendered(text, case) for case in CASES)
    found = set(re.findall(r"<\|[^>|]+\|>|<｜[^>｜]+｜>|\[gMASK\]|<sop>|\]~!b\[|\]~b\]|\[e~\[|</?think>", written))
    assert found and found <= tokens


def test_results_that_answer_no_call_are_refused() -> None:
    text = family_text("deepseek_v32")
    template = ChatTemplate(text.chat_template(), text.begin, text.end)
    with pytest.raises(ChatTemplateError, match="there is none left"):
        template.render([HI, {"role": "tool", "content": "x"}])


def test_an_unknown_family_has_plain_turns() -> None:
    assert family_text("llama") is PLAIN and PLAIN.chat_template().startswith("{{ bos_token }}")
