"""Reads server-sent events in tests."""

import json
from typing import Any


def events_of(text: str) -> list[Any]:
    """The JSON of every event; asserts that the stream is well formed and ends with [DONE]."""
    blocks = text.split("\n\n")
    assert blocks[-1] == "" and all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    data = [block.removeprefix("data: ") for block in blocks[:-1]]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def text_of_chunks(chunks: list[Any], index: int = 0) -> str:
    """The joined text of one choice, of either kind of completion."""
    pieces = []
    for chunk in chunks:
        for choice in chunk.get("choices", []):
            if choice["index"] == index:
                pieces.append(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
    return "".join(pieces)
