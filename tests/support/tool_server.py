"""The API over a scripted engine, with formats of tool calls and reasoning."""

from typing import Any

import httpx
from events import events_of
from parsed_answers import declared
from scripted_engine import MODEL, Stack, say, scripted_config

from tokenspeed.recipes.resolved import FormatSettings
from tokenspeed.server.app import create_app

TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool | tojson }}>{% endfor %}"
    "{% for message in messages %}[{% for key, value in message.items() %}{{ key }}={{ value }};{% endfor %}]"
    "{% endfor %}"
    "{{ enable_thinking }}{{ reasoning_effort }}{{ opened }}"
)
SMALL = [declared("weather", city={"type": "string"}, days={"type": "integer"}), declared("time")]
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
REASONED = len(">\nI ask.\n</think>")
"""From the token that opens reasoning through the one that closes it; here a token is a byte."""
CALLS: dict[str, Any] = {**CHAT, "tools": SMALL}


def config_of(tools: str = "", reasoning: str = "", switch: str = "") -> Any:
    formats = FormatSettings(tools=tools, reasoning=reasoning, thinking_switch=switch)
    return scripted_config(chat_template=TEMPLATE).model_copy(update={"formats": formats})


class Served:
    """A frontend over a scripted engine, and HTTP to it."""

    def __init__(self, *formats: str) -> None:
        self.stack = Stack(config_of(*formats))
        self.app = create_app(self.stack.llm)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def __aenter__(self) -> "Served":
        await self.stack.new_engine()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        await self.stack.close()

    def say(self, text: str, **how: Any) -> None:
        self.stack.engine.script = say(text, **how)

    async def post(self, body: dict[str, Any], **fields: Any) -> Any:
        answer = await self.client.post("/v1/chat/completions", json={**body, **fields})
        assert answer.status_code == 200, answer.text
        return events_of(answer.text) if fields.get("stream") else answer.json()

    async def refused(self, body: dict[str, Any], **fields: Any) -> Any:
        answer = await self.client.post("/v1/chat/completions", json={**body, **fields})
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    def prompt(self) -> str:
        ids = memoryview(self.stack.engine.submits[-1].prompt).cast("i").tolist()
        return bytes(ids).decode()


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """What the chunks of one choice make, in the shape of a whole choice."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    logprobs, ends = [], []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
                else:
                    assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            logprobs += (choice["logprobs"] or {"content": []})["content"]
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    return {"message": message, "logprobs": logprobs, "ends": ends}
