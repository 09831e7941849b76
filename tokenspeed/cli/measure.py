"""How fast a running server is: prefill, first token, decode at several numbers of streams. Bounded in time."""

import asyncio
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from tokenspeed.cli.client import Client, StreamedAnswer

STREAMS = (1, 8, 32)
PREFILL_TOKENS = 1024
DECODE_PROMPT_TOKENS = 32
DECODE_TOKENS = 64
DECODE_TOKENS_MANY = 32
"""Each of more than 16 streams gets half as many, so that the phases take about as long."""
_REPEATS = 2


@dataclass(frozen=True)
class Prefill:
    """A prompt computed alone."""

    prompt_tokens: int
    first_token_ms: float
    tokens_per_s: float


@dataclass(frozen=True)
class Decode:
    """So many streams at once; figures over all of them, times as medians and 95th percentiles."""

    streams: int
    tokens_per_s: float
    tokens_per_s_each: float
    first_token_ms: float
    first_token_ms_p95: float
    between_tokens_ms: float


@dataclass
class Measurement:
    """What was measured; ``left_out`` names what the time did not suffice for."""

    model: str
    prefill: Prefill | None = None
    decode: list[Decode] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @property
    def results(self) -> dict[str, float | int | str]:
        """Flat, for the verified section of a recipe."""
        found: dict[str, float | int | str] = {}
        if self.prefill is not None:
            found["prefill_tokens_per_s"] = round(self.prefill.tokens_per_s, 1)
            found["first_token_ms"] = round(self.prefill.first_token_ms, 1)
        for row in self.decode:
            found[f"decode_tokens_per_s_{row.streams}"] = round(row.tokens_per_s, 1)
        return found

    @property
    def workload(self) -> str:
        """What was asked of the server, in words."""
        prompt = self.prefill.prompt_tokens if self.prefill else 0
        streams = ", ".join(str(row.streams) for row in self.decode)
        return f"prefill of {prompt} random tokens alone; decode of {DECODE_TOKENS} tokens at {streams} streams"


async def measure(client: Client, budget_s: float, streams: tuple[int, ...] = STREAMS) -> Measurement:
    """Measures for at most ``budget_s`` seconds; what it does not get to is left out by name. Raises ServerError."""
    began = time.monotonic()
    found = Measurement(client.model)
    try:
        async with asyncio.timeout(budget_s):
            await _decode(client, 1, DECODE_TOKENS)  # the first request of a server warms what comes after
            found.prefill = await _prefill(client)
            for count in streams:
                tokens = DECODE_TOKENS if count <= 16 else DECODE_TOKENS_MANY
                rows = [await _decode(client, count, tokens) for _ in range(_REPEATS if count == 1 else 1)]
                found.decode.append(max(rows, key=lambda row: row.tokens_per_s))
    except TimeoutError:
        measured = {row.streams for row in found.decode}
        found.left_out = [f"decode at {count} streams" for count in streams if count not in measured]
        if found.prefill is None:
            found.left_out.insert(0, "prefill")
    found.seconds = time.monotonic() - began
    return found


async def _prefill(client: Client) -> Prefill:
    tokens = max(1, min(PREFILL_TOKENS, client.max_len - 2))
    answers = [await _complete(client, tokens, 1) for _ in range(_REPEATS)]
    best = min(answer.first_token_s for answer in answers)
    return Prefill(answers[0].prompt_tokens, best * 1000, answers[0].prompt_tokens / best)


async def _decode(client: Client, streams: int, tokens: int) -> Decode:
    prompt = max(1, min(DECODE_PROMPT_TOKENS, client.max_len // 4))
    tokens = max(2, min(tokens, client.max_len - prompt))
    answers = await asyncio.gather(*(_complete(client, prompt, tokens) for _ in range(streams)))
    first = sorted(answer.first_token_s * 1000 for answer in answers)
    # A first token that is half a character shows with a later one; alone, a prompt's time is what one token takes.
    began = [answer.arrivals[0] for answer in answers]
    if streams == 1:
        alone = await _complete(client, prompt, 1)
        began = [min(began[0], answers[0].started + alone.ended - alone.started)]
    # From the first token of all to the last: prompts are left out where streams run together, waiting counts.
    span = max(answer.ended for answer in answers) - min(began)
    decoded = sum(answer.completion_tokens - 1 for answer in answers)
    between = [
        1000 * (answer.ended - start) / (answer.completion_tokens - 1)
        for answer, start in zip(answers, began, strict=True)
    ]
    return Decode(
        streams=streams,
        tokens_per_s=decoded / span,
        tokens_per_s_each=1000 / statistics.median(between),
        first_token_ms=statistics.median(first),
        first_token_ms_p95=first[min(len(first) - 1, round(0.95 * (len(first) - 1)))],
        between_tokens_ms=statistics.median(between),
    )


async def _complete(client: Client, prompt_tokens: int, tokens: int) -> StreamedAnswer:
    prompt = await client.prompt(prompt_tokens)
    return await client.stream(
        "/v1/completions", prompt=prompt, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, temperature=0
    )


def render_measurement(found: Measurement) -> list[str]:
    """A small table."""
    lines = [f"{found.model}, measured in {found.seconds:.1f} s"]
    if found.prefill is not None:
        prefill = found.prefill
        lines.append(
            f"  prefill  {prefill.tokens_per_s:>9,.1f} tokens/s  "
            f"({prefill.prompt_tokens} tokens, first token after {prefill.first_token_ms:,.0f} ms)"
        )
    if found.decode:
        lines.append("  streams  decode tok/s  each   first token ms (p95)  between tokens ms")
    lines += [
        f"  {row.streams:>7}  {row.tokens_per_s:>12,.1f}  {row.tokens_per_s_each:>5,.1f}  "
        f"{row.first_token_ms:>14,.0f} {f'({row.first_token_ms_p95:,.0f})':>6}  {row.between_tokens_ms:>17,.2f}"
        for row in found.decode
    ]
    if found.left_out:
        lines.append(f"  not measured, the time was up: {', '.join(found.left_out)}; give more with --seconds")
    return lines
