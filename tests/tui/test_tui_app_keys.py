"""The live application: a test for every key and for the mouse, through Textual's pilot."""

from pathlib import Path

from dashboards import at_work, place, shown, until
from textual import events
from textual.binding import Binding

from tokenspeed_tui.controls import PAGES
from tokenspeed_tui.dashboard import DashboardScreen
from tokenspeed_tui.operator import OperatorScreen


async def test_1_2_3_4_show_the_pages(dashboard, source, story):
    words = {"1": "── States ──", "2": "── Requests ──", "3": "◆ pinned", "4": "ago ──"}
    async with at_work(dashboard, source, story) as pilot:
        for key in "2341":
            await pilot.press(key)
            assert dashboard.controls.shown == PAGES[key]
            assert words[key] in shown(dashboard)
        assert len([line for line in shown(dashboard).splitlines() if "chatcmpl" in line]) < 6


async def test_e_shows_the_events_and_goes_back(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("e")
        assert "── Events ──" in shown(dashboard) and "the client went away" in shown(dashboard)
        assert "── Advice ──" in shown(dashboard)
        await pilot.press("e")
        assert dashboard.controls.shown == "main"


async def test_s_sorts(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("s", "s", "s")
        assert dashboard.controls.sort == "prompt"
        assert "by prompt" in shown(dashboard)


async def test_arrows_and_letters_select_and_enter_opens(dashboard, source, story):
    async with dashboard.run_test(size=(80, 24)) as pilot:
        await pilot.press("enter")
        assert dashboard.controls.shown == "main", "there is no request to show yet"
        source.queue.put_nowait(story.observation(0.0))
        await until(pilot, lambda: "…00008" in shown(dashboard))
        for keys, handle in (
            (("down",), 7),
            (("j", "j", "k"), 6),
            (("up",), 7),
            (("pagedown",), 1),
            (("pageup",), 8),
            (("down", "enter"), 7),
        ):
            await pilot.press(*keys)
            assert dashboard.controls.selected == handle, keys
        assert "── Request ── #7 ── chatcmpl-00000007" in shown(dashboard)
        assert source.requests[-1] == "chatcmpl-00000007"
        await pilot.press("escape")
        assert "── Requests ──" in shown(dashboard)
        assert source.requests[-1] is None


async def test_enter_shows_what_the_server_tells_of_the_request(dashboard, source, story):
    detail = {
        "handle": 8,
        "request_id": "chatcmpl-00000008",
        "state": "Submitted",
        "time": story.epoch + 3.0,
        "arrived": story.epoch,
        "timeline": [
            {"state": "Prefilling", "time": story.epoch, "round": 1},
            {"state": "Retracted", "time": story.epoch + 1.0, "round": 7},
            {"state": "Submitted", "time": story.epoch + 2.0, "round": 9},
        ],
        "explain": ["capacity: short by 19 blocks", "position 1 of 4 in the queue"],
    }
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("enter")
        source.queue.put_nowait(story.observation(2.0, detail=detail))
        await until(pilot, lambda: "position 1 of 4" in shown(dashboard))
        assert "• capacity: short by 19 blocks" in shown(dashboard)
        assert "as the scheduler had it" in shown(dashboard)
        assert "P" * 27 + "X" * 27 + "S" * 26 in shown(dashboard)
        await pilot.press("p")
        source.queue.put_nowait(story.observation(3.0, detail=None, detail_error="the server knows nothing more of it"))
        await until(pilot, lambda: "position 1 of 4" not in shown(dashboard))


async def test_escape_goes_back_to_the_page_the_request_was_chosen_on(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("2", "enter", "escape")
        assert dashboard.controls.shown == "requests"
        await pilot.press("escape")
        assert dashboard.controls.shown == "main"
        await pilot.press("escape")
        assert dashboard.controls.shown == "main"


async def test_slash_filters_while_one_types(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("slash", *"prefil")
        assert dashboard.controls.pattern == "prefil"
        assert "── /prefil/ ──" in shown(dashboard)
        rows = [line for line in shown(dashboard).splitlines() if "…0000" in line]
        assert len(rows) == 1 and "Prefilling" in rows[0]
        await pilot.press("l", "enter", "s")
        assert (dashboard.controls.pattern, dashboard.controls.sort) == ("prefill", "age"), (
            "after Enter keys work again"
        )
        await pilot.press("enter")
        assert "── Request ── #7 ── chatcmpl-00000007" in shown(dashboard)
        await pilot.press("escape")
        assert dashboard.controls.pattern == "prefill"
        await pilot.press("escape")
        assert dashboard.controls.pattern == ""
        await pilot.press("slash", "x", "escape", "s")
        assert (dashboard.controls.pattern, dashboard.controls.sort) == ("", "state")


async def test_a_filter_that_lets_nothing_through_says_so(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("c", "slash", *"zz")
        assert dashboard.controls.shown == "requests"
        assert "none of 8 requests has 'zz'" in shown(dashboard)


async def test_g_shows_one_cache_group_after_the_other(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("g")
        assert dashboard.controls.group == "full"
        await pilot.press("3")
        assert "group full" in shown(dashboard)
        await pilot.press("g")
        assert dashboard.controls.group == ""


async def test_t_changes_the_theme(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        assert dashboard.theme == "tokenspeed-dark"
        await pilot.press("t")
        await pilot.pause()
        assert (dashboard.controls.theme, dashboard.theme) == ("light", "tokenspeed-light")
        assert "#00609a" in dashboard.export_screenshot()
        await pilot.press("t")
        await pilot.pause()
        assert dashboard.theme == "tokenspeed-dark"
        assert "#00609a" not in dashboard.export_screenshot()


async def test_p_holds_the_picture_and_says_so(dashboard, source, story):
    async with at_work(dashboard, source, story, moments=(0.0,)) as pilot:
        await pilot.press("p")
        assert "PAUSED" in shown(dashboard)
        source.queue.put_nowait(story.observation(1.0))
        await until(pilot, lambda: dashboard.dashboard.latest.polls == 2)
        assert dashboard.picture.polls == 1
        await pilot.press("p")
        assert dashboard.picture.polls == 2
        assert "PAUSED" not in shown(dashboard)


async def test_plus_and_minus_change_the_rate(dashboard):
    async with dashboard.run_test(size=(80, 24)) as pilot:
        await pilot.press("minus", "minus")
        assert dashboard.controls.interval == 0.5
        await pilot.press("plus", "equals_sign")
        assert dashboard.controls.interval == 0.1


async def test_brackets_change_the_window(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("right_square_bracket")
        assert "bars over 5m 00s" in shown(dashboard)
        await pilot.press("left_square_bracket", "left_square_bracket")
        assert "bars over 30 s" in shown(dashboard)


def test_every_key_has_a_test():
    """Each binding's key is pressed somewhere in the tests of the dashboard."""
    folder = Path(__file__).parent
    pressed = "".join(path.read_text(encoding="utf-8") for path in folder.glob("test_*.py"))
    for binding in [*DashboardScreen.BINDINGS, *OperatorScreen.BINDINGS]:
        assert isinstance(binding, Binding)
        for key in binding.key.split(","):
            assert f'"{key}"' in pressed or (key.isdigit() and f'"{key}":' in pressed), key


# The mouse.


async def test_a_click_selects_a_row_and_a_second_one_opens_it(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.click(offset=place(dashboard, "…00007"))
        assert dashboard.controls.selected == 7
        await pilot.click(offset=place(dashboard, "…00007"))
        assert "── Request ── #7 ── chatcmpl-00000007" in shown(dashboard)


async def test_a_click_on_a_panels_name_or_a_tab_shows_that(dashboard, source, story):
    async with at_work(dashboard, source, story, size=(120, 40)) as pilot:
        await pilot.click(offset=place(dashboard, "── KV cache"))
        assert dashboard.controls.shown == "cache"
        await pilot.click(offset=place(dashboard, "4 rates"))
        assert dashboard.controls.shown == "rates"
        await pilot.click(offset=(0, 1))
        assert dashboard.controls.shown == "rates", "what is no target does nothing"


async def test_the_wheel_moves_the_selection_and_scrolls(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        scene = dashboard.dashboard.scene
        await pilot._post_mouse_events([events.MouseScrollDown], scene, offset=(5, 5), button=0)
        await pilot.pause()
        assert dashboard.controls.selected == 5
        await pilot._post_mouse_events([events.MouseScrollUp], scene, offset=(5, 5), button=0)
        await pilot.pause()
        assert dashboard.controls.selected == 8


async def test_the_help_scrolls_where_it_does_not_fit(dashboard, source, story):
    async with at_work(dashboard, source, story) as pilot:
        await pilot.press("question_mark")
        assert "0 lines above," in shown(dashboard) and "leave" in shown(dashboard)
        await pilot.press("pagedown", "pagedown", "pagedown")
        assert ", 0 below" in shown(dashboard) and "The mouse selects a row" in shown(dashboard)


def test_the_help_lists_every_key_there_is(dashboard):
    own = [binding for binding in DashboardScreen.BINDINGS if isinstance(binding, Binding)]
    assert len(dashboard.controls.keys) == len(own) == len(DashboardScreen.BINDINGS)
    assert [key.key for key in dashboard.controls.keys] == [
        *("q", "?", "p", "/", "s", "g", "t", "e", "c", "Enter", "Esc", "1", "2", "3", "4", "+", "-", "[", "]"),
        *("↑ k", "↓ j", "PgUp", "PgDn"),
    ]
    assert all(key.does for key in dashboard.controls.keys)
