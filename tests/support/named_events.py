"""Reads streams of named server-sent events in tests."""

import json
from typing import Any


def named_events(text: str, *, ends_with_done: bool = False) -> list[dict[str, Any]]:
    """The data of every event; asserts that each is named by its type, and that the stream ends as it must.

    Comments, which keep the connection alive, are passed over.
    """
    blocks = [block for block in text.split("\n\n") if not block.startswith(":")]
    assert blocks.pop() == ""
    if ends_with_done:
        assert blocks.pop() == "data: [DONE]"
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
