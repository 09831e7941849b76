"""The KV cache's strips: what a cell shows is what its blocks are."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.telemetry.snapshot import StorageSnapshot
from tokenspeed_tui.controls import Controls
from tokenspeed_tui.picture import Picture, advance
from tokenspeed_tui.render.cache import GLYPHS, cache_page, cache_panel, cell_map, resampled, room_line, tier_hits
from tokenspeed_tui.view import CounterView


def pictured(story, **changes) -> Picture:
    return advance(Picture(url=story.url), story.observation(state=story.state(story.snapshot(**changes))))


def page(picture, **chosen) -> str:
    return "\n".join(line.plain for line in cache_page(picture, Controls(**chosen), 100, 40).body)


def test_a_map_in_fewer_cells_shows_what_most_blocks_of_each_are():
    assert resampled("hhhcc...", 4) == "hhc."
    assert resampled("hhc.", 8) == "hhhhcc.."
    assert resampled("hc", 1) == "h"
    assert resampled("p.", 1) == "p"
    assert resampled("", 5) == ""
    assert resampled("hhh", 0) == ""


@given(cells=st.text("hcp.-", min_size=1, max_size=256), width=st.integers(1, 300))
def test_a_map_in_any_width_invents_nothing(cells, width):
    shown = resampled(cells, width)
    assert len(shown) == width
    assert set(shown) <= set(cells)
    if width >= len(cells):
        assert set(shown) == set(cells)
        assert list(dict.fromkeys(shown)) == list(dict.fromkeys(cells))


def test_every_kind_of_cell_has_its_own_glyph_and_style():
    assert len({glyph for glyph, _ in GLYPHS.values()}) == len(GLYPHS)
    text = cell_map("hhcp.-?")
    assert text.plain == "██▒◆· ?"
    assert [str(span.style) for span in text.spans] == ["held", "cached", "pinned", "free", "elsewhere", "muted"]


def test_the_page_has_a_map_for_every_group_and_tier(story):
    host = msgspec.structs.replace(story.snapshot().groups[0], map="", held=1, cached=255, free=0)
    storage = StorageSnapshot(blocks=1_000, bytes=3 << 30, limit_bytes=4 << 30, pending=2)
    text = page(pictured(story, host=[host], storage=storage))
    assert "full device  █ held 132 52 %  ▒ cached 76  · free 48 of 256" in text
    assert "full host  █ held 1 0 %  ▒ cached 255" in text
    assert "1,000 blocks, 3.0 GiB of 4.0 GiB, 2 operations out" in text
    assert Counter(text)["█"] >= 132


def test_without_a_map_the_strip_is_in_proportion(story):
    group = msgspec.structs.replace(story.snapshot().groups[0], map="")
    text = page(pictured(story, groups=[group]))
    assert "█" * 51 + "▒" * 30 + "·" * 19 in text


def test_blocks_of_other_groups_are_named(story):
    group = msgspec.structs.replace(story.snapshot().groups[0], elsewhere=12)
    assert "elsewhere 12" in page(pictured(story, groups=[group]))


def test_where_prompt_tokens_came_from():
    told = CounterView(prefix_hit_tokens=100, host_hit_tokens=30, storage_hit_tokens=20)
    assert tier_hits(told) == (50, 30, 20)
    assert tier_hits(CounterView()) == (None, None, None)


def test_hits_by_tier_and_evictions_are_told(story):
    counters = msgspec.structs.replace(
        story.snapshot().counters, host_hit_tokens=90_000, storage_hit_tokens=45_000, evictions=7, host_evictions=3
    )
    text = page(pictured(story, counters=counters))
    assert "prefix hits device 25 %  host 10 %  disk 5 %  of 900k prompt tokens" in text
    assert "evicted 7 blocks (–/s), 3 in host memory" in text


def test_the_room_is_loud_where_nothing_fits(story):
    picture = pictured(story)
    line = room_line(picture, 80)
    assert line.plain.rstrip() == "room for 5 more of 1,485 tokens, largest 2,048"
    assert [str(span.style) for span in line.spans] == ["accent"]
    none = msgspec.structs.replace(story.snapshot().headroom, requests=0)
    assert [str(span.style) for span in room_line(pictured(story, headroom=none), 80).spans] == ["bad"]


def test_an_older_server_tells_no_room_and_it_is_estimated(story):
    room = pictured(story, headroom=None).room
    assert room.tokens == 124 * 64
    assert room.largest == 2048


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 12])
def test_the_panel_keeps_to_its_lines(story, rows):
    groups = [
        msgspec.structs.replace(story.snapshot().groups[0], group_id=name) for name in ("full", "window", "state")
    ]
    picture = pictured(story, groups=groups, host=groups)
    panel = cache_panel(picture, Controls(), 60, rows)
    assert len(panel.body) <= rows
    assert "room for 5 more" in panel.notes[0] or "room for 5 more" in panel.body[0].plain
