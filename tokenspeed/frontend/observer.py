"""Who hears what happens to requests."""

from typing import Protocol


class FrontendObserver(Protocol):
    """Hears what happens to requests, for metrics. All times are seconds."""

    def submitted(self, choices: int, prompt_tokens: int) -> None: ...

    def first_token(self, waited: float, cached_tokens: int) -> None: ...

    def tokens(self, count: int, since_last: float | None) -> None: ...

    def queued(self, seconds: float) -> None: ...

    def finished(self, reason: str, took: float, tokens: int) -> None: ...
