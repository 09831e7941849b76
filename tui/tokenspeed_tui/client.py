"""Looks at a server over HTTP. Every failure becomes a line of text in an observation; nothing is raised."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import msgspec

from tokenspeed_tui.observation import RECORDING_VERSION, Observation, Probe
from tokenspeed_tui.view import read_server

if TYPE_CHECKING:
    import httpx

STATE_PATH = "/v1/internal/state"
CONFIGURATION_PATH = "/v1/internal/configuration"
REQUESTS_PATH = "/v1/internal/requests/"
ANSWER_TIMEOUT_S = 2.0
CONFIGURATION_INTERVAL_S = 5.0
"""How often a watched configuration is asked for without any sign that it changed."""
SAME_START_S = 1.0
"""Starts that lie closer together are one: it is told by two clocks, and one of them may be slewed."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What tells one start of a server's engine from another: a configuration lasts no longer than that.

    ``began`` is when the engine became ready, seconds since the epoch; None where no snapshot says it.
    """

    recipe_hash: str | None
    ready: bool
    began: float | None

    def is_same(self, other: "Start") -> bool:
        """Whether nothing began anew between the two."""
        if (self.recipe_hash, self.ready) != (other.recipe_hash, other.ready):
            return False
        if self.began is None or other.began is None:
            return self.began is other.began
        return abs(self.began - other.began) < SAME_START_S


class HttpSource:
    """A running server as a source of observations.

    Args:
        url: of the server, see normalised_url.
        api_key: sent as a bearer token where given.
        clock: monotonic seconds, for the slow timer of the configuration.
    """

    def __init__(self, url: str, api_key: str | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._clock = clock
        self._watched = False
        self._request: str | None = None
        self._asked: tuple[float, Start] | None = None
        self._brought: dict[str, Any] | None = None

    def watch_configuration(self, wanted: bool) -> None:
        """Whether looks ask for the configuration: at once, at each start of an engine, and on a slow timer."""
        if wanted and not self._watched:
            self._asked = None
        self._watched = wanted

    def watch_request(self, request: str | None) -> None:
        """Whether looks ask for the detail of this request, each time."""
        self._request = request

    async def observations(self) -> AsyncIterator[Observation]:
        """Looks at the server each time an observation is asked for, for ever."""
        client = await asyncio.to_thread(self._client)
        async with client:
            while True:
                yield await self._look(client)

    def _client(self) -> "httpx.AsyncClient":
        """Made off the event loop: importing httpx and reading certificates take a tenth of a second."""
        import httpx

        return httpx.AsyncClient(base_url=self._url, headers=self._headers, timeout=ANSWER_TIMEOUT_S, trust_env=False)

    async def _look(self, client: "httpx.AsyncClient") -> Observation:
        state, live, ready, progress = await asyncio.gather(
            _get(client, STATE_PATH), _get(client, "/live"), _get(client, "/ready"), _get(client, "/progress")
        )
        body, error = _state_of(state, self._url)
        configuration, configuration_error = await self._configuration(client, body)
        detail, detail_error = await self._detail(client, body)
        return Observation(
            version=RECORDING_VERSION,
            time=time.time(),
            url=self._url,
            live=_probe_of(live),
            ready=_probe_of(ready),
            progress=_probe_of(progress),
            state=body,
            error=error,
            configuration=configuration,
            configuration_error=configuration_error,
            detail=detail,
            detail_error=detail_error,
        )

    async def _detail(
        self, client: "httpx.AsyncClient", state: Mapping[str, Any] | None
    ) -> tuple[dict[str, Any] | None, str]:
        """The detail of the watched request, or why there is none."""
        if self._request is None or state is None:
            return None, ""
        answer = await _get(client, REQUESTS_PATH + quote(self._request, safe=""))
        if isinstance(answer, str):
            return None, f"no detail came: {answer}"
        return _detail_of(answer)

    async def _configuration(
        self, client: "httpx.AsyncClient", state: Mapping[str, Any] | None
    ) -> tuple[dict[str, Any] | None, str]:
        """The configuration where it is due and not what it was, or why the server does not say it."""
        if not self._watched or state is None:
            return None, ""
        now, start = self._clock(), _start_of(state)
        if self._asked is not None:
            asked_at, asked_of = self._asked
            if now - asked_at < CONFIGURATION_INTERVAL_S and start.is_same(asked_of):
                return None, ""
        answer = await _get(client, CONFIGURATION_PATH)
        if isinstance(answer, str):
            return None, ""  # the server went away in between: the next look asks again
        self._asked = (now, start)
        body, error = _configuration_of(answer)
        before, self._brought = self._brought, body
        return (None, "") if body is not None and body == before else (body, error)


def normalised_url(url: str) -> str:
    """A URL as a person types it, with its scheme and without a trailing slash; raises ValueError if it is none."""
    full = url if "://" in url else f"http://{url}"
    try:
        parsed = urlsplit(full)
        _ = parsed.port  # looked at when it is asked for
    except ValueError as error:
        raise ValueError(f"{url!r} is no URL: {error}; give one like http://127.0.0.1:8000") from error
    if parsed.scheme not in ("http", "https") or not parsed.hostname:
        raise ValueError(f"{url!r} names no HTTP server; give a URL like http://127.0.0.1:8000")
    return full.rstrip("/")


async def _get(client: "httpx.AsyncClient", path: str) -> "httpx.Response | str":
    """The answer, or in words why there is none."""
    import httpx

    try:
        return await client.get(path)
    except httpx.ConnectError as error:
        return f"the connection failed: {error}" if str(error) else "the connection failed"
    except httpx.TimeoutException:
        return f"no answer within {ANSWER_TIMEOUT_S:g} s"
    except httpx.HTTPError as error:
        return f"the connection broke off: {error}" if str(error) else "the connection broke off"


def _probe_of(answer: "httpx.Response | str") -> Probe:
    return Probe() if isinstance(answer, str) else Probe(status=answer.status_code)


def _state_of(answer: "httpx.Response | str", url: str) -> tuple[dict[str, Any] | None, str]:
    """The state in the answer, or why there is none."""
    if isinstance(answer, str):
        return None, f"no server answers at {url} ({answer})"
    asked = f"{url} answers, but GET {STATE_PATH} gave status {answer.status_code}"
    if answer.status_code in (401, 403):
        return None, f"{asked}: it wants a key, give --api-key-file"
    if answer.status_code != 200:
        return None, f"{asked}: is it a TokenSpeed server?"
    try:
        body = json.loads(answer.content)
    except ValueError:
        return None, f"{asked} and no JSON: is it a TokenSpeed server?"
    if not isinstance(body, Mapping):
        return None, f"{asked} and JSON that is no object: is it a TokenSpeed server?"
    return dict(body), ""


def _start_of(state: Mapping[str, Any]) -> Start:
    snapshot = state.get("snapshot")
    # The rest of a snapshot is long, and says nothing of the start.
    times = {name: snapshot.get(name) for name in ("time", "uptime_s")} if isinstance(snapshot, Mapping) else {}
    server = read_server({**state, "snapshot": times})
    time_s, uptime_s = (server.snapshot.time, server.snapshot.uptime_s) if server.snapshot is not None else (None, None)
    return Start(
        recipe_hash=server.recipe_hash,
        ready=server.phase == "ready",
        began=time_s - uptime_s if time_s is not None and uptime_s is not None else None,
    )


def _configuration_of(answer: "httpx.Response") -> tuple[dict[str, Any] | None, str]:
    """The configuration in the answer, or why there is none."""
    if answer.status_code == 404:
        return None, (
            f"this server is older than the dashboard and does not tell its configuration (GET {CONFIGURATION_PATH} "
            "gave status 404); `tokenspeed recipe explain` prints what a start takes"
        )
    return _object_of(answer, f"no configuration came: GET {CONFIGURATION_PATH} gave status {answer.status_code}")


def _detail_of(answer: "httpx.Response") -> tuple[dict[str, Any] | None, str]:
    """The detail in the answer, or why there is none."""
    if answer.status_code == 404:
        return None, (
            "the server knows nothing more of it: it ended a while ago, or the server is older than the dashboard "
            f"(GET {REQUESTS_PATH}… gave status 404)"
        )
    return _object_of(answer, f"no detail came: GET {REQUESTS_PATH}… gave status {answer.status_code}")


def _object_of(answer: "httpx.Response", asked: str) -> tuple[dict[str, Any] | None, str]:
    """The JSON object of an answer with status 200; else what was asked and what came instead."""
    if answer.status_code != 200:
        return None, asked
    try:
        body = json.loads(answer.content)
    except ValueError:
        return None, f"{asked} and no JSON"
    return (dict(body), "") if isinstance(body, Mapping) else (None, f"{asked} and JSON that is no object")
