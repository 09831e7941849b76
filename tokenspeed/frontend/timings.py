"""What a call took, part by part."""


class Timings:
    """When things happened to one call. Times are seconds of one monotonic clock, None for what has not happened.

    Attributes:
        started_at: it was handed to the engine.
        queue_s: the engine's own account of how long it waited for its first step; of the choice that began first.
        first_token_at: its first token, of any choice.
        ended_at: the last choice ended.
        tokens: tokens of all choices.
    """

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.queue_s: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.tokens = 0
        self._gaps = 0
        self._between_s = 0.0

    def took(self, now: float, count: int, last_token_at: float, queue_s: float) -> None:
        """``count`` tokens of one choice came; its last one before came at ``last_token_at``, 0 where there was none.

        ``queue_s`` is negative where it is not told.
        """
        self.tokens += count
        if self.first_token_at is None:
            self.first_token_at = now
        if queue_s >= 0 and (self.queue_s is None or queue_s < self.queue_s):
            self.queue_s = queue_s
        if last_token_at:
            self._between_s += now - last_token_at
            self._gaps += count

    @property
    def first_token_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.started_at

    @property
    def inter_token_s(self) -> float | None:
        """The mean time between a choice's tokens, over all choices; None where none has two."""
        return self._between_s / self._gaps if self._gaps else None

    @property
    def end_to_end_s(self) -> float | None:
        return None if self.ended_at is None else self.ended_at - self.started_at

    def prompt_tokens_per_s(self, computed: int) -> float | None:
        """The rate of the ``computed`` prompt tokens (those not cached), from the first step to the first token."""
        if self.first_token_s is None or self.queue_s is None or self.first_token_s <= self.queue_s:
            return None
        return computed / (self.first_token_s - self.queue_s)
