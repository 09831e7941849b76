"""The fleet: one row a server."""

from typing import NamedTuple

from rich.text import Text

from tokenspeed_tui.controls import Controls
from tokenspeed_tui.picture import Picture
from tokenspeed_tui.render import text as t
from tokenspeed_tui.render.panel import Panel, draw
from tokenspeed_tui.view import GroupView


class Member(NamedTuple):
    """One server of the fleet: what is known of it, and where it runs, in words; "" where that is not known."""

    picture: Picture
    where: str


class Column(NamedTuple):
    """A column of the table; figures stand at its right edge."""

    name: str
    width: int
    figure: bool


MARK = 2

COLUMNS = (
    Column("model", 18, False),
    Column("state", 8, False),
    Column("run", 5, True),
    Column("wait", 5, True),
    Column("KV", 5, True),
    Column("in/s", 6, True),
    Column("out/s", 6, True),
    Column("age", 7, True),
)
"""The address takes the rest."""

WIDTHS = {"in/s": 96, "age": 96, "model": 64, "KV": 64, "out/s": 64}
"""Columns that a narrower screen leaves out, for the address to have room."""


def columns_of(width: int) -> list[Column]:
    """The columns that are shown at a width."""
    return [column for column in COLUMNS if width >= WIDTHS.get(column.name, 0)]


def render_fleet(
    members: list[Member], selected: str | None, controls: Controls, now: float, width: int, height: int
) -> list[Text]:
    """The fleet as exactly ``height`` lines of ``width`` cells; ``selected`` is the address of a member."""
    frame = width >= 60 and height >= 10
    notes = [_summary(members), "Enter opens one, Esc comes back"]
    columns = width - 4 if frame else width
    rows = [_row(member, member.picture.url == selected, controls, now, columns) for member in members]
    if not members:
        words = ("no server runs here: ", ("make run", "key"), " starts one, ", ("--url", "key"), " names others")
        rows.append(t.line(*words))
    position = next((index for index, member in enumerate(members) if member.picture.url == selected), 0)
    room = height - (2 if frame else 1) - 1
    first = max(0, position - room + 1)
    return draw(Panel("Servers", notes, [_heading(columns), *rows[first:]]), width, height, frame=frame)


def state_word(picture: Picture, controls: Controls, now: float) -> tuple[str, str]:
    """How a server is, in a word, with the style of that: what an operator would look at first."""
    if picture.polls == 0:
        return "asking", t.MUTED_STYLE
    if picture.error:
        return "away", t.BAD_STYLE
    server = picture.server
    if server is None:
        return t.DASH, ""
    if server.error or server.phase in ("failed", "lost"):
        return "failed", t.BAD_STYLE
    if server.phase is not None and server.phase != "ready":
        return server.phase, t.WARN_STYLE
    if picture.is_stale(now, controls.interval):
        return "stale", t.BAD_STYLE
    snapshot = picture.snapshot
    if snapshot is not None and snapshot.paused:
        return "paused", t.WARN_STYLE
    if snapshot is not None and snapshot.has_work and picture.progress.passed is False:
        return "stuck", t.BAD_STYLE
    return "ready", t.GOOD_STYLE


def cache_use(picture: Picture) -> float | None:
    """The share of the fullest group's blocks that requests hold; None where it is not known."""
    groups = picture.snapshot.groups if picture.snapshot is not None else ()
    return max((share for share in map(_share, groups) if share is not None), default=None)


def _share(group: GroupView) -> float | None:
    if group.held is None or not group.total:
        return None
    return (group.held + (group.elsewhere or 0)) / group.total


def _summary(members: list[Member]) -> str:
    running = sum(_or_zero(member, "running") for member in members)
    waiting = sum(_or_zero(member, "waiting") for member in members)
    return f"{len(members)}: {t.count(running)} running, {t.count(waiting)} waiting"


def _or_zero(member: Member, name: str) -> int:
    """A count of a server that answers; the ones of others are not known, and not counted."""
    if member.picture.error or member.picture.snapshot is None:
        return 0
    return getattr(member.picture.snapshot, name) or 0


def _heading(width: int) -> Text:
    cells = [t.fitted(column.name, column.width, right=column.figure) for column in columns_of(width)]
    return t.cut(t.line((" " * MARK + " ".join([*cells, "server"]), t.MUTED_STYLE)), width)


def _row(member: Member, selected: bool, controls: Controls, now: float, width: int) -> Text:
    picture = member.picture
    word, style = state_word(picture, controls, now)
    values = {"model": _model(picture), "state": word, **_figures(picture), "age": _age(picture, now)}
    line = t.line(("> " if selected else "  ", "accent"))
    for column in columns_of(width):
        cell = t.fitted(values[column.name], column.width, right=column.figure)
        line.append(cell, style if column.name == "state" else ("title" if column.name == "model" else ""))
        line.append(" ")
    line.append(picture.url.removeprefix("http://"), t.MUTED_STYLE)
    line.append(f"  {member.where}" if member.where else "", t.MUTED_STYLE)
    if picture.error:
        line.append(f"  {picture.error.removeprefix(f'no server answers at {picture.url} ').strip('()')}", t.BAD_STYLE)
    line = t.cut(line, width)
    if selected:
        line.stylize("selected")
    return t.clickable(line, server=picture.url)


def _model(picture: Picture) -> str:
    return t.word(picture.server.model) if picture.server is not None else t.DASH


def _age(picture: Picture, now: float) -> str:
    return t.duration(picture.data_age(now))


def _figures(picture: Picture) -> dict[str, str]:
    """What is only known of a server that answers: the last figures of one that went away are no figures of now."""
    snapshot = picture.snapshot
    if snapshot is None or picture.error:
        return dict.fromkeys(("run", "wait", "KV", "in/s", "out/s"), t.DASH)
    return {
        "run": t.count(snapshot.running),
        "wait": t.count(snapshot.waiting),
        "KV": t.percent(cache_use(picture)),
        "in/s": t.rate(picture.rates.prefill_tokens),
        "out/s": t.rate(picture.rates.decode_tokens),
    }
