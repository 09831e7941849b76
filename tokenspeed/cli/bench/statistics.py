"""What many answers say together: percentiles, throughputs, goodput, the most at once, whether the client was late."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tokenspeed.cli.bench.answers import Answer
from tokenspeed.cli.bench.load import Outcome
from tokenspeed.cli.records import ServerError

METRICS = ("ttft", "tpot", "itl", "e2e")
"""Time to the first token, mean time a token after it, time between chunks, time to the last token."""

_LATE_MS = 10.0
_BUSY = 0.8


@dataclass(frozen=True)
class Figures:
    """A distribution of times in milliseconds; all 0 where there are none."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Figures":
        """Of times in seconds."""
        ordered = sorted(1000 * value for value in seconds)
        if not ordered:
            return cls()
        p50, p90, p95, p99 = (percentile(ordered, share) for share in (50, 90, 95, 99))
        return cls(len(ordered), sum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` per cent of the sorted values lie, between two neighbours where it falls there.

    The linear rule of numpy and of most benchmarks, so that figures compare. Raises ValueError without values.
    """
    if not ordered:
        raise ValueError("no values, no percentile")
    place = (len(ordered) - 1) * share / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class Goodput:
    """How many requests met every target. A request that failed met none.

    Attributes:
        targets: milliseconds by metric (ttft, tpot, e2e).
        share: of the requests that ended.
    """

    targets: Mapping[str, float]
    met: int
    share: float
    requests_per_s: float


@dataclass(frozen=True)
class Turn:
    """One turn of all sessions, from 0. ``cached`` is the share of the prompts; None where the server does not say."""

    turn: int
    requests: int
    prompt_tokens: float | None
    cached: float | None
    ttft_ms: Figures
    tpot_ms: Figures


@dataclass(frozen=True)
class Summary:
    """One load. Throughputs are of what was answered well, over the time from the first request to the last answer.

    ``short`` answers ended before they had the tokens that were asked for.
    """

    load: str
    concurrency: int | None
    rate: float | None
    seconds: float
    requests: int
    completed: int
    cut_off: int
    errors: Mapping[str, int]
    error_details: Mapping[str, str]
    requests_per_s: float
    input_tokens_per_s: float | None
    output_tokens_per_s: float
    tokens_per_s_per_user: float
    peak_concurrency: int
    input_tokens: int | None
    output_tokens: int
    short: int
    chunks: int
    cached_share: float | None
    ttft_ms: Figures
    tpot_ms: Figures
    itl_ms: Figures
    e2e_ms: Figures
    lateness_ms: Figures
    client_cpu: float
    goodput: Goodput | None = None
    turns: Sequence[Turn] = field(default_factory=tuple)

    @property
    def client_limited(self) -> str:
        """Why the client was the limit rather than the server; "" where it was not."""
        if self.client_cpu > _BUSY:
            return f"it took {self.client_cpu:.0%} of a core"
        late = self.lateness_ms.p99
        if self.rate is not None and late > max(_LATE_MS, self.ttft_ms.p50 / 20):
            return f"it sent 1 % of the requests {late:,.0f} ms late or more"
        return ""


def parse_targets(texts: Sequence[str]) -> dict[str, float]:
    """Targets out of "ttft:500,tpot:50"; raises ServerError."""
    targets: dict[str, float] = {}
    for item in " ".join(texts).replace(",", " ").split():
        name, _, limit = item.partition(":")
        try:
            value = float(limit)
        except ValueError:
            value = 0.0
        if name not in ("ttft", "tpot", "e2e") or not 0 < value < float("inf"):
            raise ServerError(f"--goodput {item}: milliseconds for ttft, tpot or e2e, as in ttft:500,tpot:50")
        targets[name] = value
    return targets


def summarize(
    outcome: Outcome,
    *,
    load: str,
    concurrency: int | None = None,
    rate: float | None = None,
    targets: Mapping[str, float] | None = None,
    client_cpu: float = 0.0,
    by_turn: bool = False,
) -> Summary:
    """Condenses what was seen. ``client_cpu`` is the client's share of one core meanwhile."""
    answers = outcome.answers
    good = [answer for answer in answers if answer.ok]
    bad = [answer for answer in answers if not answer.ok]
    began = min((answer.scheduled for answer in answers), default=outcome.began)
    ended = max((answer.ended for answer in answers), default=outcome.ended)
    seconds = max(ended - began, 1e-9)
    prompts = _sum_known([answer.prompt_tokens for answer in good])
    generated = sum(answer.tokens for answer in good)
    tpot = Figures.of(value for answer in good if (value := answer.each_token_s) is not None)
    return Summary(
        load=load,
        concurrency=concurrency,
        rate=rate,
        seconds=seconds,
        requests=len(answers),
        completed=len(good),
        cut_off=outcome.cut_off,
        errors=dict(Counter(answer.error for answer in bad)),
        error_details={answer.error: answer.detail for answer in reversed(bad)},
        requests_per_s=len(good) / seconds,
        input_tokens_per_s=None if prompts is None else prompts / seconds,
        output_tokens_per_s=generated / seconds,
        tokens_per_s_per_user=1000 / tpot.p50 if tpot.p50 else 0.0,
        peak_concurrency=peak_concurrency(answers),
        input_tokens=prompts,
        output_tokens=generated,
        short=sum(answer.completion_tokens is not None and answer.tokens < answer.asked for answer in good),
        chunks=sum(len(answer.arrivals) for answer in good),
        cached_share=_cached_share(good),
        ttft_ms=Figures.of(answer.first_token_s for answer in good),
        tpot_ms=tpot,
        itl_ms=Figures.of(gap for answer in good for gap in answer.gaps_s),
        e2e_ms=Figures.of(answer.whole_s for answer in good),
        lateness_ms=Figures.of(answer.sent - answer.scheduled for answer in answers),
        client_cpu=client_cpu,
        goodput=_goodput(answers, targets, seconds) if targets else None,
        turns=_turns(good) if by_turn else (),
    )


def peak_concurrency(answers: Sequence[Answer]) -> int:
    """The most requests that were open at one moment."""
    # At equal times one ends before the next begins.
    edges = sorted([(answer.ended, -1) for answer in answers] + [(answer.sent, 1) for answer in answers])
    peak = now = 0
    for _, step in edges:
        now += step
        peak = max(peak, now)
    return peak


def _goodput(answers: Sequence[Answer], targets: Mapping[str, float], seconds: float) -> Goodput:
    met = sum(answer.ok and _meets(answer, targets) for answer in answers)
    return Goodput(dict(targets), met, met / len(answers) if answers else 0.0, met / seconds)


def _meets(answer: Answer, targets: Mapping[str, float]) -> bool:
    # An answer of one token has no time between tokens to be too long.
    seconds = {"ttft": answer.first_token_s, "tpot": answer.each_token_s or 0.0, "e2e": answer.whole_s}
    return all(1000 * seconds[name] <= limit for name, limit in targets.items())


def _turns(good: Sequence[Answer]) -> tuple[Turn, ...]:
    found = []
    for turn in sorted({answer.turn for answer in good}):
        answers = [answer for answer in good if answer.turn == turn]
        prompts = _sum_known([answer.prompt_tokens for answer in answers])
        found.append(
            Turn(
                turn,
                len(answers),
                None if prompts is None else prompts / len(answers),
                _cached_share(answers),
                Figures.of(answer.first_token_s for answer in answers),
                Figures.of(value for answer in answers if (value := answer.each_token_s) is not None),
            )
        )
    return tuple(found)


def _cached_share(answers: Sequence[Answer]) -> float | None:
    """None where no answer tells. Servers that tell leave the field out of answers that had nothing from a cache."""
    cached = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    prompts = _sum_known([answer.prompt_tokens for answer in answers])
    return sum(cached) / prompts if cached and prompts else None


def _sum_known(counts: Sequence[int | None]) -> int | None:
    """The sum; None where some count is not known, or there is none."""
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None
