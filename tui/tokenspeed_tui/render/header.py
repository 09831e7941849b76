"""The header: who is looked at, how it is, and how old the knowledge is."""

import textwrap

from rich.text import Text

from tokenspeed_tui.controls import PAGES, Controls
from tokenspeed_tui.observation import Probe
from tokenspeed_tui.picture import Picture
from tokenspeed_tui.render import text as t
from tokenspeed_tui.render.advice import advise
from tokenspeed_tui.render.events import advice_lines
from tokenspeed_tui.view import ServerView

START_HINT = "start one with `make run` or `tokenspeed run`, or name another with --url"
MOST_NOTICE_LINES = 3
MOST_ADVICE_LINES = 2


def render_header(picture: Picture, controls: Controls, now: float, width: int) -> list[Text]:
    """Two lines, then what matters most now: something about the server itself, or else the advisor's worst findings.

    That has two lines also where it says less: what stands below is not to jump.
    """
    lines = [_with_tabs(identity_line(picture), controls, width), probes_line(picture, controls, now)]
    said = notice_lines(picture, controls, width) or advice_of(picture, controls, now, width)
    lines += said + [t.line("")] * (MOST_ADVICE_LINES - len(said))
    return [t.cut(part, width) for part in lines]


def advice_of(picture: Picture, controls: Controls, now: float, width: int) -> list[Text]:
    """The advisor in at most two lines; nothing where nothing is known, and no all-clear from old data."""
    advice = advise(picture, now)
    if picture.snapshot is None or (not advice and picture.is_stale(now, controls.interval)):
        return []
    return advice_lines(advice, width, MOST_ADVICE_LINES)


def _with_tabs(text: Text, controls: Controls, width: int) -> Text:
    """The pages by their keys at the right end, the one on the screen marked, where they fit."""
    tabs = t.line()
    for key, page in PAGES.items():
        style = "selected" if page == controls.shown else t.MUTED_STYLE
        tabs.append_text(t.clickable(t.line((f" {key} {page} ", style)), page=page))
    gap = width - text.cell_len - tabs.cell_len
    return text.append(" " * gap).append_text(tabs) if gap > 0 else text


def identity_line(picture: Picture) -> Text:
    """Model, recipe and its hash, vendor and devices, uptime."""
    server = picture.server or ServerView()
    snapshot = server.snapshot
    recipe = t.word(server.recipe)
    if server.recipe and server.profile:
        recipe += f"/{server.profile}"
    return t.line(
        ("TokenSpeed ", t.TITLE_STYLE),
        (t.word(server.model), t.TITLE_STYLE),
        f" · {recipe} #{t.word(server.recipe_hash)}",
        f" · {t.word(server.vendor or server.device)} × {t.count(server.devices)}",
        f" · up {t.duration(snapshot.uptime_s if snapshot else None)}",
    )


def probes_line(picture: Picture, controls: Controls, now: float) -> Text:
    """The three probes, the age of the data, engines lost, the URL."""
    parts: list[str | tuple[str, str]] = []
    for name, probe in (("live", picture.live), ("ready", picture.ready), ("progress", picture.progress)):
        parts += [f"{name} ", _probe_word(probe), " · "]
    parts.append(_age_words(picture, controls, now))
    lost = picture.server.lost if picture.server is not None else None
    if lost:
        parts += [" · ", (f"{t.count(lost)} engine{'s' if lost > 1 else ''} lost", t.WARN_STYLE)]
    if controls.paused:
        parts += [" · ", ("PAUSED", t.WARN_STYLE)]
    if picture.snapshot is not None and picture.snapshot.paused:
        parts += [" · ", ("ENGINE PAUSED", t.WARN_STYLE)]
    if controls.replaying:
        parts += [" · ", ("REPLAY ENDED" if controls.ended else "REPLAY", t.WARN_STYLE)]
    parts += [" · ", picture.url]
    return t.line(*parts)


def _probe_word(probe: Probe) -> tuple[str, str]:
    if probe.passed is None:
        return t.DASH, ""
    return ("ok", t.GOOD_STYLE) if probe.passed else (f"NO ({probe.status})", t.BAD_STYLE)


def _age_words(picture: Picture, controls: Controls, now: float) -> str | tuple[str, str]:
    age = picture.data_age(now)
    if age is None:
        return f"data {t.DASH}"
    if picture.is_stale(now, controls.interval):
        return f"data STALE, {t.duration(age)} old", t.BAD_STYLE
    return f"data {t.duration(age)} old"


def notice_lines(picture: Picture, controls: Controls, width: int) -> list[Text]:
    """The notice, if there is one, in at most MOST_NOTICE_LINES lines."""
    said = _notice(picture, controls)
    if said is None:
        return []
    words, style = said
    wrapped = textwrap.wrap(words, max(width, 1), max_lines=MOST_NOTICE_LINES, placeholder=f" {t.ELLIPSIS}")
    return [t.line((part, style)) for part in wrapped]


def _notice(picture: Picture, controls: Controls) -> tuple[str, str] | None:
    """What matters most now, with its style: nothing known yet, a server away, a phase, a failure."""
    server = picture.server
    if picture.polls == 0:
        return f"asking {picture.url} …", ""
    if picture.error:
        again = "" if controls.replaying else f"; trying again every {controls.interval:g} s"
        return f"{picture.error}{again}; {START_HINT}", t.BAD_STYLE
    if server is None:
        return None
    if server.error:
        return f"{t.word(server.phase)}: {server.error}", t.BAD_STYLE
    if server.phase is not None and server.phase != "ready":
        return f"{server.phase}{_progress(picture)}: {server.detail}" if server.detail else server.phase, t.WARN_STYLE
    return None


def _progress(picture: Picture) -> str:
    """How far the phase is, where the server tells it."""
    phase = picture.server.progress if picture.server is not None else None
    if phase is None or phase.done is None or not phase.total:
        return ""
    return f" {phase.done} of {phase.total}"
