"""What families write, and what it means, for the tests of parsers and of the API."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tokenspeed.frontend.parsing.parser import AnswerParser, Parsing
from tokenspeed.frontend.parsing.parts import CallBegun, Part, merged


def declared(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    declared(
        "weather",
        city={"type": "string"},
        days={"type": "integer"},
        exact={"type": "boolean"},
        places={"type": "array"},
        more={"type": "object"},
    ),
    declared("time", zone={"anyOf": [{"type": "string"}, {"type": "null"}]}),
]


@dataclass(frozen=True)
class Family:
    """``one`` is an answer with reasoning (where it has a format), "Let me see." and a call of weather with city "Köln"
    and days 2; ``two`` has a second call, of time with no arguments. ``pieces`` are its markers and parts of them."""

    tools: str
    reasoning: str
    prompt_end: str
    one: str
    two: str
    pieces: tuple[str, ...]

    def parsing(self, **changes: Any) -> Parsing:
        base = Parsing(tool_format=self.tools, reasoning_format=self.reasoning, tools=TOOLS, prompt_end=self.prompt_end)
        return replace(base, **changes)


_ARGUMENTS = '{"city": "Köln", "days": 2}'
_THINK = "<think>\nI ask.\n</think>\n\n"


def _hermes_calls(*calls: str) -> str:
    return "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls)


_HERMES = ('{"name": "weather", "arguments": ' + _ARGUMENTS + "}", '{"name": "time", "arguments": {}}')
_CODER = (
    "\n<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>",
    "\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
)
_KIMI = (
    f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{_ARGUMENTS}<|tool_call_end|>",
    "<|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
)
_V3 = (
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{_ARGUMENTS}\n```<｜tool▁call▁end｜>",
    "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜>",
)
_V31 = (
    f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>",
    "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
)
_DSML = (
    '\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>',
    '\n<｜DSML｜invoke name="time">\n</｜DSML｜invoke>',
)
_GLM45 = (
    "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
    "\n<tool_call>time\n</tool_call>",
)
_HARMONY = (
    f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{_ARGUMENTS}<|call|>",
    "<|start|>assistant<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}<|call|>",
)
_MINIMAX = (
    '<invoke name="weather">\n<parameter name="city">Köln</parameter>\n<parameter name="days">2</parameter>\n'
    "</invoke>\n",
    '<invoke name="time">\n</invoke>\n',
)
_NS = "]<]minimax[>["
_M3 = (
    f'\n{_NS}<invoke name="weather">{_NS}<city>Köln{_NS}</city>{_NS}<days>2{_NS}</days>{_NS}</invoke>',
    f'\n{_NS}<invoke name="time">{_NS}</invoke>',
)
_K3 = (
    '<|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Köln<|close|>argument'
    '<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|>',
    '<|open|>call tool="time" index="2"<|sep|><|open|>json<|sep|>{}<|close|>json<|sep|><|close|>call<|sep|>',
)
_INKLING = (
    "<|message_model|>weather<|content_invoke_tool_json|>"
    + '{"name": "weather", "args": '
    + _ARGUMENTS
    + "}<|end_message|>",
    '<|message_model|>time<|content_invoke_tool_json|>{"name": "time", "args": {}}<|end_message|>',
)


def _wrapped(before: str, opening: str, calls: Sequence[str], closing: str) -> tuple[str, str]:
    return tuple(before + opening + "".join(calls[:count]) + closing for count in (1, 2))  # type: ignore[return-value]


_SAID = _THINK + "Let me see."
FAMILIES = {
    "hermes": Family(
        "hermes",
        "qwen3",
        "",
        _SAID + _hermes_calls(_HERMES[0]),
        _SAID + _hermes_calls(*_HERMES),
        ("<tool_call>", "</tool_call>", '{"name": "time", ', '"arguments": {"a": ', "<tool_"),
    ),
    "qwen3": Family(
        "qwen3",
        "qwen3",
        "",
        _SAID + _hermes_calls(_HERMES[0]),
        _SAID + _hermes_calls(*_HERMES),
        ("<tool_call>", "</tool_call>", '"name": "time"', '"arguments": "{\\"a\\": 1}"', "}"),
    ),
    "qwen3_coder": Family(
        "qwen3_coder",
        "qwen3",
        "<think>\n",
        _SAID[8:] + _CODER[0],
        _SAID[8:] + "".join(_CODER),
        (
            "<tool_call>",
            "</tool_call>",
            "<function=weather>",
            "<function=zz",
            "</function>",
            "<parameter=days>",
            "<parameter=",
            "</parameter>",
            "\n",
        ),
    ),
    "kimi_k2": Family(
        "kimi_k2",
        "kimi_k2",
        "<think>",
        *_wrapped("I ask.</think>Let me see.", "<|tool_calls_section_begin|>", _KIMI, "<|tool_calls_section_end|>"),
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "functions.a:3",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_call",
        ),
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        "deepseek_r1",
        "<think>\n",
        *_wrapped("I ask.\n</think>\n\nLet me see.", "<｜tool▁calls▁begin｜>", _V3, "<｜tool▁calls▁end｜>"),
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "```json",
            "\n```",
            "<｜tool▁call▁end｜>",
            "\n",
        ),
    ),
    "deepseek_v31": Family(
        "deepseek_v31",
        "deepseek_v31",
        "<think>",
        *_wrapped("I ask.</think>Let me see.", "<｜tool▁calls▁begin｜>", _V31, "<｜tool▁calls▁end｜>"),
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool",
        ),
    ),
    "deepseek_v32": Family(
        "deepseek_v32",
        "deepseek_v31",
        "<think>",
        *_wrapped("I ask.</think>Let me see.", "\n\n<｜DSML｜function_calls>", _DSML, "\n</｜DSML｜function_calls>"),
        (
            "<｜DSML｜function_calls>",
            "</｜DSML｜function_calls>",
            '<｜DSML｜invoke name="time">',
            "<｜DSML｜invoke",
            '<｜DSML｜parameter name="a" string="true">',
            "</｜DSML｜parameter>",
            "</｜DSML｜invoke>",
            "<｜DSML",
        ),
    ),
    "deepseek_v4": Family(
        "deepseek_v4",
        "deepseek_v4",
        "<think>",
        *_wrapped("I ask.</think>Let me see.", "\n\n<｜DSML｜tool_calls>", _DSML, "\n</｜DSML｜tool_calls>"),
        (
            "<｜DSML｜tool_calls>",
            "</｜DSML｜tool_calls>",
            '<｜DSML｜invoke name="time">',
            '<｜DSML｜parameter name="a">',
            "</｜DSML｜parameter>",
            "</｜DSML｜invoke>",
            "<｜DSML",
        ),
    ),
    "glm45": Family(
        "glm45",
        "glm45",
        "",
        _SAID + _GLM45[0],
        _SAID + "".join(_GLM45),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "weather", "<arg"),
    ),
    "glm47": Family(
        "glm47",
        "glm45",
        "<think>",
        *(text.replace("\n<", "<").replace("\n", "") for text in (_SAID[8:] + _GLM45[0], _SAID[8:] + "".join(_GLM45))),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "weather"),
    ),
    "gpt_oss": Family(
        "gpt_oss",
        "gpt_oss",
        "<|start|>assistant",
        *_wrapped(
            "<|channel|>analysis<|message|>I ask.<|end|><|start|>assistant<|channel|>commentary<|message|>"
            "Let me see.<|end|>",
            "",
            _HARMONY,
            "",
        ),
        (
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|channel|>",
            "<|call|>",
            "<|return|>",
            "analysis",
            "final",
            " to=functions.time",
            "assistant",
            "<|constrain|>json",
        ),
    ),
    "llama3_json": Family(
        "llama3_json",
        "",
        "",
        '{"name": "weather", "parameters": ' + _ARGUMENTS + "}",
        '{"name": "weather", "parameters": ' + _ARGUMENTS + '}; {"name": "time", "parameters": {}}',
        ("<|python_tag|>", '{"name": "time"', '{"name": "other"', ', "parameters": {', "}", ";", '"'),
    ),
    "llama4_pythonic": Family(
        "llama4_pythonic",
        "",
        "",
        '[weather(city="Köln", days=2)]',
        '<|python_start|>[weather(city="Köln", days=2), time()]<|python_end|>',
        ("[", "]", "weather(", "time()", "(", ")", '"', "'", "a=1", ",", "<|python_start|>", "[weather("),
    ),
    "mistral": Family(
        "mistral",
        "mistral",
        "",
        "[THINK]I ask.[/THINK]Let me see.[TOOL_CALLS]weather[ARGS]" + _ARGUMENTS,
        "[THINK]I ask.[/THINK]Let me see.[TOOL_CALLS] [" + ", ".join(_HERMES) + "]",
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "time", "{", "}", '"', "[", "]", '{"name": "time"', "[TOOL"),
    ),
    "minimax_m2": Family(
        "minimax_m2",
        "minimax_m2",
        "<think>\n",
        *_wrapped(_SAID[8:], "\n<minimax:tool_call>\n", _MINIMAX, "</minimax:tool_call>"),
        (
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            '<invoke name="time">',
            "<invoke",
            "</invoke>",
            '<parameter name="zone">',
            "</parameter>",
            ">",
        ),
    ),
    "minimax_m3": Family(
        "minimax_m3",
        "minimax_m3",
        "<mm:think>",
        *_wrapped("I ask.</mm:think>Let me see.", f"\n{_NS}<tool_call>", _M3, f"\n{_NS}</tool_call>"),
        (
            f"{_NS}<tool_call>",
            f"{_NS}</tool_call>",
            f'{_NS}<invoke name="time">',
            f"{_NS}</invoke>",
            f"{_NS}<a>",
            f"{_NS}</a>",
            f"{_NS}<item>",
            f"{_NS}</item>",
            _NS,
            _NS + "<",
        ),
    ),
    "kimi_k3": Family(
        "kimi_k3",
        "kimi_k3",
        "<|open|>think<|sep|>",
        *_wrapped(
            "I ask.<|close|>think<|sep|><|open|>response<|sep|>Let me see.<|close|>response<|sep|>",
            "<|open|>tools<|sep|>",
            _K3,
            "<|close|>tools<|sep|>",
        ),
        (
            "<|open|>",
            "<|close|>",
            "<|sep|>",
            "tools",
            "call ",
            'tool="time"',
            "argument ",
            'key="a"',
            "think",
            "<|open|>tools<|sep|>",
            "<|open|>json<|sep|>",
        ),
    ),
    "inkling": Family(
        "inkling",
        "inkling",
        "<|message_model|>",
        *_wrapped(
            "<|content_thinking|>I ask.<|end_message|><|message_model|><|content_text|>Let me see.<|end_message|>",
            "",
            _INKLING,
            "",
        ),
        (
            "<|content_thinking|>",
            "<|end_message|>",
            "<|message_model|>",
            "<|content_text|>",
            "time",
            "<|content_invoke_tool_json|>",
            '{"name": "time"',
            ', "args": {',
            "}",
            "<|content_model_end_sampling|>",
        ),
    ),
}


def parse(parsing: Parsing, text: str, cuts: Sequence[int] = ()) -> list[Part]:
    """The parts of ``text``, given in pieces cut at ``cuts``, with ids of our own making left out."""
    parser = AnswerParser(parsing)
    parts: list[Part] = []
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for start, end in pairwise(bounds):
        parts += parser.push(text[start:end])
    return [_plain(part) for part in merged(parts + parser.finish())]


def _plain(part: Part) -> Part:
    if isinstance(part, CallBegun) and re.fullmatch("call_[0-9a-f]{24}|[A-Za-z0-9]{9}", part.id):
        return CallBegun(part.index, "", part.name)
    return part
