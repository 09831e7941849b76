"""Rates, latencies and the split of a step, with their course over the chosen span of time."""

from collections.abc import Callable
from typing import NamedTuple

from rich.text import Text

from tokenspeed_tui.controls import Controls
from tokenspeed_tui.history import Counter, Course, Gauge, History
from tokenspeed_tui.picture import Picture
from tokenspeed_tui.render import text as t
from tokenspeed_tui.render.panel import Panel
from tokenspeed_tui.view import LatencyView, QuantileView, SnapshotView, StepView

STEP_PARTS = (("P", "plan"), ("D", "device"), ("C", "commit"), ("B", "bubble"))
COMPACT_ROWS = 5
"""Below so many lines the split of a step has one."""
MANY_MS = 9_995.0
NAME_WIDTH, FIGURE_WIDTH, TOP_WIDTH = 8, 14, 7


class Measure(NamedTuple):
    """One course: its name, the figure of now, a style, and how to read the history (window, cells)."""

    name: str
    figure: str
    style: str
    course: Callable[[float, int], Course]
    top: float | None = None


def rates_panel(picture: Picture, controls: Controls, width: int, rows: int) -> Panel:
    """One line a measure, the most telling first, and how a step's time splits."""
    chosen = measures(picture)
    step = step_lines(picture, width, 1 if rows < COMPACT_ROWS else 2)
    body = [_measure_line(measure, controls.window, width) for measure in chosen[: max(0, rows - len(step))]] + step
    return Panel("Rates", _notes(picture, controls), body[:rows], page="rates")


