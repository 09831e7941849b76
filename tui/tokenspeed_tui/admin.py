"""What an operator may do from the dashboard: requests to the administration's port, only where that was allowed.

Every failure becomes a sentence; nothing is raised.
"""

import asyncio
import json
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import httpx

ADMIN_TIMEOUT_S = 10.0


class Outcome(NamedTuple):
    """How an action went: whether the server did it, and in words."""

    done: bool
    text: str


class Administration(Protocol):
    """What can be done to an engine."""

    async def abort(self, request: str) -> Outcome:
        """Ends one request, by its id."""

    async def flush(self) -> Outcome:
        """Forgets all cached prefixes."""

    async def hold(self, paused: bool) -> Outcome:
        """Stops the planning of steps, or goes on; requests stay as they are."""


class HttpAdministration:
    """The administration's port of a server (docs/api.md).

    Args:
        url: of that port, see normalised_url.
        api_key: sent as a bearer token where given; it must be one that opens the administration.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def abort(self, request: str) -> Outcome:
        """Ends one request, by its id."""
        outcome, body = await self._post("/abort_request", {"rid": request})
        aborted = body.get("aborted_choices") if isinstance(body, dict) else None
        if not outcome.done:
            return outcome
        if not aborted:
            return Outcome(False, f"{request} was not there any more")
        return Outcome(True, f"{request} was ended")

    async def flush(self) -> Outcome:
        """Forgets all cached prefixes; the server refuses while requests are alive."""
        outcome, _ = await self._post("/flush_cache", {})
        return Outcome(True, "all cached prefixes are forgotten") if outcome.done else outcome

    async def hold(self, paused: bool) -> Outcome:
        """Pauses in place, or goes on."""
        path, body = ("/pause_generation", {"mode": "in_place"}) if paused else ("/continue_generation", {})
        outcome, _ = await self._post(path, body)
        if not outcome.done:
            return outcome
        return Outcome(True, "the engine plans no more steps" if paused else "the engine goes on")

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[Outcome, Any]:
        """Posts and reads the answer; a refusal is told in the server's own words."""
        import httpx

        client = await asyncio.to_thread(self._client)
        try:
            async with client:
                answer = await client.post(path, json=body)
        except httpx.HTTPError as error:
            return Outcome(
                False, f"no answer from the administration at {self._url}: {error or type(error).__name__}"
            ), None
        told = _told(answer)
        if answer.status_code == 200:
            return Outcome(True, ""), told
        return Outcome(False, f"POST {path} gave status {answer.status_code}: {_words(told)}"), None

    def _client(self) -> "httpx.AsyncClient":
        import httpx

        return httpx.AsyncClient(base_url=self._url, headers=self._headers, timeout=ADMIN_TIMEOUT_S, trust_env=False)


def _told(answer: "httpx.Response") -> Any:
    try:
        return json.loads(answer.content)
    except ValueError:
        return None


def _words(told: Any) -> str:
    """The message of an error as the API writes it."""
    error = told.get("error") if isinstance(told, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else "is it the administration's port (--admin-port)?"
