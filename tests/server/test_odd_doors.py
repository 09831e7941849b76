"""Whatever is sent to the other doors, the answer is the client's fault or an answer, never an error of the server."""

from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_engine import MODEL, Stack

from tokenspeed.server.anthropic import requests as anthropic_requests
from tokenspeed.server.anthropic.requests import Block, MessagesRequest, Tool
from tokenspeed.server.generate_api import requests as generate_requests
from tokenspeed.server.generate_api.requests import GenerateRequest
from tokenspeed.server.responses_api import requests as responses_requests
from tokenspeed.server.responses_api.requests import FunctionTool, Item, Part, ResponsesRequest

WORDS = st.sampled_from(
    ["user", "assistant", "system", "text", "tool_use", "tool_result", "thinking", "message", "function_call", "auto",
     "function_call_output", "reasoning", "input_text", "function", "enabled", "disabled", "any", "tool", MODEL]
)  # fmt: skip


def names_of(*kinds: type[msgspec.Struct]) -> list[str]:
    return [name for kind in kinds for name in kind.__struct_fields__]


INNER = st.sampled_from(sorted({*names_of(Block, Tool, FunctionTool, Item, Part), "role", "effort", "format", "x"}))
ODD: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
    | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(INNER, inner, max_size=4),
    max_leaves=8,
)
DOORS: dict[str, tuple[dict[str, Any], type[msgspec.Struct], Any]] = {
    "/v1/messages": (
        {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
        MessagesRequest,
        anthropic_requests.RULES,
    ),
    "/v1/responses": ({"model": MODEL, "input": "Hi"}, ResponsesRequest, responses_requests.RULES),
    "/generate": ({"text": "Hi"}, GenerateRequest, generate_requests.RULES),
}


@pytest.mark.parametrize("path", DOORS)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_odd_fields(stack: Stack, client: httpx.AsyncClient, path: str, data: st.DataObject) -> None:
    base, kind, rules = DOORS[path]
    names = [*kind.__struct_fields__, *rules.refused, *rules.without_effect, "nothing"]
    fields = data.draw(st.dictionaries(st.sampled_from(names), ODD, max_size=3))
    answer = await client.post(path, json={**base, **fields})
    if answer.status_code == 504:
        assert fields["timeout"] < 60 and answer.json()["error"]["code"] == "deadline_exceeded"
    elif answer.status_code != 200:
        assert answer.status_code in (400, 404), answer.text
        error = answer.json()["error"]
        assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error")
    assert stack.llm.open_choices == 0
