"""The event log: nothing twice, nothing lost, never longer than it may be."""

from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_tui.controls import Controls
from tokenspeed_tui.events import KNOWN, MOST_EVENTS, with_own, with_told
from tokenspeed_tui.picture import Picture, advance
from tokenspeed_tui.render.events import KINDS, events_panel, last_event_scroll
from tokenspeed_tui.render.screen import render_screen, scrolled
from tokenspeed_tui.view import EventView


def event(sequence: int, time: float | None = None, **fields) -> EventView:
    return EventView(sequence=sequence, time=float(sequence) if time is None else time, **fields)


@given(steps=st.lists(st.integers(0, KNOWN), max_size=12))
def test_each_event_is_logged_once_in_its_order(steps):
    """A server repeats its newest events in each snapshot; as long as none falls out between two, none is lost."""
    log, made = (), 0
    for step in steps:
        made += step
        told = tuple(event(sequence) for sequence in range(max(0, made - KNOWN), made))
        log = with_told(log, told)
    assert [item.sequence for item in log] == list(range(max(0, made - MOST_EVENTS), made))


def test_a_server_that_was_started_again_numbers_anew():
    log = with_told((), (event(1, 10.0), event(2, 11.0)))
    assert len(with_told(log, (event(1, 50.0),))) == 3
    assert with_told(log, (event(1, 10.0),)) is log


def test_going_away_and_coming_back_are_logged_once(story):
    picture = advance(Picture(url=story.url), story.observation(0.0))
    for moment in (1.0, 2.0):
        picture = advance(picture, story.observation(moment, state=None, error="no server answers at http://x"))
    picture = advance(picture, story.observation(3.0))
    own = [(item.kind, item.text) for item in picture.events if item.sequence is None]
    assert own == [("away", "no server answers at http://x"), ("back", "the server answers again")]
    never = advance(Picture(url=story.url), story.observation(0.0, state=None, error="no server"))
    assert [item.kind for item in never.events] == ["away"]


def test_the_log_keeps_to_its_length():
    log = ()
    for moment in range(3 * MOST_EVENTS):
        log = with_own(log, "away", float(moment), "gone")
    assert len(log) == MOST_EVENTS
    assert log[-1].time == 3 * MOST_EVENTS - 1


def lines_of(log, now=100.0, rows=10, width=100, **chosen) -> list[str]:
    picture = Picture(url="http://x", polls=1, events=log)
    return [line.plain.rstrip() for line in events_panel(picture, Controls(**chosen), now, width, rows).body]


def test_an_event_says_when_what_and_whose():
    log = (
        event(1, 40.0, kind="retraction", text="22 blocks went to the host pool", request_id="req-7"),
        event(2, 97.0, kind="abort", text="req-9 was ended by an operator", request_id="req-9"),
        event(3, 99.0, kind="something new", text="?"),
    )
    assert lines_of(log) == [
        "   1.0s something new            ?",
        "   3.0s ! abort        req-9     req-9 was ended by an operator",
        "    60s X retraction   req-7     22 blocks went to the host pool",
    ]
    assert lines_of(()) == ["– nothing has happened"]


def test_the_page_shows_long_sentences_in_full():
    text = "with 255 tokens of output it gave 11 blocks to request 12, which was short by 1 block of group full"
    log = (event(1, 99.0, kind="retraction", text=text, request_id="a" * 32), event(2, 100.0, kind="nan", text="short"))
    assert len(lines_of(log, width=80)) == 2
    lines = lines_of(log, width=80, shown="events")
    assert [line[:8].strip() for line in lines] == ["0.0s", "1.0s", "", ""]
    assert " ".join(line[33:] for line in lines[1:]).split() == text.split()
    assert "…aaaaaaaa" in lines[1]


def test_every_kind_the_engine_knows_has_a_sign():
    from typing import get_args

    from tokenspeed.messages.snapshot import EventKind

    assert set(get_args(EventKind)) <= set(KINDS)


def test_the_page_scrolls_through_the_log(story):
    log = tuple(event(number, story.epoch, kind="abort", text=f"number {number}") for number in range(100))
    picture = Picture(url=story.url, polls=1, events=log)
    assert last_event_scroll(picture, 10) == 90
    assert lines_of(log, story.epoch, rows=2, shown="events", scroll=5)[0].endswith("number 94")
    assert lines_of(log, story.epoch, rows=2, shown="main", scroll=5)[0].endswith("number 99")
    controls = Controls(shown="events")
    assert scrolled(picture, controls, story.epoch, 80, 23, 7) == 7
    assert scrolled(picture, controls, story.epoch, 80, 23, -7) == 0
    last = scrolled(picture, controls, story.epoch, 80, 23, 10_000)
    text = "\n".join(line.plain for line in render_screen(picture, Controls(shown="events", scroll=last), 0.0, 80, 23))
    assert "number 0 " in text
