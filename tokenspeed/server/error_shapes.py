"""Errors as the clients of each door read them: Anthropic's under /v1/messages, OpenAI's everywhere else."""

from typing import Literal

import msgspec
from starlette.responses import Response

from tokenspeed.server.errors import ApiError

ANTHROPIC_PATH = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicError(msgspec.Struct, kw_only=True):
    type: str
    message: str


class AnthropicErrorResponse(msgspec.Struct, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicError


def anthropic_content(error: ApiError) -> bytes:
    """Returns the body, or the data of an event, in Anthropic's shape; it has no place for ``param`` and ``code``."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return msgspec.json.encode(AnthropicErrorResponse(error=AnthropicError(type=kind, message=str(error))))


def error_response(error: ApiError, path: str) -> Response:
    """Returns the answer to a request for ``path`` that ``error`` ended."""
    anthropic = path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
    content = anthropic_content(error) if anthropic else error.content()
    return Response(content, error.status, error.headers, media_type="application/json")
