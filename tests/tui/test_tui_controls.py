"""What the keys change, apart from any terminal."""

from tokenspeed_tui.controls import (
    INTERVALS,
    SORT_KEYS,
    Controls,
    moved_selection,
    next_sort,
    ordered_requests,
    stepped_interval,
)
from tokenspeed_tui.picture import Picture, advance


def handles(picture, sort):
    return [request.handle for request in ordered_requests(picture, sort)]


def test_sort_orders(story):
    picture = advance(Picture(url=story.url), story.observation())
    assert handles(picture, "age") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert handles(picture, "prompt") == [8, 7, 6, 5, 4, 3, 2, 1]
    assert handles(picture, "state") == [8, 7, 1, 2, 3, 4, 5, 6]
    assert handles(picture, "retractions") == [4, 5, 6, 1, 2, 3, 7, 8]
    assert handles(picture, "priority")[-1] == 8
    assert handles(Picture(url=story.url), "blocks") == []


def test_unknown_figures_sort_last(story):
    state = story.state(story.snapshot())
    del state["snapshot"]["requests"][7]["prompt_tokens"]
    picture = advance(Picture(url=story.url), story.observation(state=state))
    assert handles(picture, "prompt")[0] == 7
    assert handles(picture, "prompt")[-1] == 8


def test_sort_keys_go_round():
    sort, seen = SORT_KEYS[0], []
    for _ in SORT_KEYS:
        seen.append(sort)
        sort = next_sort(sort)
    assert tuple(seen) == SORT_KEYS
    assert sort == SORT_KEYS[0]


def test_the_selection_follows_the_request_not_the_row(story):
    picture = advance(Picture(url=story.url), story.observation())
    controls = Controls(selected=moved_selection(picture, Controls(), 2))
    assert controls.selected == 3
    by_prompt = Controls(selected=3, sort="prompt")
    assert moved_selection(picture, by_prompt, 1) == 2
    assert moved_selection(picture, by_prompt, -100) == 8
    assert moved_selection(picture, Controls(selected=4711), 0) == 1
    assert moved_selection(Picture(url=story.url), controls, 1) is None


def test_intervals_step_and_stop_at_the_ends():
    assert stepped_interval(0.5, faster=True) == 0.25
    assert stepped_interval(0.5, faster=False) == 1.0
    assert stepped_interval(0.3, faster=True) == 0.25
    assert stepped_interval(INTERVALS[0], faster=True) == INTERVALS[0]
    assert stepped_interval(0.05, faster=True) == 0.05
    assert stepped_interval(INTERVALS[-1], faster=False) == INTERVALS[-1]
    assert stepped_interval(60.0, faster=False) == 60.0
