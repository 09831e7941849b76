"""The KV cache: per group a strip of cells (held, cached, free) with figures, and the room that is left."""

from rich.text import Text

from tokenspeed_tui.picture import Picture
from tokenspeed_tui.render import text as t
from tokenspeed_tui.view import GroupView

HELD, CACHED, FREE = "H", "C", "·"
HELD_STYLE, CACHED_STYLE, FREE_STYLE = "bold cyan", "yellow", "dim"


def render_blocks(picture: Picture, width: int, rows: int) -> list[Text]:
    """A title, and per group a line of figures above a strip; one line a group where two do not fit in ``rows``."""
    groups = picture.snapshot.groups if picture.snapshot is not None else ()
    lines = [t.title("KV blocks", width, *room_words(picture))]
    body: list[Text] = []
    shown = groups or (GroupView(),)
    one_line = 2 * len(shown) > rows - 1
    for group in shown:
        body += [_group_line(group, width)] if one_line else _group_lines(group, width)
    if len(body) > rows - 1:
        hidden = len(body) - max(rows - 2, 0)
        body = body[: max(rows - 2, 0)]
        body.append(t.line(f"{t.ELLIPSIS} {hidden} more groups"))
    return lines + [t.cut(part, width) for part in body]


def blocks_rows(picture: Picture, most: int) -> int:
    """The rows that render_blocks wants, at least title and one group, at most ``most``."""
    groups = picture.snapshot.groups if picture.snapshot is not None else ()
    return min(1 + 2 * max(1, len(groups)), most)


def room_words(picture: Picture) -> list[str]:
    """The head-room estimate in words, the most telling first."""
    room = picture.room
    if room.tokens is None:
        return [f"room {t.DASH}"]
    words = [f"room {t.count(room.tokens)} tokens"]
    if room.requests is not None:
        words.append(f"{t.count(room.requests)} more of mean {t.count(room.typical_tokens)}")
    if room.largest is not None:
        words.append(f"largest {t.count(room.largest)}")
    return words


def _group_lines(group: GroupView, width: int) -> list[Text]:
    figures = t.line(
        f"{t.word(group.group_id)} ",
        (f"{HELD} held {t.count(group.held)}", HELD_STYLE),
        "  ",
        (f"{CACHED} cached {t.count(group.cached)}", CACHED_STYLE),
        f"  {FREE} free {t.count(group.free)}  of {t.count(group.total)}",
        f"  pinned {t.count(group.pinned)}",
    )
    geometry = f"  {t.count(group.block_granularity)} tokens, {t.size(group.bytes_per_block)} each"
    if figures.cell_len + len(geometry) <= width:
        figures.append(geometry, "dim")
    return [figures, _cells(group, width)]


def _group_line(group: GroupView, width: int) -> Text:
    name = t.fitted(t.word(group.group_id), 12)
    figures = f" {HELD} {t.count(group.held)} {CACHED} {t.count(group.cached)} {FREE} {t.count(group.free)}"
    cells = max(0, width - len(name) - 1 - len(figures))
    return t.line(f"{name} ").append_text(_cells(group, cells)).append(figures)


def _cells(group: GroupView, width: int) -> Text:
    """The strip; a dash where one of its three figures is unknown."""
    if group.held is None or group.cached is None or group.free is None:
        return t.line(t.fitted(t.DASH, width))
    return t.strip(
        [
            (HELD, HELD_STYLE, max(0, group.held)),
            (CACHED, CACHED_STYLE, max(0, group.cached)),
            (FREE, FREE_STYLE, max(0, group.free)),
        ],
        width,
    )
