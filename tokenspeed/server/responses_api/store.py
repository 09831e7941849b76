"""Earlier responses, so that the next request need not repeat them: in memory, bounded, the oldest dropped first."""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """What became of one request; bytes are JSON.

    Attributes:
        response: as it was answered.
        input_items: of its own request.
        history: the whole conversation up to and with its output.
        owner: the name of the API key that asked for it; for nobody else it is there.
    """

    response: bytes
    input_items: bytes
    history: bytes
    owner: str

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.response) + len(self.input_items) + len(self.history)


class ResponseStore:
    """Keeps at most ``most`` responses of ``most_bytes`` together, of all owners; what is larger alone is not kept."""

    def __init__(self, most: int, most_bytes: int) -> None:
        """Either bound may be 0: then nothing is kept."""
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    @property
    def is_on(self) -> bool:
        """Whether it keeps anything."""
        return bool(self._most and self._most_bytes)

    @property
    def bytes(self) -> int:
        """What is kept, in bytes."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keeps ``stored``, dropping as many of the oldest as that takes."""
        if not self.is_on or stored.size > self._most_bytes:
            return
        self._kept[response_id] = stored
        self._bytes += stored.size
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.size

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        """Returns a response of this owner, None where there is none."""
        stored = self._kept.get(response_id)
        return stored if stored is not None and stored.owner == owner else None

    def delete(self, response_id: str, owner: str) -> bool:
        """Returns whether this owner had it."""
        if self.get(response_id, owner) is None:
            return False
        self._bytes -= self._kept.pop(response_id).size
        return True
