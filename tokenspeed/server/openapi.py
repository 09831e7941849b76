"""What /openapi.json says of answers: schemas of the structs that are sent, errors in each door's shape, keys."""

import re
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI

from tokenspeed.server.error_shapes import ANTHROPIC_PATH, AnthropicErrorResponse
from tokenspeed.server.errors import ErrorResponse
from tokenspeed.server.middleware import OPEN_PATHS

JSON = "application/json"
EVENTS = "text/event-stream"
PLAIN = "text/plain"

KEY_SCHEMES: dict[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""How a key may be sent; a server that has none set asks for none."""

PROBE: dict[str, Any] = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}
"""What the probes answer, whether all is well or not."""


def schema_of(kind: Any) -> dict[str, Any]:
    """Returns the JSON schema of a type that msgspec encodes, with its parts in place."""
    schema: dict[str, Any] = msgspec.json.schema(kind, ref_template="#/components/schemas/{name}")
    definitions = schema.pop("$defs", {})
    described: dict[str, Any] = _inlined(schema, definitions)
    return described


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Returns ``schema`` with its references replaced by what they refer to."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}


def describe(
    app: FastAPI, method: str, path: str, answer: Any, *, body: Any = None, required: bool = True, streams: bool = False
) -> None:
    """Has the page of ``app`` say what a route takes and answers, and which key it wants; made when it is asked for.

    Args:
        app: whose page it is.
        method: of the route, in capitals.
        path: the route's.
        answer: the type of its JSON; a media type for an answer that is no JSON; None where every call is refused.
        body: the type of what it takes; None where it takes nothing.
        required: whether ``body`` may be left out.
        streams: the answer may also come as server-sent events.
    """
    if not hasattr(app.state, "descriptions"):
        app.state.descriptions = []
        _complete_page(app)
    app.state.descriptions.append((method, path, partial(_described, path, answer, body, required, streams)))


def _complete_page(app: FastAPI) -> None:
    plain = app.openapi

    def complete() -> dict[str, Any]:
        made = app.openapi_schema is not None
        page = plain()
        if not made:
            page.setdefault("components", {})["securitySchemes"] = KEY_SCHEMES
            for method, path, description in app.state.descriptions:
                page["paths"][re.sub(r":\w+}", "}", path)][method.lower()].update(description())
        return page

    app.openapi = complete  # type: ignore[method-assign]


def _described(path: str, answer: Any, body: Any, required: bool, streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if path in OPEN_PATHS:
        content[JSON] = {"schema": PROBE}
    elif isinstance(answer, str):
        content[answer] = {"schema": {"type": "string"}}
    elif answer is not None:
        content[JSON] = {"schema": schema_of(answer)}
    if streams:
        content[EVENTS] = {"schema": {"type": "string"}}
    answers: dict[str, Any] = {
        "200": {"description": "The answer." if content else "Never sent.", "content": content},
        "4XX": _errors(path, "The request is at fault."),
        "5XX": _errors(path, "The server cannot answer, now or at all."),
    }
    if path in OPEN_PATHS:
        answers["503"] = {"description": "Not so; it says why.", "content": content}
    security: list[dict[str, list[str]]] = [] if path in OPEN_PATHS else [{name: []} for name in KEY_SCHEMES]
    asked = {"required": required, "content": {JSON: {"schema": schema_of(body)}}} if body is not None else None
    return {"responses": answers, "security": security, **({"requestBody": asked} if asked else {})}


def _errors(path: str, description: str) -> dict[str, Any]:
    anthropic = path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
    kind = AnthropicErrorResponse if anthropic else ErrorResponse
    return {"description": description, "content": {JSON: {"schema": schema_of(kind)}}}
