"""What a screen shows of the plain twin: its requests by interest, what could be admitted, one request's life."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tokenspeed_scheduler import State
from tokenspeed_scheduler.reference_reports import ReferenceRow, Request, Visit

MAX_VISITS = 128
MAX_ENDED = 64
TYPICAL_TOKENS = 32768

_PREFILLS = (State.PREFILLING,)
_DECODES = (State.PREFILL_DONE, State.DECODING)


@dataclass(frozen=True)
class ReferenceMaps:
    """See PoolMaps; the twin draws none."""

    device: list[str]
    host: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ReferenceHeadroom:
    """See Headroom."""

    tokens: int
    largest: int
    requests: int
    typical_tokens: int


@dataclass(frozen=True)
class ReferenceDescription:
    """See Description."""

    alive: bool
    row: ReferenceRow
    visits: list[Visit]
    visits_omitted: int
    lines: list[str]


def interest(request: Request) -> tuple[int, int, int]:
    """Where a request stands among the rows: the smallest is first."""
    if request.state in _PREFILLS:
        return (1, 0, request.place)
    if request.state in _DECODES:
        return (2, -sum(len(table.held()) for table in request.tables), request.place)
    return (3 if request.ended else 0, request.since, request.place)


def measured_headroom(
    fits: Callable[[int, int], bool], *, rows: int, bound: int, tokens: int, live: Iterable[int], typical: int
) -> ReferenceHeadroom:
    """What fits by ``fits(tokens, copies)``.

    Args:
        rows: free ones of the request pool. bound: tokens of the largest request there can be.
        tokens: that the free blocks hold. live: the length of each live request. typical: 0 for their mean.
    """
    lengths = list(live)
    mean = -(-sum(lengths) // len(lengths)) if lengths else TYPICAL_TOKENS
    size = min(max(typical or mean, min(2, bound)), bound)
    largest = _largest(lambda length: fits(length, 1), bound) if rows else 0
    return ReferenceHeadroom(
        tokens=tokens,
        largest=largest if largest > 1 else 0,
        requests=_largest(lambda copies: fits(size, copies), rows),
        typical_tokens=size,
    )


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, where all below it do; 0 for none."""
    fit, above = 0, most + 1
    while above - fit > 1:
        middle = (fit + above) // 2
        fit, above = (middle, above) if fits(middle) else (fit, middle)
    return fit