def rates_page(picture: Picture, controls: Controls, width: int, rows: int) -> Panel:
    """Every measure as tall as fits, the axis of time, the step's split and the totals."""
    tail = [*step_lines(picture, width, 2), *_total_lines(picture)]
    chosen = measures(picture)
    each = max(1, (rows - len(tail) - 1) // len(chosen))
    body: list[Text] = []
    for measure in chosen:
        body += _measure_chart(measure, controls.window, width, each)
    return Panel("Rates", _notes(picture, controls), [*body, _axis(controls.window, width), *tail], page="main")


def measures(picture: Picture) -> list[Measure]:
    """What is drawn, in the order of the screen."""
    snapshot = picture.snapshot or SnapshotView()
    latency = snapshot.latency or LatencyView()
    rates, history = picture.rates, picture.history
    use = history.points[-1].kv_use if history.points else None
    return [
        Measure("prefill", f"{t.rate(rates.prefill_tokens)} tok/s", "prefill", _rate(history, "prefill_tokens")),
        Measure("decode", f"{t.rate(rates.decode_tokens)} tok/s", "decode", _rate(history, "decode_tokens")),
        Measure("ttft", _quantiles(latency.ttft_ms), "prefill", _gauge(history, "ttft_p50")),
        Measure("token", _quantiles(latency.inter_token_ms), "decode", _gauge(history, "inter_token_p50")),
        Measure("running", t.count(snapshot.running), "accent", _gauge(history, "running")),
        Measure("waiting", t.count(snapshot.waiting), "warn", _gauge(history, "waiting")),
        Measure("KV held", t.percent(use), "held", _gauge(history, "kv_use"), top=1.0),
        Measure("hits", t.percent(rates.hit_rate), "cached", _share(history), top=1.0),
    ]


def _rate(history: History, counter: Counter) -> Callable[[float, int], Course]:
    return lambda window, cells: history.rate(counter, window, cells)


def _gauge(history: History, gauge: Gauge) -> Callable[[float, int], Course]:
    return lambda window, cells: history.gauge(gauge, window, cells)


def _share(history: History) -> Callable[[float, int], Course]:
    return lambda window, cells: history.share("hit_tokens", "queried_tokens", window, cells)


def _notes(picture: Picture, controls: Controls) -> list[str]:
    snapshot = picture.snapshot or SnapshotView()
    span = f"figures over {t.duration(picture.rates.span_s)}, bars over {t.duration(controls.window)}"
    notes = [span, f"acceptance {_acceptance(snapshot)}"]
    return notes if snapshot.acceptance is not None else notes[:1]


def _acceptance(snapshot: SnapshotView) -> str:
    """Tokens that a step accepts, beside what the recipe was measured with; a dash without speculation."""
    told = snapshot.acceptance
    if told is None or told.mean is None:
        return t.DASH
    golden = f" of {told.golden:.2f}" if told.golden is not None else ""
    return f"{told.mean:.2f}{golden}"


def _quantiles(measure: QuantileView | None) -> str:
    """The middle and the 99th percentile, in milliseconds; in seconds where they take many."""
    told = measure or QuantileView()
    if told.p50 is not None and told.p99 is not None and told.p99 >= MANY_MS:
        return f"{told.p50 / 1000:.1f}/{told.p99 / 1000:.1f} s"
    return f"{t.milliseconds(told.p50)}/{t.milliseconds(told.p99)} ms"


def _measure_line(measure: Measure, window: float, width: int) -> Text:
    text = t.line(
        (t.fitted(measure.name, NAME_WIDTH), t.MUTED_STYLE),
        (t.fitted(measure.figure, FIGURE_WIDTH, right=True), "title"),
    )
    cells = width - text.cell_len - 1 - TOP_WIDTH
    if cells < 4:
        return text
    course = measure.course(window, cells)
    if not any(value is not None for value in course):
        return text.append(f" {t.DASH}", t.MUTED_STYLE)
    top = measure.top or t.scale(course)
    return text.append(" ").append(t.sparkline(course, top), measure.style).append(_top(measure, top), t.RULE_STYLE)


def _measure_chart(measure: Measure, window: float, width: int, rows: int) -> list[Text]:
    """A measure over several lines: the figure beside the lowest one, the top of the axis beside the highest."""
    if rows == 1:
        return [_measure_line(measure, window, width)]
    cells = width - NAME_WIDTH - FIGURE_WIDTH - 1 - TOP_WIDTH
    course = measure.course(window, max(0, cells))
    top = measure.top or t.scale(course)
    lines = []
    for row in range(rows):
        low = top * (rows - 1 - row) / rows
        bars = "".join(_slice(value, low, top / rows, row == rows - 1) for value in course)
        last = row == rows - 1
        name = measure.name if last else ""
        figure = measure.figure if last else ""
        text = t.line(
            (t.fitted(name, NAME_WIDTH), t.MUTED_STYLE), (t.fitted(figure, FIGURE_WIDTH, right=True), "title"), " "
        )
        lines.append(text.append(bars, measure.style).append(_top(measure, top) if row == 0 else "", t.RULE_STYLE))
    return lines


def _slice(value: float | None, low: float, height: float, lowest: bool) -> str:
    """One cell of a tall bar."""
    if value is None:
        return " "
    if value <= low:
        return "·" if lowest else " "
    return "█" if value >= low + height else t.sparkline((value - low,), height)


def _top(measure: Measure, top: float) -> str:
    return f" ↑{t.percent(top) if measure.top else t.axis(top)}"


def _axis(window: float, width: int) -> Text:
    cells = width - NAME_WIDTH - FIGURE_WIDTH - 1 - TOP_WIDTH
    left = f"{t.duration(window)} ago "
    rule = "─" * max(0, cells - len(left) - 4)
    return t.line(" " * (NAME_WIDTH + FIGURE_WIDTH + 1), (f"{left}{rule} now", t.RULE_STYLE))


def step_lines(picture: Picture, width: int, rows: int) -> list[Text]:
    """The split of a step: figures and strip below each other, or behind each other in one line."""
    figures = step_figures(picture, width)
    if rows > 1:
        return [figures, step_strip(picture, width)]
    cells = width - figures.cell_len - 2
    if cells < len(STEP_PARTS) or None in _step_values(picture):
        return [figures]
    return [figures.append("  ").append_text(step_strip(picture, cells))]


def step_figures(picture: Picture, width: int) -> Text:
    """Milliseconds of each part of a step, with names where they fit."""
    text = t.line(("step ms", t.MUTED_STYLE))
    for (letter, name), value in zip(STEP_PARTS, _step_values(picture), strict=True):
        text.append(f" {letter} {name} ", t.MUTED_STYLE).append(t.milliseconds(value), name)
    if text.cell_len > width:
        text = t.line(("ms", t.MUTED_STYLE))
        for (letter, name), value in zip(STEP_PARTS, _step_values(picture), strict=True):
            text.append(f" {letter} ", t.MUTED_STYLE).append(t.milliseconds(value), name)
    return text


def step_strip(picture: Picture, cells: int) -> Text:
    """A strip with the letters of the parts in proportion; a dash where one of them is unknown."""
    values = [value for value in _step_values(picture) if value is not None]
    if len(values) < len(STEP_PARTS):
        return t.line(t.DASH)
    parts = [
        # Shares are dealt in whole microseconds.
        (letter, name, max(0, round(1000 * value)))
        for (letter, name), value in zip(STEP_PARTS, values, strict=True)
    ]
    return t.strip(parts, cells)


def _step_values(picture: Picture) -> tuple[float | None, ...]:
    """The engine's means; unknown before its first step, when they stand at 0."""
    snapshot = picture.snapshot
    step = snapshot.step if snapshot is not None and snapshot.counters.steps != 0 else StepView()
    return step.plan_ms, step.device_ms, step.commit_ms, step.bubble_ms


def _total_lines(picture: Picture) -> list[Text]:
    """How requests end, and what went wrong, since the start."""
    snapshot = picture.snapshot or SnapshotView()
    counters, rates = snapshot.counters, picture.rates
    latency = snapshot.latency or LatencyView()
    return [
        t.line(
            ("ends ", t.TITLE_STYLE),
            f"finished {t.rate(rates.finished)}/s ({t.count(counters.finished)})  aborted {t.rate(rates.aborted)}/s ",
            f"({t.count(counters.aborted)})  retracted {t.rate(rates.retractions)}/s ({t.count(counters.retractions)})",
        ),
        t.line(
            ("clients ", t.TITLE_STYLE),
            f"queue {_quantiles(latency.queue_ms)}  end to end {_quantiles(latency.end_to_end_ms)}  (50th/99th) of ",
            f"{t.count(latency.requests)} in the last minute",
        ),
        t.line(
            ("steps ", t.TITLE_STYLE),
            f"{t.rate(rates.steps)}/s ({t.count(counters.steps)})  failed {t.count(counters.failed_steps)}  NaN rows ",
            f"{t.count(counters.nan_rows)}  ignored results {t.count(counters.ignored_results)}",
        ),
        t.line(("acceptance ", t.TITLE_STYLE), f"{_acceptance(snapshot)} tokens a step of speculative decoding"),
    ]
