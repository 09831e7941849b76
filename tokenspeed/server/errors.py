"""Errors as the API shows them: OpenAI's shape, the right status, and a message that says what would mend it."""

import msgspec

from tokenspeed.frontend.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    FrontendError,
    LineFull,
    ReaderTooSlow,
    RequestRefused,
)

INVALID_REQUEST = "invalid_request_error"
AUTHENTICATION = "authentication_error"
PERMISSION = "permission_error"
RATE_LIMIT = "rate_limit_error"
TIMEOUT = "timeout_error"
SERVER_ERROR = "server_error"
UNAVAILABLE = "service_unavailable_error"

RETRY_AFTER_S = 2

MESSAGE_CHARACTERS = 2000
PARAM_CHARACTERS = 200
"""Of an error, which may name what a client sent: that is not sent back at any length."""


class ErrorBody(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct, kw_only=True):
    error: ErrorBody


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        body: what is sent.
        headers: sent beside it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str = INVALID_REQUEST,
        headers: dict[str, str] | None = None,
    ) -> None:
        message, param = _cut(message, MESSAGE_CHARACTERS), _cut(param or "", PARAM_CHARACTERS)
        super().__init__(message)
        self.status = status
        self.body = ErrorResponse(error=ErrorBody(message=message, type=kind, param=param or None, code=code))
        self.headers = headers or {}

    def content(self) -> bytes:
        return msgspec.json.encode(self.body)


def _cut(text: str, most: int) -> str:
    """Returns ``text``, or its beginning and its end where it is longer than ``most`` characters."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[5 - most // 2 :]}"


def from_frontend(error: FrontendError) -> ApiError:
    """Returns the API's form of a frontend error: 400 for the request's fault, 503 for not now, 500 for ours."""
    if isinstance(error, RequestRefused):
        return ApiError(400, error.message, code=error.code, param=error.param)
    if isinstance(error, LineFull):
        return ApiError(
            429, error.message, code=error.code, kind=RATE_LIMIT, headers={"Retry-After": str(error.retry_after_s)}
        )
    if isinstance(error, DeadlineExceeded):
        return past_deadline(error.message)
    if isinstance(error, ReaderTooSlow):
        return ApiError(408, error.message, code=error.code, kind=TIMEOUT)
    if isinstance(error, EngineUnavailable):
        return ApiError(
            503, error.message, code=error.code, kind=UNAVAILABLE, headers={"Retry-After": str(RETRY_AFTER_S)}
        )
    if error.code == "aborted":
        # clients that try again by themselves would bring back what an operator took away
        return ApiError(503, error.message, code=error.code, kind=UNAVAILABLE, headers={"x-should-retry": "false"})
    return ApiError(500, error.message, code=error.code, kind=SERVER_ERROR)


def past_deadline(message: str) -> ApiError:
    """The answer to a request whose time is over: nobody wants it any more, so clients need not try again."""
    return ApiError(504, message, code="deadline_exceeded", kind=TIMEOUT, headers={"x-should-retry": "false"})
