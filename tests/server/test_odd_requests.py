"""Whatever a client sends, the answer is the client's fault or an answer, never an error of the server."""

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_engine import MODEL, Stack

from tokenspeed.server.fields import REFUSED, WITHOUT_EFFECT
from tokenspeed.server.requests import ChatRequest, CompletionRequest

ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
NAMES = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *REFUSED, *WITHOUT_EFFECT})
FIELDS = st.dictionaries(st.sampled_from([*NAMES, "nothing"]), ODD, max_size=3)
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}


@pytest.mark.parametrize("path", BASES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=FIELDS)
async def test_odd_fields(stack: Stack, client: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> None:
    answer = await client.post(path, json={"model": MODEL, **BASES[path], **fields})
    if answer.status_code == 504:
        assert fields["timeout"] < 60 and answer.json()["error"]["code"] == "deadline_exceeded"
    elif answer.status_code != 200:
        assert answer.status_code in (400, 404), answer.text
        error = answer.json()["error"]
        assert error["message"] and error["code"] not in (None, "internal_error")
        param = error["param"]
        assert param is None or param.partition(".")[0].partition("[")[0] in {*fields, "model", "prompt", "messages"}
    assert stack.llm.open_choices == 0
