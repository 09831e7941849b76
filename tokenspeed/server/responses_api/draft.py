"""A response on its way: what was asked, and how it ends."""

import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from tokenspeed.frontend.generation import Generation
from tokenspeed.messages import FinishReason
from tokenspeed.server.errors import ApiError
from tokenspeed.server.responses_api.answers import FailureBody, IncompleteDetails, ResponseBody, UsageBody, item_of
from tokenspeed.server.responses_api.requests import ResponsesRequest
from tokenspeed.server.responses_api.store import ResponseStore, StoredResponse
from tokenspeed.server.responses_api.translate import read_tools
from tokenspeed.server.segments import SegmentReader
from tokenspeed.server.timings import timings_of


class Draft:
    """One response being made; streamed and whole answers end it here, so both are kept and look alike.

    Attributes:
        body: as it stands.
        mark: what the ids of its items hold; nobody can guess it, and it is not the request's id.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        store: ResponseStore,
        *,
        owner: str,
        input_items: list[dict[str, Any]],
        history: list[dict[str, Any]],
        defaults: Mapping[str, float | int],
    ) -> None:
        """``owner`` is the name of the API key that asks, ``input_items`` are the request's own, ``history`` is the
        whole conversation, them included."""
        self.mark = secrets.token_hex(16)
        self.body = _opening(body, f"resp_{self.mark}", defaults, stores=store.is_on)
        self._owner = owner
        self._store = store
        self._return_timings = body.return_timings
        self._input_items = input_items
        self._history = history

    def end(self, reader: SegmentReader, reason: FinishReason, generation: Generation) -> None:
        """The choice ended by itself, or because it had all the tokens it may have."""
        self._finish(reader)
        if reason == "length":
            self.body.status, self.body.incomplete_details = "incomplete", IncompleteDetails()
        else:
            self.body.status, self.body.completed_at = "completed", int(time.time())
        self.body.usage = UsageBody.of(generation.usage)
        self.body.timings = timings_of(generation, self._return_timings)
        self._keep()

    def fail(self, reader: SegmentReader, error: ApiError) -> None:
        """The engine gave up in mid-stream."""
        reader.finish(complete=False)
        self._finish(reader)
        self.body.status = "failed"
        self.body.error = FailureBody(code=error.body.error.code or "server_error", message=error.body.error.message)
        self._keep()

    def _finish(self, reader: SegmentReader) -> None:
        self.body.output = [item_of(segment, self.mark) for segment in reader.segments]

    def _keep(self) -> None:
        if self.body.store:
            encode = msgspec.json.encode
            history = [*self._history, *self.body.output]
            stored = StoredResponse(encode(self.body), encode(self._input_items), encode(history), self._owner)
            self._store.put(self.body.id, stored)


def _opening(body: ResponsesRequest, name: str, defaults: Mapping[str, float | int], *, stores: bool) -> ResponseBody:
    reasoning = body.reasoning
    return ResponseBody(
        id=name,
        created_at=int(time.time()),
        model=body.model,
        frequency_penalty=body.frequency_penalty or 0.0,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        presence_penalty=body.presence_penalty or 0.0,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": None if reasoning is None else reasoning.effort, "summary": None},
        store=stores and body.store is not False,
        temperature=defaults.get("temperature", 1.0) if body.temperature is None else body.temperature,
        text={"format": _format(body)},
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=[{**msgspec.structs.asdict(tool), "strict": bool(tool.strict)} for tool in read_tools(body.tools or [])],
        top_p=defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
    )


def _format(body: ResponsesRequest) -> dict[str, Any]:
    """What the text was to look like, as clients read it back: they need a name and ``strict`` beside every schema."""
    form = None if body.text is None else body.text.format
    if form is None or form.type != "json_schema":
        return {"type": "text" if form is None else form.type}
    return {
        "type": form.type,
        "name": form.name or "",
        "description": form.description,
        "schema": form.schema,
        "strict": form.strict is not False,
    }
