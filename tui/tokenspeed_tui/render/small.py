"""The smallest screen: figures only, the most telling first, so that the first lines are worth reading at any size."""

from rich.text import Text

from tokenspeed_tui.controls import Controls
from tokenspeed_tui.picture import Picture
from tokenspeed_tui.render import text as t
from tokenspeed_tui.render.cache import flat_pool, shown_pools
from tokenspeed_tui.render.header import advice_of, notice_lines
from tokenspeed_tui.render.rates import step_figures
from tokenspeed_tui.render.requests import requests_panel
from tokenspeed_tui.view import SnapshotView

SHORT_STATES = (
    ("Submitted", "sub"),
    ("Prefetching", "fetch"),
    ("Prefilling", "pre"),
    ("Decoding", "dec"),
    ("Retracted", "retr"),
    ("Restoring", "rest"),
)
LEAST_TABLE_ROWS = 3


def render_small(picture: Picture, controls: Controls, now: float, width: int, height: int) -> list[Text]:
    """What is wrong, who runs and waits, how full, how fast, how old the data; requests where lines are left."""
    snapshot = picture.snapshot or SnapshotView()
    lines = notice_lines(picture, controls, width) or advice_of(picture, controls, now, width)
    lines.append(
        t.line(
            ("run ", t.MUTED_STYLE),
            (t.count(snapshot.running), "count"),
            (" wait ", t.MUTED_STYLE),
            (t.count(snapshot.waiting), "count"),
            ("  tok/s ", t.MUTED_STYLE),
            (t.rate(picture.rates.prefill_tokens), "prefill"),
            (" in ", t.MUTED_STYLE),
            (t.rate(picture.rates.decode_tokens), "decode"),
            (" out", t.MUTED_STYLE),
        )
    )
    lines.append(_states_line(snapshot))
    lines += [flat_pool(pool, width) for pool in shown_pools(picture, "")]
    lines.append(step_figures(picture, width))
    lines.append(_age_line(picture, controls, now))
    left = height - len(lines)
    if left >= LEAST_TABLE_ROWS:
        lines += requests_panel(picture, controls, width, left).body
    return [t.cut(part, width) for part in lines]


def _states_line(snapshot: SnapshotView) -> Text:
    text = t.line()
    for name, short in SHORT_STATES:
        number = snapshot.states.get(name)
        text.append(f"{short} ", t.MUTED_STYLE).append(f"{t.count(number)} ", "count" if number else t.MUTED_STYLE)
    return text


def _age_line(picture: Picture, controls: Controls, now: float) -> Text:
    age = picture.data_age(now)
    model = picture.server.model if picture.server is not None else None
    if age is None:
        return t.line(f"data {t.DASH}")
    stale = picture.is_stale(now, controls.interval)
    words = f"data STALE, {t.duration(age)} old" if stale else f"data {t.duration(age)} old"
    return t.line((words, t.BAD_STYLE if stale else ""), (f"  {t.word(model)}", t.MUTED_STYLE))
