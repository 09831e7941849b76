"""The table of requests, and one request in depth."""

import msgspec

from tokenspeed_tui.controls import Controls
from tokenspeed_tui.detail import read_detail
from tokenspeed_tui.picture import Picture, advance
from tokenspeed_tui.render.detail import LETTERS, detail_panel
from tokenspeed_tui.render.requests import age_words, progress, requests_panel
from tokenspeed_tui.view import RequestView


def table(picture, width=116, rows=12, **chosen) -> list[str]:
    return [line.plain.rstrip() for line in requests_panel(picture, Controls(**chosen), width, rows).body]


def test_the_table_has_what_waits_first_and_says_why(story):
    picture = advance(Picture(url=story.url), story.observation())
    lines = table(picture)
    assert lines[1].split()[:5] == [">", "8", "…pl-00000008", "Submitted", "──────"]
    assert lines[1].endswith("its turn has not come")
    assert lines[2].split()[:4] == ["7", "…pl-00000007", "Prefilling", "━━━───"]
    assert len(lines) == 9


def test_the_selected_row_stays_in_view(story):
    picture = advance(Picture(url=story.url), story.observation())
    lines = table(picture, rows=5, selected=2)
    assert [line[2:4].strip() for line in lines[1:4]] == ["4", "3", "2"]
    assert lines[3].startswith("> ")
    assert lines[4] == "4 more above, 1 more below"


def test_rows_that_the_server_left_out_are_counted(story):
    snapshot = story.snapshot(requests_omitted=96)
    picture = advance(Picture(url=story.url), story.observation(state=story.state(snapshot)))
    assert table(picture, rows=8)[-1] == "0 more above, 98 more below", "two of eight have no line"
    assert "more below" not in table(picture, pattern="chatcmpl")[-1]


def test_rows_that_nobody_looked_for_are_unknown_not_none(story):
    snapshot = story.snapshot(requests=[], complete=False)
    picture = advance(Picture(url=story.url), story.observation(state=story.state(snapshot)))
    assert table(picture)[-1] == "–"
    picture = advance(picture, story.observation(1.0, state=story.state(story.snapshot(1.0, requests=[]))))
    assert table(picture)[-1] == "no live requests"


def test_an_older_server_tells_ages_in_rounds():
    assert age_words(RequestView(age_rounds=47)) == "47r"
    assert age_words(RequestView(age_rounds=47, age_s=3.25)) == "3.2s"
    assert age_words(RequestView()) == "–"


def test_progress_is_through_the_prompt_and_then_through_the_output():
    prefilling = RequestView(prompt_tokens=100, computed_tokens=25, generated_tokens=0, output_limit=10)
    assert progress(prefilling) == 0.25
    assert progress(msgspec.structs.replace(prefilling, generated_tokens=5)) == 0.5
    assert progress(msgspec.structs.replace(prefilling, generated_tokens=50)) == 1.0
    assert progress(RequestView(generated_tokens=5)) is None


def detail(story, **changes):
    body = {
        "handle": 8,
        "request_id": "req-8",
        "state": "Retracted",
        "age_s": 2.0,
        "age_rounds": 5,
        "prompt_tokens": 100,
        "cached_tokens": 64,
        "computed_tokens": 130,
        "generated_tokens": 30,
        "output_limit": 60,
        "blocks": 0,
        "host_blocks": 3,
        "retractions": 1,
        "priority": 0,
        "arrived": story.epoch,
        "deadline": story.epoch + 30.0,
        "time": story.epoch + 10.0,
        "timeline": [
            {"state": "Submitted", "time": story.epoch, "round": 1},
            {"state": "Prefilling", "time": story.epoch + 2.0, "round": 7},
            {"state": "Decoding", "time": story.epoch + 4.0, "round": 9},
            {"state": "Retracted", "time": story.epoch + 8.0, "round": 70},
        ],
        "explain": ["gave way to req-2; it comes back when there is room", "needs 3 blocks of full, 1 free"],
    }
    return read_detail(body | changes)


def shown(story, told=None, error="", selected=8, rows=30, **fields) -> list[str]:
    picture = advance(Picture(url=story.url), story.observation(**fields))
    picture = msgspec.structs.replace(picture, detail=told, detail_error=error)
    return [line.plain.rstrip() for line in detail_panel(picture, Controls(selected=selected), 80, rows).body]


def test_the_servers_own_account_is_shown_in_full(story):
    lines = shown(story, detail(story))
    text = "\n".join(lines)
    assert "state      Retracted, for 2.0s (5 rounds)" in lines
    assert "output     30 tokens of 60 at most, 50 % done" in lines
    assert "holds      0 blocks of the device, 3 in host memory; 130 tokens computed" in lines
    assert "arrived    10 s ago" in lines and "deadline   in 20 s" in lines
    assert "• needs 3 blocks of full, 1 free" in lines
    assert "S" * 16 + "P" * 16 + "D" * 32 + "X" * 16 in lines
    assert [line.split()[:4] for line in lines[-4:]] == [
        ["S", "Submitted", "2.0", "s"],
        ["P", "Prefilling", "2.0", "s"],
        ["D", "Decoding", "4.0", "s"],
        ["X", "Retracted", "2.0", "s"],
    ]
    assert "as the scheduler had it" in text


def test_a_request_that_ended_says_how(story):
    lines = shown(story, detail(story, ended=story.epoch + 12.0, finish_reason="abort", error="the client went away"))
    assert lines[0] == "ended      abort: the client went away"
    assert "lived      12 s" in lines
    assert lines[-1].split()[:4] == ["X", "Retracted", "4.0", "s"]
    assert not any(line.startswith("deadline") for line in lines)


def test_a_long_life_shows_its_newest_part(story):
    timeline = [
        {"state": ("Decoding", "Retracted")[number % 2], "time": story.epoch + number, "round": number}
        for number in range(60)
    ]
    lines = shown(story, detail(story, timeline=timeline, timeline_omitted=40, time=story.epoch + 60.0), rows=24)
    assert len(lines) == 24
    (earlier,) = [line for line in lines if line.endswith("earlier")]
    shown_stays = len(lines) - lines.index(earlier) - 1
    assert earlier == f"{100 - shown_stays} earlier"


def test_without_the_servers_account_what_polls_saw_is_shown(story):
    lines = shown(story, selected=7)
    assert "state      Prefilling, for 0.5s (3 rounds)" in lines
    assert any("as polls saw it: at least so long" in line for line in lines)
    assert shown(story, detail(story), selected=7)[0].startswith("state      Prefilling"), "it is another's account"


def test_a_request_nobody_knows_any_more(story):
    assert shown(story, selected=4711) == ["It ended, or fell out of the table."]
    assert shown(story, selected=4711, error="the server knows nothing more of it") == [
        "the server knows nothing more of it"
    ]


def test_every_state_has_a_letter_of_its_own():
    from tokenspeed.messages.snapshot import HELD, STATES

    assert set(LETTERS) == {HELD, *STATES}
    assert len({letter for letter, _ in LETTERS.values()}) == len(LETTERS)
