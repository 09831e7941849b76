"""The timings of a request in its answer, where it asks for them: ``return_timings: true`` or X-Request-Timings: 1."""

from contextvars import ContextVar

import msgspec

from tokenspeed.frontend.generation import Generation

HEADER = "x-request-timings"

asked_by_header: ContextVar[bool] = ContextVar("asked_by_header", default=False)
"""Whether the running task's request asks in its header."""


class TimingsBody(msgspec.Struct, kw_only=True):
    """Seconds, from the moment the request was handed to the engine; null for what did not happen.

    Attributes:
        queue_s: it waited for its first step, by the engine's clock.
        inter_token_s: the mean between two tokens of a choice.
        prompt_tokens_per_s: prompt tokens that were not cached, from the first step to the first token.
    """

    queue_s: float | None
    time_to_first_token_s: float | None
    inter_token_s: float | None
    end_to_end_s: float | None
    prompt_tokens_per_s: float | None
    cached_tokens: int


def timings_of(generation: Generation, asked: bool | None) -> TimingsBody | msgspec.UnsetType:
    """Returns the timings of a call that has ended, UNSET where nobody asks."""
    if not (asked or asked_by_header.get()):
        return msgspec.UNSET
    timings, usage = generation.timings, generation.usage
    return TimingsBody(
        queue_s=_rounded(timings.queue_s),
        time_to_first_token_s=_rounded(timings.first_token_s),
        inter_token_s=_rounded(timings.inter_token_s),
        end_to_end_s=_rounded(timings.end_to_end_s),
        prompt_tokens_per_s=_rounded(timings.prompt_tokens_per_s(usage.prompt_tokens - usage.cached_tokens)),
        cached_tokens=usage.cached_tokens,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
