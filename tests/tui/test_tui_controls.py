"""What the keys change, apart from any terminal."""

from tokenspeed_tui.controls import (
    INTERVALS,
    SORT_KEYS,
    WINDOWS,
    Controls,
    listed_requests,
    moved_selection,
    next_group,
    next_sort,
    ordered_requests,
    stepped_interval,
    stepped_window,
)
from tokenspeed_tui.picture import Picture, advance


def handles(picture, sort):
    return [request.handle for request in ordered_requests(picture, sort)]


def test_sort_orders(story):
    picture = advance(Picture(url=story.url), story.observation())
    assert handles(picture, "interest") == [8, 7, 6, 5, 4, 3, 2, 1]
    assert handles(picture, "age") == [6, 5, 4, 3, 2, 1, 8, 7]
    assert handles(picture, "prompt") == [8, 6, 7, 5, 4, 3, 2, 1]
    assert handles(picture, "state") == [8, 7, 6, 5, 4, 3, 2, 1]
    assert handles(picture, "blocks") == [6, 5, 4, 3, 2, 7, 1, 8]
    assert handles(picture, "retractions") == [6, 5, 4, 8, 7, 3, 2, 1]
    assert handles(picture, "priority")[-1] == 8
    assert handles(Picture(url=story.url), "blocks") == []


def test_unknown_figures_sort_last(story):
    state = story.state(story.snapshot())
    del state["snapshot"]["requests"][0]["prompt_tokens"]
    picture = advance(Picture(url=story.url), story.observation(state=state))
    assert handles(picture, "prompt")[0] == 6
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
    assert controls.selected == 6
    by_prompt = Controls(selected=6, sort="prompt")
    assert moved_selection(picture, by_prompt, 1) == 7
    assert moved_selection(picture, by_prompt, -100) == 8
    assert moved_selection(picture, Controls(selected=4711), 0) == 8
    assert moved_selection(Picture(url=story.url), controls, 1) is None


def test_intervals_step_and_stop_at_the_ends():
    assert stepped_interval(0.5, faster=True) == 0.25
    assert stepped_interval(0.5, faster=False) == 1.0
    assert stepped_interval(0.3, faster=True) == 0.25
    assert stepped_interval(INTERVALS[0], faster=True) == INTERVALS[0]
    assert stepped_interval(0.05, faster=True) == 0.05
    assert stepped_interval(INTERVALS[-1], faster=False) == INTERVALS[-1]
    assert stepped_interval(60.0, faster=False) == 60.0


def test_windows_step_and_stop_at_the_ends():
    assert stepped_window(60.0, wider=True) == 300.0
    assert stepped_window(60.0, wider=False) == 30.0
    assert stepped_window(WINDOWS[0], wider=False) == WINDOWS[0]
    assert stepped_window(WINDOWS[-1], wider=True) == WINDOWS[-1]


def test_a_filter_looks_at_id_state_and_reason(story):
    picture = advance(Picture(url=story.url), story.observation())

    def listed(pattern):
        return [request.handle for request in listed_requests(picture, Controls(pattern=pattern))]

    assert listed("00000003") == [3]
    assert listed("prefill") == [7]
    assert listed("HIS TURN") == []
    assert listed("its turn") == [8]
    assert listed("") == [8, 7, 6, 5, 4, 3, 2, 1]
    assert moved_selection(picture, Controls(pattern="nobody"), 0) is None


def test_groups_go_round_by_way_of_all(story):
    state = story.state(story.snapshot())
    state["snapshot"]["groups"] = [{"group_id": "full"}, {"group_id": "window"}]
    picture = advance(Picture(url=story.url), story.observation(state=state))
    assert [next_group(picture, name) for name in ("", "full", "window", "gone")] == ["full", "window", "", ""]
    assert next_group(Picture(url=story.url), "") == ""
