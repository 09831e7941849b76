"""Earlier responses, so that the next request need not repeat them: in memory, bounded, the oldest dropped first."""

from collections import OrderedDict
from dataclasses import dataclass

MOST_RESPONSES = 1024
MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """All as JSON.

    Attributes:
        response: as it was answered.
        input_items: of its own request.
        history: the whole conversation up to and with its output.
    """

    response: bytes
    input_items: bytes
    history: bytes

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.response) + len(self.input_items) + len(self.history)


class ResponseStore:
    """Keeps at most ``most`` responses of ``most_bytes`` together; what is larger alone is not kept."""

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """What is kept, in bytes."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keeps ``stored``, dropping as many of the oldest as that takes."""
        if stored.size > self._most_bytes:
            return
        self._kept[response_id] = stored
        self._bytes += stored.size
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.size

    def get(self, response_id: str) -> StoredResponse | None:
        return self._kept.get(response_id)

    def delete(self, response_id: str) -> bool:
        """Returns whether it was there."""
        dropped = self._kept.pop(response_id, None)
        self._bytes -= dropped.size if dropped else 0
        return dropped is not None
