"""The whole screen: which panels stand where, by size."""

from typing import Literal

from rich.text import Text

from tokenspeed_tui.controls import SORT_KEYS, Controls
from tokenspeed_tui.picture import Picture
from tokenspeed_tui.render import text as t
from tokenspeed_tui.render.blocks import blocks_rows, render_blocks, room_words
from tokenspeed_tui.render.configuration import last_scroll, render_configuration
from tokenspeed_tui.render.header import notice_lines, render_header
from tokenspeed_tui.render.requests import render_detail, render_requests
from tokenspeed_tui.render.states import render_states_compact, render_states_tall
from tokenspeed_tui.render.throughput import render_throughput_compact, render_throughput_tall
from tokenspeed_tui.view import SnapshotView

Size = Literal["tiny", "normal", "wide"]

GAP = 2
"""Columns between the two halves of the wide screen."""


def size_class(width: int, height: int) -> Size:
    """Below 76x18 there is room for numbers only; from 110x32 on the states and the rates stand side by side."""
    if width < 76 or height < 18:
        return "tiny"
    return "wide" if width >= 110 and height >= 32 else "normal"


def render_screen(picture: Picture, controls: Controls, now: float, width: int, height: int) -> list[Text]:
    """The screen as exactly ``height`` lines of ``width`` cells."""
    kind = size_class(width, height)
    if controls.shown == "help":
        lines = _help(picture, controls, now, width)
    elif kind == "tiny":
        lines = _tiny(picture, controls, now, width)
    elif controls.shown == "detail":
        lines = render_header(picture, controls, now, width)
        lines += render_detail(picture, controls, width, height - len(lines))
    elif controls.shown == "configuration":
        lines = render_header(picture, controls, now, width)
        lines += render_configuration(picture, controls, now, width, height - len(lines))
    else:
        lines = _main(picture, controls, now, width, height, kind)
    lines = lines[:height] + [Text("", end="")] * (height - len(lines))
    return [t.cut(part, width) for part in lines]


def scrolled(picture: Picture, controls: Controls, now: float, width: int, height: int, step: int) -> int:
    """The configuration's scroll after ``step`` lines more; stays at either end of what there is."""
    rows = height - len(render_header(picture, controls, now, width))
    return min(max(controls.scroll + step, 0), last_scroll(picture, rows))


def _main(picture: Picture, controls: Controls, now: float, width: int, height: int, kind: Size) -> list[Text]:
    lines = render_header(picture, controls, now, width)
    if kind == "wide":
        left_width = (width - GAP) // 2
        states = render_states_tall(picture, left_width)
        lines += _beside(states, _right(picture, width - GAP - left_width, len(states)), left_width)
    else:
        lines += render_states_compact(picture, width)
        lines += render_blocks(picture, width, blocks_rows(picture, most=4))
        lines += render_throughput_compact(picture, width)
    return lines + render_requests(picture, controls, width, height - len(lines))


def _right(picture: Picture, width: int, rows: int) -> list[Text]:
    """The right half of the wide screen: the KV cache above the rates."""
    blocks = render_blocks(picture, width, blocks_rows(picture, most=rows - 5))
    return blocks + render_throughput_tall(picture, width, rows - len(blocks))


def _beside(left: list[Text], right: list[Text], left_width: int) -> list[Text]:
    joined = []
    for position, part in enumerate(left):
        text = t.cut(part, left_width).append(" " * GAP)
        joined.append(text.append_text(right[position]) if position < len(right) else text)
    return joined


def _tiny(picture: Picture, controls: Controls, now: float, width: int) -> list[Text]:
    """Numbers only, the most telling first: whatever the size, the first lines are worth reading."""
    snapshot = picture.snapshot or SnapshotView()
    rates = picture.rates
    age = picture.data_age(now)
    stale = "STALE " if picture.is_stale(now, controls.interval) else ""
    lines = notice_lines(picture, controls, width)
    lines += [
        t.line(f"run {t.count(snapshot.running)} wait {t.count(snapshot.waiting)}"),
        t.line(f"tok/s {t.rate(rates.prefill_tokens)} in {t.rate(rates.decode_tokens)} out"),
    ]
    lines += [
        t.line(f"KV H {t.count(group.held)} C {t.count(group.cached)} · {t.count(group.free)}")
        for group in snapshot.groups
    ]
    lines.append(t.line(f"{stale}data {t.duration(age)} old" if age is not None else f"data {t.DASH}"))
    return [t.cut(part, width) for part in lines]


def _help(picture: Picture, controls: Controls, now: float, width: int) -> list[Text]:
    lines = render_header(picture, controls, now, width)
    lines.append(t.title("Keys", width, "Esc goes back"))
    lines += [t.line((t.fitted(key, 9), t.TITLE_STYLE), what) for key, what in controls.keys]
    lines.append(t.line(f"Sort keys: {', '.join(SORT_KEYS)}. Polling every {controls.interval:g} s."))
    lines.append(t.line(f"{t.DASH} is unknown or does not exist here; it never stands for 0."))
    lines.append(t.line("KV: H held, C cached, · free. Step: P plan, D device, C commit, B bubble."))
    lines.append(t.line(f"KV {', '.join(room_words(picture))}."))
    return [t.cut(part, width) for part in lines]
