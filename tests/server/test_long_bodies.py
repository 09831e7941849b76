"""Bodies with far too much in them are refused before it is read, and are not sent back."""

import json
from typing import Any

import httpx
import msgspec
import pytest
from scripted_engine import CONTEXT, MODEL, Stack

from tokenspeed.server.errors import MESSAGE_CHARACTERS, PARAM_CHARACTERS, ApiError
from tokenspeed.server.fields import FIELD_BYTES, check_fields

MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("/v1/completions", {"prompt": "x", "logit_bias": {str(at): 1 for at in range(200_000)}}, "logit_bias has"),
        ("/v1/completions", {"prompt": "x", "stop": ["y"] * 300_000}, "stop has"),
        ("/v1/chat/completions", {"messages": [MESSAGE], "tools": [[]] * 400_000}, "tools has"),
        ("/v1/chat/completions", {"messages": [MESSAGE], "functions": [[]] * 400_000}, "functions is not supported"),
        ("/v1/completions", {"prompt": "x", "p" * 1_000_000: 1}, "docs/api.md lists the fields"),
        ("/v1/messages", {"max_tokens": 1, "messages": [MESSAGE] * (CONTEXT + 1)}, f"more than {CONTEXT + 1} tokens"),
        ("/v1/chat/completions", {"messages": [MESSAGE] * (CONTEXT + 1)}, f"more than {CONTEXT + 1} tokens"),
        ("/v1/responses", {"input": [MESSAGE] * (CONTEXT + 1)}, f"more than {CONTEXT + 1} tokens"),
    ],
)
async def test_too_much_is_refused(
    stack: Stack, client: httpx.AsyncClient, path: str, fields: dict[str, Any], says: str
) -> None:
    answer = await client.post(path, json={"model": MODEL, **fields})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert says in message and len(message) <= MESSAGE_CHARACTERS
    assert stack.engine.submits == []


async def test_long_prompts_and_ignored_fields_are_as_long_as_they_like(client: httpx.AsyncClient) -> None:
    """What is not read entry by entry has no bound but the body's."""
    fields = {"prompt": "x", "max_tokens": 1, "user": "y" * (2 * FIELD_BYTES)}
    assert (await client.post("/v1/completions", json={"model": MODEL, **fields})).status_code == 200
    counted = await client.post("/tokenize", json={"model": MODEL, "prompt": "y" * (2 * FIELD_BYTES)})
    assert counted.json()["count"] == 2 * FIELD_BYTES + 1


def test_a_refused_field_is_not_decoded_where_it_is_long() -> None:
    refused = msgspec.Raw(b"[" * 1000)
    with pytest.raises(ApiError, match="functions is not supported"):
        check_fields({"functions": refused}, ["prompt"])


def test_an_error_does_not_send_everything_back() -> None:
    error = ApiError(400, "the model '" + "x" * 100_000 + "' is not served", param="y" * 100_000)
    assert len(str(error)) == MESSAGE_CHARACTERS
    body = json.loads(error.content())["error"]
    assert body["message"] == str(error)
    assert body["message"].startswith("the model 'xxx") and body["message"].endswith("xxx' is not served")
    assert len(body["param"]) == PARAM_CHARACTERS
    assert str(ApiError(400, "short", param="name")) == "short"
