"""The application over a scripted engine, with a model that reasons and calls tools."""

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI
from scripted_engine import Stack, say, scripted_config

from tokenspeed.recipes.resolved import FormatSettings
from tokenspeed.server.app import create_app

TEMPLATE = (
    "{{ {'tools': tools, 'messages': messages, 'thinking': enable_thinking | default(none),"
    " 'effort': reasoning_effort | default(none)} | tojson }}"
)
"""Writes down what it was given, as JSON."""

CONTEXT = 16384
FORMATS = ("hermes", "qwen3", "enable_thinking")


@dataclass
class ParsingServer:
    """``stack`` and the application over it, with ``client`` to talk to it in process."""

    stack: Stack
    app: FastAPI
    client: httpx.AsyncClient

    def say(self, text: str, **how: Any) -> None:
        self.stack.engine.script = say(text, **how)

    def given(self, at: int = -1) -> Any:
        """What the template was given for a request, with the names above."""
        ids = memoryview(self.stack.engine.submits[at].prompt).cast("i").tolist()
        return json.loads(bytes(ids))


@contextlib.asynccontextmanager
async def parsing_server(tools: str, reasoning: str, switch: str, **api: Any) -> AsyncIterator[ParsingServer]:
    """Serves a model of these formats."""
    formats = FormatSettings(tools=tools, reasoning=reasoning, thinking_switch=switch)
    config = scripted_config(chat_template=TEMPLATE, **api).model_copy(update={"formats": formats})
    stack = Stack(config)
    try:
        await stack.new_engine(ready=False)
        await stack.engine.send_status("ready", facts={"max_model_len": CONTEXT, "kv_tokens": CONTEXT})
        await stack.llm.engine.wait_ready()
        app = create_app(stack.llm)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield ParsingServer(stack, app, client)
    finally:
        await stack.close()
