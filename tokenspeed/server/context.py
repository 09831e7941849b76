"""What every route needs: the frontend, the metrics, and a few facts about the server."""

import time
import uuid
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.async_llm import AsyncLLM
from tokenspeed.server.errors import ApiError
from tokenspeed.server.keys import KeyRing
from tokenspeed.server.rates import Allowances
from tokenspeed.server.responses_api.store import ResponseStore
from tokenspeed.server.tracing import Tracing
from tokenspeed.telemetry import logs
from tokenspeed.telemetry.metrics import Metrics

_REQUEST_ID_CHARACTERS = 128

KEY_NAME = "tokenspeed.key_name"
"""Where the scope of a request has the name of its API key."""


@dataclass
class ServerContext:
    """Shared by all routes of one application; lives in ``app.state.context``."""

    llm: AsyncLLM
    metrics: Metrics
    progress_threshold_s: float
    keys: KeyRing
    allowances: Allowances
    responses: ResponseStore
    tracing: Tracing | None = None
    started_at: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_body_bytes(self) -> int:
        return self.llm.config.api.max_body_bytes

    def close(self) -> None:
        """Sends what is still to be sent elsewhere; may take seconds."""
        if self.tracing is not None:
            self.tracing.close()

    def check_model(self, name: str) -> None:
        """Raises ApiError (404) where another model than the served one is asked for."""
        served = self.llm.config.served_name
        if name != served:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; served is {served!r}",
                code="model_not_found",
                param="model",
            )


def context_of(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


def request_id_of(request: Request) -> str:
    """Returns the client's own X-Request-Id where it is short and printable, else a new one; log records of the
    running task carry it from here on."""
    given = request.headers.get("x-request-id", "")
    usable = given.isascii() and given.isprintable() and 0 < len(given) <= _REQUEST_ID_CHARACTERS
    request_id = given if usable else uuid.uuid4().hex
    logs.request_id.set(request_id)
    return request_id


def key_name_of(request: Request) -> str:
    """Returns the name of the API key that came with the request, the same one for all where keys are not asked for."""
    name: str = request.scope[KEY_NAME]
    return name


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
