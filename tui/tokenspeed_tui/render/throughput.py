"""Throughput: tokens per second, prefix hits, how requests end, and where a step's time goes."""

from rich.text import Text

from tokenspeed_tui.picture import Picture
from tokenspeed_tui.rates import total_hit_rate
from tokenspeed_tui.render import text as t
from tokenspeed_tui.view import CounterView, SnapshotView, StepView

STEP_PARTS = (("P", "plan", "cyan"), ("D", "device", "green"), ("C", "commit", "yellow"), ("B", "bubble", "red"))


def render_throughput_compact(picture: Picture, width: int) -> list[Text]:
    """A title and two lines."""
    return [_title(picture, width), t.cut(_tokens_line(picture), width), t.cut(_step_line(picture, width), width)]


def render_throughput_tall(picture: Picture, width: int, rows: int) -> list[Text]:
    """A title and up to nine lines, the most telling first."""
    counters = picture.snapshot.counters if picture.snapshot is not None else CounterView()
    rates = picture.rates
    course = t.sparkline(picture.trace, max(0, width - 22))
    body = [
        t.line("prefill ", (t.rate(rates.prefill_tokens), t.TITLE_STYLE), " tok/s"),
        t.line("decode  ", (t.rate(rates.decode_tokens), t.TITLE_STYLE), " tok/s  ", (course or t.DASH, "green")),
        t.line(f"prefix hits {t.percent(rates.hit_rate)} now, {t.percent(total_hit_rate(counters))} since the start"),
        _step_figures(picture),
        _step_strip(picture, width),
        t.line(
            f"finished {t.rate(rates.finished)}/s ({t.count(counters.finished)})",
            f"  aborted {t.rate(rates.aborted)}/s ({t.count(counters.aborted)})",
        ),
        t.line(f"retractions {t.rate(rates.retractions)}/s ({t.count(counters.retractions)})"),
        t.line(f"steps {t.rate(rates.steps)}/s ({t.count(counters.steps)}), rounds {t.count(counters.rounds)}"),
        t.line(
            f"failed steps {t.count(counters.failed_steps)}  NaN rows {t.count(counters.nan_rows)}",
            f"  ignored results {t.count(counters.ignored_results)}",
        ),
    ]
    return [_title(picture, width), *(t.cut(part, width) for part in body)][:rows]


def _title(picture: Picture, width: int) -> Text:
    span = picture.rates.span_s
    return t.title("Rates", width, f"over the last {t.duration(span)}")


def _tokens_line(picture: Picture) -> Text:
    snapshot = picture.snapshot or SnapshotView()
    rates = picture.rates
    return t.line(
        "tok/s prefill ",
        (t.rate(rates.prefill_tokens), t.TITLE_STYLE),
        " decode ",
        (t.rate(rates.decode_tokens), t.TITLE_STYLE),
        f" · prefix hits {t.percent(rates.hit_rate)} (all {t.percent(total_hit_rate(snapshot.counters))})",
        f" · retractions {t.count(snapshot.counters.retractions)}",
    )


def _step_line(picture: Picture, width: int) -> Text:
    """The step time split in one line: figures, and a strip of at most 24 cells where it fits."""
    text = _step_figures(picture)
    cells = min(24, width - text.cell_len - 2)
    if cells < len(STEP_PARTS) or None in _step_values(picture):
        return text
    return text.append("  ").append_text(_step_strip(picture, cells))


def _step_figures(picture: Picture) -> Text:
    """Milliseconds of each part of a step."""
    text = t.line("step ms")
    for (_, name, style), value in zip(STEP_PARTS, _step_values(picture), strict=True):
        text.append(f" {name} ").append(t.milliseconds(value), style)
    return text


def _step_strip(picture: Picture, cells: int) -> Text:
    """A strip with the letters of the parts in proportion; a dash where one of them is unknown."""
    values = [value for value in _step_values(picture) if value is not None]
    if len(values) < len(STEP_PARTS):
        return t.line(t.DASH)
    parts = [
        # Shares are dealt in whole microseconds.
        (letter, style, max(0, round(1000 * value)))
        for (letter, _, style), value in zip(STEP_PARTS, values, strict=True)
    ]
    return t.strip(parts, cells)


def _step_values(picture: Picture) -> tuple[float | None, ...]:
    """The engine's means; unknown before its first step, when they stand at 0."""
    snapshot = picture.snapshot
    step = snapshot.step if snapshot is not None and snapshot.counters.steps != 0 else StepView()
    return step.plan_ms, step.device_ms, step.commit_ms, step.bubble_ms
