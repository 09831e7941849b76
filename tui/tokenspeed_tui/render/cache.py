"""The KV cache: per group and tier a strip of cells with figures, and the room that is left."""

from collections import Counter
from typing import NamedTuple

from rich.text import Text

from tokenspeed_tui.controls import Controls
from tokenspeed_tui.picture import Picture
from tokenspeed_tui.rates import total_hit_rate
from tokenspeed_tui.render import text as t
from tokenspeed_tui.render.panel import Panel
from tokenspeed_tui.view import CounterView, GroupView, StorageView

HELD, CACHED, PINNED, FREE, ELSEWHERE = "█", "▒", "◆", "·", " "
GLYPHS = {
    "h": (HELD, "held"),
    "c": (CACHED, "cached"),
    "p": (PINNED, "pinned"),
    ".": (FREE, "free"),
    "-": (ELSEWHERE, "elsewhere"),
}
"""What a letter of a block map looks like: a glyph, and the name of a style."""
LEGEND = (
    f"{HELD} held by requests, {CACHED} cached (can be evicted), {PINNED} pinned (a copy is under way), {FREE} free"
)
COMPACT_ROWS = 5
"""Up to so many lines the room stands beside the panel's name."""
TIERS = ("device", "host", "disk")
MOST_MAP_ROWS = 4


class Pool(NamedTuple):
    """One strip: a group in one tier."""

    tier: str
    group: GroupView


def cache_panel(picture: Picture, controls: Controls, width: int, rows: int) -> Panel:
    """The room in words (beside the name where there are few lines), then the strips, in at most ``rows`` lines."""
    pools = shown_pools(picture, controls.group)
    storage = picture.snapshot.storage if picture.snapshot is not None else None
    roomy = rows > COMPACT_ROWS
    body = [room_line(picture, width)] if roomy else []
    left = rows - len(body) - (1 if storage is not None else 0)
    each = left // len(pools)
    for pool in pools:
        body += _tall_pool(pool, width, min(each - 1, MOST_MAP_ROWS)) if each >= 2 else [flat_pool(pool, width)]
    if storage is not None:
        body.append(_storage_line(storage, width))
    if len(body) > rows:
        hidden = len(body) - max(rows - 1, 0)
        body = [*body[: max(rows - 1, 0)], t.line((f"{t.ELLIPSIS} {hidden} more: 3 shows all, g one", t.MUTED_STYLE))]
    notes = _notes(picture, controls)
    return Panel("KV cache", notes if roomy else [room_words(picture), *notes], body, page="cache")


def cache_rows(picture: Picture, controls: Controls, most: int) -> int:
    """The lines that cache_panel wants below its name in one column: two for one strip, one each for more."""
    storage = picture.snapshot.storage if picture.snapshot is not None else None
    pools = len(shown_pools(picture, controls.group))
    return min(max(2, pools) + (1 if storage is not None else 0), most)


