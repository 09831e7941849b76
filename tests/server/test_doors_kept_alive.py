"""Streams of the other doors that were kept alive before anything came, and then failed."""

from typing import Any

import httpx
import pytest
from app_server import serving
from named_events import named_events
from parsing_server import FORMATS, parsing_server
from scripted_engine import MODEL

DOORS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/v1/messages": ({"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}, ["error"]),
    "/v1/responses": ({"input": "Hi"}, ["response.created", "response.in_progress", "response.failed"]),
}


@pytest.mark.parametrize("path", DOORS)
async def test_a_failure_after_a_comment_is_an_event(path: str) -> None:
    fields, kinds = DOORS[path]
    async with parsing_server(*FORMATS, keep_alive_s=0.01) as server, serving(server.app) as url:
        server.stack.engine.pause()
        body = {"model": MODEL, "stream": True, **fields}
        async with httpx.AsyncClient() as client, client.stream("POST", url + path, json=body) as answer:
            pieces = answer.aiter_text()
            text = await anext(pieces)
            assert answer.status_code == 200 and text.startswith(": keep-alive")
            server.stack.connection.engine_lost("killed by SIGKILL")
            text += "".join([piece async for piece in pieces])
    events = named_events(text, ends_with_done=path == "/v1/responses")
    assert [event["type"] for event in events] == kinds
    assert "SIGKILL" in text
