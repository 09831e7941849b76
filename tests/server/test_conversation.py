"""What clients send of tools and calls reaches the families' templates as transformers would pass it.

The texts that were read (tests/frontend/golden) come out of the API's own shapes.
"""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenspeed.frontend.chat_template import ChatTemplate
from tokenspeed.frontend.family_text import FAMILY_TEXTS
from tokenspeed.server.conversation import template_messages
from tokenspeed.server.requests import ChatRequest
from tokenspeed.server.tools import offered_tools

GOLDEN = Path(__file__).parents[1] / "frontend" / "golden"
FAMILIES = {text.template: text for text in FAMILY_TEXTS.values()}

BODY: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi & <hello> 你好"}]},
        {"role": "assistant", "content": "Hello!", "reasoning": "A greeting.", "tool_calls": []},
        {"role": "user", "content": "Two cities?"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "reasoning_content": "I ask.",
            "tool_calls": [
                {
                    "id": "functions.weather:0",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Köln", "days": 2}'},
                }
            ],
        },
        {"role": "tool", "name": "weather", "tool_call_id": "functions.weather:0", "content": "sunny"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Tells the <weather> of a place.",
                "strict": False,
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
    ],
}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_request_with_tools_and_calls_is_the_text_that_was_read(name: str) -> None:
    body = msgspec.json.decode(json.dumps(BODY), type=ChatRequest)
    text = FAMILIES[name]
    template = ChatTemplate(text.chat_template(), text.begin, text.end)
    tools = offered_tools(body.tools, body.tool_choice, tool_format="any")
    shown = template.render(template_messages(body.messages), variables={"tools": tools})
    golden = re.split(r"^=== (.*)\n", (GOLDEN / f"{name}.txt").read_text("utf-8"), flags=re.MULTILINE)
    cases = dict(zip(golden[1::2], golden[2::2], strict=True))
    assert re.sub(r"\d{4}-\d\d-\d\d", "DATE", shown) + "\n" == cases["calls and results"]
