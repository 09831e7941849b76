"""The last requests that ended, so that somebody who asks too late still gets an answer."""

from collections import OrderedDict
from dataclasses import dataclass

MAX_ENDED = 64
"""As many as the scheduler remembers."""


@dataclass(frozen=True)
class EndedRequest:
    """How a request ended: when (seconds since the epoch), as the client was told, and what went wrong."""

    handle: int
    request_id: str
    time: float
    finish_reason: str
    error: str = ""


class EndedRequests:
    """The newest MAX_ENDED of them, by handle."""

    def __init__(self) -> None:
        self._ended: OrderedDict[int, EndedRequest] = OrderedDict()

    def add(self, ended: EndedRequest) -> None:
        """Remembers one; the oldest is forgotten where there are too many."""
        self._ended[ended.handle] = ended
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def get(self, handle: int) -> EndedRequest | None:
        """Returns how the request of this handle ended, None where it is not known."""
        return self._ended.get(handle)

    def by_name(self) -> dict[str, int]:
        """Request id to handle; of equal ids the newest."""
        return {ended.request_id: ended.handle for ended in self._ended.values()}
