"""Looks at a server over HTTP. Every failure becomes a line of text in an observation; nothing is raised."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from tokenspeed_tui.observation import RECORDING_VERSION, Observation, Probe

if TYPE_CHECKING:
    import httpx

STATE_PATH = "/v1/internal/state"
ANSWER_TIMEOUT_S = 2.0


class HttpSource:
    """A running server as a source of observations.

    Args:
        url: of the server, see normalised_url.
        api_key: sent as a bearer token where given.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

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
        return Observation(
            version=RECORDING_VERSION,
            time=time.time(),
            url=self._url,
            live=_probe_of(live),
            ready=_probe_of(ready),
            progress=_probe_of(progress),
            state=body,
            error=error,
        )


def normalised_url(url: str) -> str:
    """A URL as a person types it, with its scheme and without a trailing slash; raises ValueError if it is none."""
    import httpx

    full = url if "://" in url else f"http://{url}"
    try:
        parsed = httpx.URL(full)
    except httpx.InvalidURL as error:
        raise ValueError(f"{url!r} is no URL: {error}; give one like http://127.0.0.1:8000") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
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
