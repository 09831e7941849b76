"""One request: its figures, why it waits or what it holds, and its way through the states."""

import textwrap

from rich.text import Text

from tokenspeed_tui.controls import Controls, chosen_request
from tokenspeed_tui.detail import DetailView
from tokenspeed_tui.picture import Picture, Stay
from tokenspeed_tui.render import text as t
from tokenspeed_tui.render.panel import Panel
from tokenspeed_tui.render.requests import age_words, progress
from tokenspeed_tui.view import RequestView

LETTERS = {
    "Held": ("H", "muted"),
    "Bootstrapping": ("B", "muted"),
    "Submitted": ("S", "warn"),
    "Prefetching": ("F", "cached"),
    "Prefilling": ("P", "prefill"),
    "RemotePrefilling": ("R", "prefill"),
    "PrefillAwaitingResult": ("A", "prefill"),
    "PrefillDone": ("N", "prefill"),
    "Decoding": ("D", "decode"),
    "Retracted": ("X", "bad"),
    "Restoring": ("O", "cached"),
    "Finishing": ("G", "muted"),
    "Finished": ("E", "muted"),
}
"""What a state looks like in the bar of a life: a letter, and the name of a style."""
SPAN_WIDTH = 9


def detail_panel(picture: Picture, controls: Controls, width: int, rows: int) -> Panel:
    """Everything known about the selected request, alive or ended."""
    told = picture.detail if picture.detail is not None and picture.detail.handle == controls.selected else None
    request = told or chosen_request(picture, controls.selected)
    if request is None:
        absence = picture.detail_error or "It ended, or fell out of the table."
        lines = [t.line(part) for part in textwrap.wrap(absence, max(width, 1))]
        return Panel("Request", ["Esc goes back"], lines)
    lines = [_field(name, value, width) for name, value in _fields(request, told)]
    lines += _explanation(request, told, width)
    stays, until, omitted = _stays(picture, request, told)
    lines += _life(stays, until, width, max(2, rows - len(lines)), omitted=omitted, exact=told is not None)
    return Panel("Request", [f"#{t.count(request.handle)}", t.word(request.request_id), "Esc goes back"], lines)


def _field(name: str, value: str, width: int) -> Text:
    return t.cut(t.line((t.fitted(name, 11), t.MUTED_STYLE), value), width)


def _fields(request: RequestView, told: DetailView | None) -> list[tuple[str, str]]:
    limit = f" of {t.count(request.output_limit)} at most" if request.output_limit else ""
    host = f", {t.count(request.host_blocks)} in host memory" if request.host_blocks else ""
    fields = [
        ("state", f"{t.word(request.state)}, for {age_words(request)} ({t.count(request.age_rounds)} rounds)"),
        ("prompt", f"{t.count(request.prompt_tokens)} tokens, {t.count(request.cached_tokens)} from the prefix cache"),
        ("output", f"{t.count(request.generated_tokens)} tokens{limit}, {t.percent(progress(request))} done"),
        (
            "holds",
            f"{t.count(request.blocks)} blocks of the device{host}; {t.count(request.computed_tokens)} tokens computed",
        ),
        ("retracted", f"{t.counted(request.retractions, 'time')}; priority {t.count(request.priority)}"),
    ]
    return fields if told is None or told.time is None else _with_times(fields, told, told.time)


def _with_times(fields: list[tuple[str, str]], told: DetailView, now: float) -> list[tuple[str, str]]:
    """The fields with what only the server's own account has: arrival, deadline, and how it ended."""
    if told.ended is not None:
        because = f": {told.error}" if told.error else ""
        fields = [("ended", f"{t.word(told.finish_reason)}{because}"), *fields[1:]]
        return [*fields, ("lived", t.duration(told.ended - told.arrived))] if told.arrived else fields
    if told.arrived:
        fields = [*fields, ("arrived", f"{t.duration(now - told.arrived)} ago")]
    if told.deadline is not None:
        fields = [*fields, ("deadline", f"in {t.duration(max(0.0, told.deadline - now))}")]
    return fields


def _explanation(request: RequestView, told: DetailView | None, width: int) -> list[Text]:
    """Why it waits or what it holds, in the scheduler's words."""
    sentences = list(told.explain) if told is not None and told.explain else [request.reason or "nothing holds it up"]
    lines = [t.title("Why", width, "in the scheduler's words")]
    for sentence in sentences:
        wrapped = textwrap.wrap(sentence, max(width - 2, 1)) or [""]
        lines += [t.line(("• " if number == 0 else "  ", "accent"), part) for number, part in enumerate(wrapped)]
    return lines


def _stays(picture: Picture, request: RequestView, told: DetailView | None) -> tuple[list[Stay], float | None, int]:
    """The states with when each began, when the last one ended (or now), and how many came before.

    The server's own account where it gives one; else what this dashboard saw, which lacks what lies between two polls.
    """
    if told is not None and told.timeline:
        stays = [
            Stay(entry.state, entry.time)
            for entry in told.timeline
            if entry.state is not None and entry.time is not None
        ]
        return stays, told.ended if told.ended is not None else told.time, told.timeline_omitted or 0
    seen = picture.timelines.get(request.handle or 0, ())
    return list(seen), picture.snapshot.time if picture.snapshot is not None else None, 0


def _life(stays: list[Stay], until: float | None, width: int, rows: int, *, omitted: int, exact: bool) -> list[Text]:
    """A bar with a letter a state, in proportion, above the stays one by one, the newest last."""
    note = "as the scheduler had it" if exact else "as polls saw it: at least so long"
    lines = [t.title("Life", width, note)]
    spans = [
        (end if end is not None else stay.since) - stay.since
        for stay, end in zip(stays, [*(stay.since for stay in stays[1:]), until], strict=False)
    ]
    if stays:
        parts = [
            (*LETTERS.get(stay.state, ("?", "muted")), max(0, round(1000 * span)))
            for stay, span in zip(stays, spans, strict=True)
        ]
        lines.append(t.strip(parts, width))
    room = max(0, rows - len(lines))
    shown = list(zip(stays, spans, strict=True))
    hidden = omitted + max(0, len(shown) - room)
    if hidden:
        shown = shown[len(shown) - max(0, room - 1) :] if room > 1 else []
        lines.append(t.line((f"{hidden + max(0, min(1, room))} earlier", t.MUTED_STYLE)))
    whole = sum(spans) or 1.0
    for stay, span in shown:
        letter, style = LETTERS.get(stay.state, ("?", "muted"))
        bar = letter * round((width - 36) * span / whole) if width > 40 else ""
        lines.append(
            t.line(
                (f"{letter} ", style),
                t.fitted(stay.state, 22),
                t.fitted(t.duration(span), SPAN_WIDTH, right=True),
                (f" {bar}", style),
            )
        )
    return lines
