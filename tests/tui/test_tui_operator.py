"""What an operator may change: only with --allow-admin, only after a yes, and said in the server's own words."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from app_server import serving
from dashboards import HandFed, at_work, until
from scripted_engine import Stack, scripted_config

from tokenspeed.server.admin import create_admin_app
from tokenspeed.server.app import create_app
from tokenspeed_tui import command
from tokenspeed_tui.admin import HttpAdministration, Outcome
from tokenspeed_tui.app import Dashboard
from tokenspeed_tui.dialogs import Confirm
from tokenspeed_tui.operator import OperatorScreen


class Noted:
    """An administration that writes down what it was asked for."""

    def __init__(self, outcome: Outcome = Outcome(True, "done")) -> None:  # noqa: B008 (a tuple that nobody changes)
        self.asked: list[tuple[str, object]] = []
        self.outcome = outcome

    async def abort(self, request: str) -> Outcome:
        self.asked.append(("abort", request))
        return self.outcome

    async def flush(self) -> Outcome:
        self.asked.append(("flush", None))
        return self.outcome

    async def hold(self, paused: bool) -> Outcome:
        self.asked.append(("hold", paused))
        return self.outcome


@asynccontextmanager
async def operated(story, administration, **changes):
    """The dashboard of an operator, with one answer in."""
    source = HandFed()
    app = Dashboard(source, story.url, interval=0.1, administration=administration)
    async with at_work(app, source, story, moments=()) as pilot:
        source.queue.put_nowait(story.observation(state=story.state(story.snapshot(**changes))))
        await until(pilot, lambda: app.picture.polls == 1)
        yield app, pilot


@pytest.mark.parametrize(
    ("key", "refusal", "changes", "question", "asked"),
    [
        ("x", "n", {}, "End the request chatcmpl-00000008?", ("abort", "chatcmpl-00000008")),
        ("f", "escape", {}, "Forget all cached prefixes", ("flush", None)),
        ("z", "enter", {}, "Stop planning steps?", ("hold", True)),
        ("z", "n", {"paused": True}, "Go on planning steps?", ("hold", False)),
    ],
)
async def test_each_key_asks_first_and_only_a_yes_does_it(story, key, refusal, changes, question, asked):
    administration = Noted()
    async with operated(story, administration, **changes) as (app, pilot):
        await pilot.press(key)
        assert isinstance(app.screen, Confirm)
        assert question in app.screen.question and story.url in app.screen.question
        await pilot.press(refusal)
        assert app.screen is app.dashboard
        assert administration.asked == []
        await pilot.press(key, "y")
        await until(pilot, lambda: bool(administration.asked))
        assert administration.asked == [asked]
        await until(pilot, lambda: bool(app._notifications))


async def test_abort_ends_the_request_that_is_on_the_screen(story):
    administration = Noted()
    async with operated(story, administration) as (_, pilot):
        await pilot.press("down", "down", "enter", "x", "y")
        await until(pilot, lambda: bool(administration.asked))
    assert administration.asked == [("abort", "chatcmpl-00000006")]


async def test_without_a_request_there_is_nothing_to_end(story):
    administration = Noted()
    async with operated(story, administration, requests=[]) as (app, pilot):
        await pilot.press("x")
        await until(pilot, lambda: bool(app._notifications))
        (notice,) = app._notifications
        assert (notice.message, app.screen) == ("no live request is selected", app.dashboard)


async def test_a_refusal_is_shown_in_the_servers_words(story):
    refused = Outcome(False, "POST /flush_cache gave status 400: 7 requests run [not markup]")
    async with operated(story, Noted(refused)) as (app, pilot):
        await pilot.press("f", "y")
        await until(pilot, lambda: bool(app._notifications))
        (notice,) = app._notifications
        assert (notice.message, notice.severity) == (refused.text, "error")


async def test_without_the_flag_the_keys_are_not_bound(story):
    app = Dashboard(HandFed(), story.url, interval=0.1)
    async with app.run_test(size=(80, 24)) as pilot:
        assert not isinstance(app.dashboard, OperatorScreen)
        for key in ("x", "f", "z"):
            await pilot.press(key)
            assert app.screen is app.dashboard
        assert not {"x", "f", "z"} & set(app.screen.active_bindings)
        assert not {"x", "f", "z"} & {words.key for words in app.controls.keys}


async def test_the_help_of_an_operator_has_the_keys(story):
    async with operated(story, Noted()) as (app, pilot):
        assert [words.key for words in app.controls.keys][-3:] == ["x", "f", "z"]
        await pilot.press("question_mark", "pagedown")
        assert "end the selected request (with --allow-admin)" in "\n".join(
            line.plain for line in app.dashboard.scene.lines
        )


# The administration over HTTP.


def test_each_action_posts_what_the_api_says(tiny_server):
    tiny_server.answers |= {
        "/abort_request": (200, {"aborted_choices": 1}),
        "/flush_cache": (200, b"Cache flushed."),
        "/pause_generation": (200, {"status": "ok"}),
        "/continue_generation": (200, {"status": "ok"}),
    }
    administration = HttpAdministration(tiny_server.url, "secret")
    assert asyncio.run(administration.abort("req-7")) == (True, "req-7 was ended")
    assert asyncio.run(administration.flush()) == (True, "all cached prefixes are forgotten")
    assert asyncio.run(administration.hold(True)) == (True, "the engine plans no more steps")
    assert asyncio.run(administration.hold(False)) == (True, "the engine goes on")
    assert tiny_server.posted == [
        ("/abort_request", {"rid": "req-7"}),
        ("/flush_cache", {}),
        ("/pause_generation", {"mode": "in_place"}),
        ("/continue_generation", {}),
    ]
    assert {key for _, key in tiny_server.asked} == {"Bearer secret"}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            (400, {"error": {"message": "the cache was not flushed: 3 requests"}}),
            "the cache was not flushed: 3 requests",
        ),
        ((403, {"error": "no"}), "gave status 403: is it the administration's port (--admin-port)?"),
        ((404, b"<html>"), "gave status 404: is it the administration's port (--admin-port)?"),
    ],
)
def test_what_the_server_refuses_is_told(tiny_server, answer, words):
    tiny_server.answers |= dict.fromkeys(("/flush_cache", "/abort_request", "/continue_generation"), answer)
    administration = HttpAdministration(tiny_server.url)
    for action in (administration.flush(), administration.abort("x"), administration.hold(False)):
        outcome = asyncio.run(action)
        assert not outcome.done and words in outcome.text


def test_a_request_that_ended_meanwhile_and_a_server_that_is_away(tiny_server):
    tiny_server.answers["/abort_request"] = (200, {"aborted_choices": 0})
    assert asyncio.run(HttpAdministration(tiny_server.url).abort("x")) == (False, "x was not there any more")
    away = asyncio.run(HttpAdministration("http://127.0.0.1:9").flush())
    assert not away.done and "no answer from the administration at http://127.0.0.1:9" in away.text


async def test_it_works_on_the_real_administration_with_the_key_of_an_admin(tmp_path):
    (tmp_path / "keys").write_text("ann: of-ann\nops: of-ops admin\n")
    stack = Stack(scripted_config(api_key_file=str(tmp_path / "keys")))
    await stack.new_engine()
    async with serving(create_admin_app(create_app(stack.llm))) as url:
        administration = HttpAdministration(url, "of-ops")
        assert (await administration.hold(True)).done and stack.llm.paused
        assert (await administration.hold(False)).done and not stack.llm.paused
        assert (await administration.flush()).done
        assert await administration.abort("nobody") == (False, "nobody was not there any more")
        stack.engine.refusal = "3 requests run or wait"
        assert (await administration.flush()).text.endswith(
            "status 400: the cache was not flushed: 3 requests run or wait"
        )
        refused = await HttpAdministration(url, "of-ann").flush()
        assert not refused.done and "'ann'" in refused.text
    await stack.close()


def test_the_key_that_opens_the_administration_is_taken_from_the_file(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ann: aaaaaaaaaa\nops: bbbbbbbbbb admin\n")
    parsed = command.build_parser().parse_args(
        ["--allow-admin", "--admin-url", "127.0.0.1:9", "--api-key-file", str(keys)]
    )
    administration = command._administration(parsed)
    assert administration is not None
    assert administration._headers == {"Authorization": "Bearer bbbbbbbbbb"}
    assert administration._url == "http://127.0.0.1:9"
    assert command._administration(command.build_parser().parse_args([])) is None
    wrong = command.build_parser().parse_args(["--allow-admin", "--admin-url", "ftp://x"])
    with pytest.raises(command.UsageError, match="names no HTTP server"):
        command._administration(wrong)