def cache_page(picture: Picture, controls: Controls, width: int, rows: int) -> Panel:
    """All strips with their maps over several lines, prefix hits by tier, and what was evicted."""
    pools = shown_pools(picture, controls.group)
    body = [room_line(picture, width), t.line((LEGEND, t.MUTED_STYLE))]
    tail = _tier_lines(picture, width)
    map_rows = max(1, min(MOST_MAP_ROWS, (rows - len(body) - len(tail)) // max(1, len(pools)) - 2))
    for pool in pools:
        body += [*_tall_pool(pool, width, map_rows), t.line("")]
    storage = picture.snapshot.storage if picture.snapshot is not None else None
    if storage is not None:
        body += [_storage_line(storage, width), t.line("")]
    return Panel("KV cache", _notes(picture, controls), body + tail, page="main")


def shown_pools(picture: Picture, group: str) -> list[Pool]:
    """The strips: each group on the device and, where there is one, in host memory; one unknown group without any."""
    snapshot = picture.snapshot
    pools = [Pool("device", item) for item in (snapshot.groups if snapshot is not None else ())]
    pools += [Pool("host", item) for item in ((snapshot.host or ()) if snapshot is not None else ())]
    chosen = [pool for pool in pools if pool.group.group_id == group] if group else []
    return chosen or pools or [Pool("device", GroupView())]


def room_words(picture: Picture) -> str:
    """The head-room in one sentence."""
    room = picture.room
    if room.tokens is None:
        return f"room {t.DASH}"
    words = f"room for {t.count(room.tokens)} tokens"
    if room.requests is not None:
        words = f"room for {t.count(room.requests)} more of {t.count(room.typical_tokens)} tokens"
    return f"{words}, largest {t.count(room.largest)}" if room.largest is not None else words


def room_line(picture: Picture, width: int) -> Text:
    """The head-room, loud where nothing fits any more."""
    room = picture.room
    style = t.BAD_STYLE if room.requests == 0 or room.largest == 0 else "accent"
    return t.cut(t.line((room_words(picture), style if room.tokens is not None else t.MUTED_STYLE)), width)


def resampled(cells: str, width: int) -> str:
    """A map in ``width`` cells: each shows what most of its run is; of two equally many the more telling."""
    if not cells or width <= 0:
        return ""
    order = "phc.-"
    shown = []
    for position in range(width):
        first = position * len(cells) // width
        run = cells[first : max(first + 1, (position + 1) * len(cells) // width)]
        counts = Counter(run)
        shown.append(max(counts, key=lambda letter: (counts[letter], -order.find(letter))))
    return "".join(shown)


def cell_map(cells: str) -> Text:
    """A map as glyphs; neighbours that are alike are one part."""
    text = t.line()
    start = 0
    for position in range(1, len(cells) + 1):
        if position == len(cells) or cells[position] != cells[start]:
            glyph, style = GLYPHS.get(cells[start], ("?", t.MUTED_STYLE))
            text.append(glyph * (position - start), style)
            start = position
    return text


def _notes(picture: Picture, controls: Controls) -> list[str]:
    counters = picture.snapshot.counters if picture.snapshot is not None else CounterView()
    notes = [f"group {controls.group}"] if controls.group else []
    return [*notes, f"prefix hits {t.percent(picture.rates.hit_rate)} (all {t.percent(total_hit_rate(counters))})"]


def _tall_pool(pool: Pool, width: int, map_rows: int) -> list[Text]:
    """A line of figures above the cells."""
    group = pool.group
    words = _figures(pool, ("held ", "cached ", "free "), "  ")
    if words.cell_len > width:
        words = _figures(pool, ("", "", ""), " ")
    geometry = f"  {t.count(group.block_granularity)} tokens, {t.size(group.bytes_per_block)} each"
    if words.cell_len + len(geometry) <= width:
        words.append(geometry, t.MUTED_STYLE)
    return [words, *_cells(group, width, map_rows)]


def _figures(pool: Pool, names: tuple[str, str, str], gap: str) -> Text:
    group = pool.group
    held, cached, free = names
    text = t.line(
        (f"{t.word(group.group_id)} ", t.TITLE_STYLE),
        (f"{pool.tier}{gap}", t.MUTED_STYLE),
        (f"{HELD} {held}{t.count(group.held)}", "held"),
        f" {_share(group)}{gap}",
        (f"{CACHED} {cached}{t.count(group.cached)}", "cached"),
        (f"{gap}{FREE} {free}{t.count(group.free)}", "free"),
        f" of {t.count(group.total)}{gap}",
        (f"{PINNED} {t.count(group.pinned)}", "pinned"),
    )
    return text.append(f"{gap}elsewhere {t.count(group.elsewhere)}", "elsewhere") if group.elsewhere else text


def flat_pool(pool: Pool, width: int) -> Text:
    """Name, cells and figures in one line."""
    group = pool.group
    name = t.fitted(f"{t.word(group.group_id)} {pool.tier}", 14)
    figures = f" {HELD}{t.count(group.held)} {CACHED}{t.count(group.cached)} {FREE}{t.count(group.free)}"
    (cells,) = _cells(group, max(0, width - len(name) - 1 - len(figures)), 1)
    return t.line(f"{name} ").append_text(cells).append(figures)


def _cells(group: GroupView, width: int, rows: int) -> list[Text]:
    """The map in ``rows`` lines where the engine tells one, else the figures in proportion; a dash for neither."""
    if group.map:
        total = min(width * rows, max(width, len(group.map)))
        cells = resampled(group.map, total)
        return [cell_map(cells[start : start + width]) for start in range(0, total, width)] if width else [t.line("")]
    if group.held is None or group.cached is None or group.free is None:
        return [t.line(t.fitted(t.DASH, width))]
    parts = [(HELD, "held", group.held), (CACHED, "cached", group.cached), (FREE, "free", group.free)]
    return [t.strip([(glyph, style, max(0, amount)) for glyph, style, amount in parts], width)]


def _share(group: GroupView) -> str:
    return t.percent(group.held / group.total if group.held is not None and group.total else None)


def _storage_line(storage: StorageView, width: int) -> Text:
    figures = t.line(
        ("disk  ", t.MUTED_STYLE),
        f"{t.count(storage.blocks)} blocks, {t.size(storage.bytes)} of {t.size(storage.limit_bytes)}",
        f", {t.count(storage.pending)} operations out  ",
    )
    cells = width - figures.cell_len
    if storage.bytes is None or not storage.limit_bytes or cells < 4:
        return figures
    free = max(0, storage.limit_bytes - storage.bytes)
    return figures.append_text(t.strip([(CACHED, "cached", max(0, storage.bytes)), (FREE, "free", free)], cells))


def tier_hits(counters: CounterView) -> tuple[int | None, int | None, int | None]:
    """Prompt tokens that came from the device, from host memory and from the disk, since the start."""
    host, disk, every = counters.host_hit_tokens, counters.storage_hit_tokens, counters.prefix_hit_tokens
    device = every - (host or 0) - (disk or 0) if every is not None else None
    return device, host, disk


def _tier_lines(picture: Picture, width: int) -> list[Text]:
    """Where prompt tokens came from since the start, what was evicted, what retractions cost."""
    counters = picture.snapshot.counters if picture.snapshot is not None else CounterView()
    hits = tier_hits(counters)
    queried = counters.prefix_query_tokens
    shares = [hit / queried if hit is not None and queried else None for hit in hits]
    words = "  ".join(f"{tier} {t.percent(share)}" for tier, share in zip(TIERS, shares, strict=True))
    lines = [t.line(("prefix hits ", t.TITLE_STYLE), f"{words}  of {t.count(queried)} prompt tokens")]
    if queried and None not in hits:
        parts = [(HELD, "held"), (CACHED, "cached"), ("▓", "pinned")]
        amounts = [(*part, max(0, hit or 0)) for part, hit in zip(parts, hits, strict=True)]
        missed = max(0, queried - sum(hit or 0 for hit in hits))
        lines.append(t.strip([*amounts, (FREE, "free", missed)], width))
    lines.append(
        t.line(
            ("evicted ", t.TITLE_STYLE),
            f"{t.count(counters.evictions)} blocks ({t.rate(picture.rates.evictions)}/s), ",
            f"{t.count(counters.host_evictions)} in host memory",
        )
    )
    lines.append(
        t.line(
            ("retracted ", t.TITLE_STYLE),
            f"{t.counted(counters.retractions, 'time')}: {t.counted(counters.image_blocks, 'block')} saved, ",
            f"{t.count(counters.restores)} restored, {t.count(counters.recomputed_tokens)} tokens to compute again",
        )
    )
    return lines
