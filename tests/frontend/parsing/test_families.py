"""Every family's format: whole answers, broken ones, and any split of both."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed_answers import FAMILIES, TOOLS, Family, parse

from tokenspeed.frontend.chat_template import ChatTemplate
from tokenspeed.frontend.family_text import FAMILY_TEXTS, FamilyText
from tokenspeed.frontend.parsing.parser import AnswerParser, Parsing
from tokenspeed.frontend.parsing.parts import Answer, CallEnded, put_together
from tokenspeed.frontend.parsing.registry import REASONING_FORMATS, TOOL_FORMATS

NAMES = list(FAMILIES)
SILENT = ("llama3_json", "llama4_pythonic")
"""Families whose calls stand alone, without reasoning and other text."""

HEADERS = {
    "gpt_oss": r"^.*?(<\|message\|>|$)|<\|(start|channel)\|>.*?(<\|message\|>|$)",
    "kimi_k3": r"<\|(open|close)\|>.*?(<\|sep\|>|$)",
    "inkling": r"(^|<\|(end_message|message_model|content_model_end_sampling)\|>)[^<]*(?=<\|content_[titc])",
    "deepseek_v3": r"<｜tool▁call▁begin｜>.*?(<｜tool▁sep｜>|$)",
    "deepseek_v32": r"<｜DSML｜(invoke|parameter).*?(>|$)",
    "deepseek_v4": r"<｜DSML｜(invoke|parameter).*?(>|$)",
    "minimax_m2": r"<(invoke|parameter).*?(>|$)",
    "minimax_m3": r"]<]minimax\[>\[<invoke.*?(>|$)|]<]minimax\[>\[</.*?(>|$)",
    "mistral": r"\[CALL_ID\].*?(\[ARGS\]|\[TOOL_CALLS\]|$)",
}
"""Where a format has attributes, types and ids, which are no text."""

MARKER = re.compile(r"<\|(open|close)\|>[^<]*<\|sep\|>|]<]minimax\[>\[<[^>]*>|<[^<>]*>|\[/?[A-Z_]+\]|\n+```(json)?|\n+")

TEXTS = ("word", " ", "\n", "é🙂", "<", "</", "<|", "[", "{", '"', "\\", "2", "<think>", "</think>", "日本")


def answer(family: Family, text: str, cuts: list[int] = [], **changes: Any) -> Answer:  # noqa: B006
    return put_together(parse(family.parsing(**changes), text, cuts))


def test_every_format_is_tested() -> None:
    assert {family.tools for family in FAMILIES.values()} == set(TOOL_FORMATS)
    assert {family.reasoning for family in FAMILIES.values()} - {""} == set(REASONING_FORMATS)


@pytest.mark.parametrize("name", NAMES)
def test_one_call_and_two(name: str) -> None:
    """Known failure 24: parallel calls have the indices 0 and 1, and arguments are JSON text."""
    family = FAMILIES[name]
    for text, names in ((family.one, ["weather"]), (family.two, ["weather", "time"])):
        found = answer(family, text)
        assert (found.reasoning, found.content) == (("", "") if name in SILENT else ("I ask.", "Let me see."))
        assert [call.name for call in found.calls] == names and all(call.complete for call in found.calls)
        assert json.loads(found.calls[0].arguments) == {"city": "Köln", "days": 2}
        assert [json.loads(call.arguments) for call in found.calls[1:]] == [{}] * (len(names) - 1)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=40)
def test_splits_do_not_matter(name: str, data: st.DataObject) -> None:
    """Of whole answers, of cut ones, and of markers, parts of markers and text in any order."""
    family = FAMILIES[name]
    soup = st.lists(st.sampled_from((*family.pieces, *TEXTS)), max_size=14).map("".join)
    whole = st.sampled_from((family.one, family.two))
    cut = st.tuples(whole, st.integers(0, 400)).map(lambda pair: pair[0][: pair[1]])
    text = data.draw(st.one_of(soup, cut, st.tuples(cut, soup).map("".join)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    changes = {
        "parallel": data.draw(st.booleans()),
        "separate": data.draw(st.booleans()),
        "tools": data.draw(st.sampled_from((TOOLS, ()))),
        "prompt_end": data.draw(st.sampled_from((family.prompt_end, ""))),
    }
    at_once = parse(family.parsing(**changes), text)
    assert parse(family.parsing(**changes), text, cuts) == at_once
    assert parse(family.parsing(**changes), text, list(range(len(text)))) == at_once


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=25)
def test_no_word_is_lost(name: str, data: st.DataObject) -> None:
    """What is no call, or a broken one, comes out as text: every word is in some part, once."""
    family = FAMILIES[name]
    pieces = data.draw(st.lists(st.sampled_from((*family.pieces, " ", "\n")), min_size=1, max_size=10))
    words = [f"word{at}q" for at in range(len(pieces))]
    text = "".join(word + piece for word, piece in zip(words, pieces, strict=True)) + " end"
    found = answer(family, text)
    shown = found.reasoning + found.content + "".join(call.name + call.id + call.arguments for call in found.calls)
    body = re.sub(HEADERS.get(name, "$^"), "", text, flags=re.DOTALL)
    assert [word for word in words if word in body and word not in shown] == []
    assert all(
        shown.count(word) == 1
        for word in words
        if word in shown and word not in "".join(call.id for call in found.calls)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["Hello.", "a < b, <tool, [1, 2], {3}\n\nIt's “so” 🙂", " \n", "", "1 <|2|> <｜3｜>"])
def test_without_a_call_it_is_plain_text(name: str, text: str) -> None:
    found = answer(FAMILIES[name], text, prompt_end="")
    assert found == Answer(content=text) or (found == Answer(content="") and not text.strip())


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_of_an_answer(name: str) -> None:
    """Reasoning without an end stays reasoning (known failure 26), arguments are as they came, cut calls do not end."""
    family = FAMILIES[name]
    whole = answer(family, family.two)
    inside = {at for found in MARKER.finditer(family.two) for at in range(found.start() + 1, found.end())}
    for end in sorted(set(range(len(family.two))) - inside):
        parts = parse(family.parsing(), family.two[:end])
        found = put_together(parts)
        assert whole.reasoning.startswith(found.reasoning), end
        for call, full in zip(found.calls, whole.calls, strict=False):
            assert call.name == full.name and full.arguments.startswith(call.arguments), end
        assert sum(isinstance(part, CallEnded) for part in parts) == sum(call.complete for call in found.calls)
        assert all(call.complete for call in found.calls[:-1])


@pytest.mark.parametrize("name", NAMES)
def test_only_the_first_call_where_they_must_not_be_parallel(name: str) -> None:
    family = FAMILIES[name]
    assert answer(family, family.two, parallel=False) == answer(family, family.one)


@pytest.mark.parametrize("name", NAMES)
def test_without_tools_a_call_is_text(name: str) -> None:
    family = FAMILIES[name]
    found = answer(family, family.two, tools=())
    assert found.calls == [] and found.reasoning == ("" if name in SILENT else "I ask.")
    assert "weather" in found.content and "Köln" in found.content


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SILENT])
def test_reasoning_that_is_not_separated_is_content(name: str) -> None:
    family = FAMILIES[name]
    found = answer(family, family.one, separate=False)
    assert found.reasoning == "" and "I ask." in found.content and found.content.endswith("Let me see.")
    assert len(found.calls) == 1


@pytest.mark.parametrize("name", ["kimi_k2", "qwen3_coder"])
def test_a_call_ends_reasoning_where_models_forget_to(name: str) -> None:
    family = FAMILIES[name]
    closing = "</think>Let me see." if name == "kimi_k2" else "\n</think>\n\nLet me see."
    assert closing in family.two
    found = answer(family, family.two.replace(closing, ""))
    assert (found.reasoning, found.content, len(found.calls)) == ("I ask.", "", 2)
    for words in ("The tag <tool_call> begins it.", "I write <function=weather>."):
        assert answer(family, f"{words}{family.two}").reasoning == f"{words}I ask."


# -- what our templates write comes back -------------------------------------------------------------------------------

TEMPLATES = {
    "kimi_k2": "kimi_k25",
    "qwen3": "qwen3",
    "qwen3_coder": "qwen3_5",
    "glm47": "glm4_moe",
    "gpt_oss": "gpt_oss",
    "minimax_m2": "minimax_m2",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
}


def rendered(text: FamilyText, messages: list[dict[str, Any]], opens: bool) -> str:
    template = ChatTemplate(text.chat_template(), text.begin, text.end)
    variables = {"tools": TOOLS, "thinking": True, "enable_thinking": True}
    return template.render(messages, add_generation_prompt=opens, variables=variables)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_template_writes_is_read_back(name: str) -> None:
    """An assistant's turn as the template writes it into a prompt is what the model says, and means the same."""
    family, text = FAMILIES[name], FAMILY_TEXTS[TEMPLATES[name]]
    arguments = {
        "city": 'Köln "am" Rhein\n2',
        "days": 2,
        "exact": True,
        "places": ["a", {"b": None}],
        "more": {"c": 1.5},
    }
    call = {"id": "functions.weather:0", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    said = {"role": "assistant", "content": "", "reasoning_content": "I ask.", "tool_calls": [call]}
    asked = [{"role": "user", "content": "Hi"}]
    prompt, whole = rendered(text, asked, True), rendered(text, [*asked, said], False)
    if name == "deepseek_v31":  # its template leaves earlier thoughts out
        prompt = prompt.removesuffix("<think>") + "</think>"
    assert whole.startswith(prompt)
    turn = whole[len(prompt) :].split(text.end)[0].split("<|im_end|>")[0].removesuffix("[e~[\n")
    found = put_together(parse(family.parsing(prompt_end=prompt), turn))
    assert found.reasoning == ("" if name == "deepseek_v31" else "I ask.") and found.content == ""
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [("weather", arguments)]


def test_ids_are_what_templates_take_back() -> None:
    def ids(name: str) -> list[str]:
        parser = AnswerParser(FAMILIES[name].parsing())
        return [call.id for call in put_together(parser.push(FAMILIES[name].two) + parser.finish()).calls]

    assert ids("kimi_k2") == ["functions.weather:0", "functions.time:1"]
    assert all(len(one) == 9 and one.isalnum() for one in ids("mistral"))
    assert all(one.startswith("call_") for one in ids("qwen3")) and len(set(ids("qwen3"))) == 2


def test_an_end_token_ends_the_call_of_gpt_oss() -> None:
    """``<|call|>`` is one, so the text ends before it."""
    text = FAMILIES["gpt_oss"].one.removesuffix("<|call|>")
    for complete in (True, False):
        parser = AnswerParser(FAMILIES["gpt_oss"].parsing())
        assert put_together(parser.push(text) + parser.finish(complete)).calls[0].complete == complete


def test_markers_are_kept_only_where_they_are_needed() -> None:
    assert Parsing(tool_format="kimi_k2").markers == frozenset() and not Parsing(tool_format="kimi_k2").needed
    assert "<|tool_call_begin|>" in FAMILIES["kimi_k2"].parsing().markers
    assert {"<think>", "</think>"} <= FAMILIES["kimi_k2"].parsing(tools=()).markers
