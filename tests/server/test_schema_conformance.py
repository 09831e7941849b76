"""schemathesis against /openapi.json of both ports: no error of the server's, no answer beside its schema, no way past
the keys."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode, checks
from schemathesis.schemas import APIOperation
from scripted_engine import MODEL, scripted_config
from served_thread import ServedThread

from tokenspeed.server.middleware import OPEN_PATHS

SEEDS = (1, 2026)
"""Of the short run; a seed that finds a fault in a long run is added here and stays."""

LONG_SEEDS = (100, 103)
QUICKLY: Any = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate, Phase.shrink),
}
ENDLESS = "/v1/internal/state/stream"
KEY = "a-key-that-opens"

CHECKS: list[Any] = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServedThread]:
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    with ServedThread(
        scripted_config(chat_template=template, embeddings={"pooling": "last", "dimensions": "1-8"})
    ) as served:
        yield served


@pytest.fixture(scope="module")
def kept(server: ServedThread) -> str:
    """The id of a response that is there to be read."""
    asked = {"model": MODEL, "input": "Hi"}
    return str(httpx.post(f"{server.url}/v1/responses", json=asked).json()["id"])


def operations(url: str) -> list[APIOperation]:
    page = httpx.get(f"{url}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(_without_tuples(page))
    found = [result.ok() for result in schema.get_all_operations()]
    assert len(found) > 15
    return found


def _without_tuples(part: Any) -> Any:
    """schemathesis 4 makes an ``items`` list of ``prefixItems``, which OpenAPI 3.1 forbids; the length still counts."""
    if isinstance(part, list):
        return [_without_tuples(one) for one in part]
    if not isinstance(part, dict):
        return part
    left = {"prefixItems", "items"} if "prefixItems" in part else set()  # items: false forbids what follows them
    return {name: _without_tuples(one) for name, one in part.items() if name not in left}


def conforms(operation: APIOperation, server: ServedThread, url: str, kept: str, *, examples: int, start: int) -> None:
    """Sends what the schema says, and what it forbids; every answer must be one that the schema has."""
    positive = operation.as_strategy(GenerationMode.POSITIVE)
    wrong = operation.body or operation.query
    cases = positive | operation.as_strategy(GenerationMode.NEGATIVE) if wrong else positive

    @seed(start)
    @settings(max_examples=examples, **QUICKLY)
    @given(case=cases, known=st.integers(0, 3))
    def once(case: Any, known: int) -> None:
        if known:  # random names open no door; most cases should come to where the work is done
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = MODEL
            if case.path_parameters:
                case.path_parameters = dict.fromkeys(case.path_parameters, MODEL if "model" in case.path else kept)
        answer = case.call(base_url=url, timeout=20)
        timely = "deadline_exceeded" not in answer.text  # a 504 is what a tiny timeout asks for
        case.validate_response(answer, checks=CHECKS if timely else CHECKS[1:])
        assert "internal_error" not in answer.text

    once()
    server.all_ended()


@pytest.mark.parametrize("start", SEEDS)
def test_every_answer_is_in_the_schema(server: ServedThread, kept: str, start: int) -> None:
    for url in (server.url, server.admin_url):
        for operation in operations(url):
            if operation.path != ENDLESS:
                conforms(operation, server, url, kept, examples=4, start=start)


FOUND: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"messages": [], "continue_final_message": True}),
]
"""Requests of long runs that were answered with an error of the server's, cut down."""


@pytest.mark.parametrize(("path", "body"), FOUND)
def test_what_earlier_runs_found(server: ServedThread, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}{path}", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("continue_final_message: ")


def test_log_probabilities_are_in_the_schema(server: ServedThread) -> None:
    """A long run drew them, and found that this test's own schema forbade every one."""
    (generate,) = (operation for operation in operations(server.url) if operation.path == "/generate")
    case = generate.Case(body={"text": "x", "return_logprob": True, "top_logprobs_num": 4})
    case.validate_response(case.call(base_url=server.url), checks=CHECKS)


@pytest.mark.long
@pytest.mark.parametrize("start", LONG_SEEDS)
def test_every_answer_is_in_the_schema_for_long(server: ServedThread, kept: str, start: int) -> None:
    for url in (server.url, server.admin_url):
        for operation in operations(url):
            if operation.path != ENDLESS:
                conforms(operation, server, url, kept, examples=200 if operation.body else 40, start=start)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedThread]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"ann: {KEY} admin\n")
    with ServedThread(scripted_config(api_key_file=str(keys))) as served:
        yield served


WRONG_KEYS: list[dict[str, str]] = [
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": f"Basic {KEY}"},
    {"Authorization": "Bearer"},
    {"Authorization": f"Bearer {KEY[:-1]}"},
    {"x-api-key": f"{KEY} {KEY}"},
    {"Cookie": f"x-api-key={KEY}", "api-key": KEY},
]
DETOURS = (
    "/live/../{path}",
    "//{path}",
    "/{path}/",
    "/{path}?x-api-key={key}",
    "/live%2f..%2f{path}",
    "/ready;/{path}",
)


def test_no_operation_is_open_without_a_key(locked: ServedThread) -> None:
    for url in (locked.url, locked.admin_url):
        with httpx.Client(base_url=url) as client:
            page = client.get("/openapi.json", headers={"x-api-key": KEY}).json()
            assert set(page["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
            assert client.get("/openapi.json").status_code == 401
            for path, methods in page["paths"].items():
                for method, operation in methods.items():
                    assert bool(operation["security"]) != (path in OPEN_PATHS)
                    wants_the_key(client, method, path)
    assert not locked.engine.submits and not locked.engine.orders


def wants_the_key(client: httpx.Client, method: str, path: str) -> None:
    for headers in WRONG_KEYS:
        status = client.request(method, path, headers=headers).status_code
        assert status == (200 if path in OPEN_PATHS else 401), (method, path, headers)
    if path in OPEN_PATHS:
        return
    assert {client.request(other, path).status_code for other in ("HEAD", "OPTIONS", "TRACE")} == {401}
    for detour in DETOURS:
        target = detour.format(path=path[1:], key=KEY)
        assert client.request(method, target).status_code == 401, (method, target)


@pytest.mark.parametrize("start", SEEDS)
def test_whatever_is_sent_without_a_key_is_refused(locked: ServedThread, start: int) -> None:
    page = httpx.get(f"{locked.url}/openapi.json", headers={"x-api-key": KEY}).json()
    for result in schemathesis.openapi.from_dict(page).get_all_operations():
        operation = result.ok()
        if operation.path in OPEN_PATHS:
            continue

        @seed(start)
        @settings(max_examples=4, **QUICKLY)
        @given(case=operation.as_strategy(GenerationMode.POSITIVE))
        def once(case: Any) -> None:
            case.headers = {name: text for name, text in case.headers.items() if text != KEY}
            assert case.call(base_url=locked.url, timeout=20).status_code == 401

        once()
    assert not locked.engine.submits
