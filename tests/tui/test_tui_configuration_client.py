"""When the client fetches the configuration, and what it makes of each answer."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tokenspeed_tui.client import CONFIGURATION_INTERVAL_S, CONFIGURATION_PATH, STATE_PATH, HttpSource
from tokenspeed_tui.observation import Observation


@pytest.fixture
def asking(story, tiny_server) -> Iterator[Callable[..., Observation]]:
    """Looks at a server with the present state ``tiny_server`` was given; its clock is ``asking.now``."""
    tiny_server.answers[STATE_PATH] = (200, story.state(story.snapshot()))
    tiny_server.answers[CONFIGURATION_PATH] = (200, story.configuration())
    with asyncio.Runner() as runner:

        def look() -> Observation:
            return runner.run(anext(look.looks))

        look.now = 100.0
        look.source = HttpSource(tiny_server.url, clock=lambda: look.now)
        look.looks = look.source.observations()
        look.asked = lambda: [path for path, _ in tiny_server.asked].count(CONFIGURATION_PATH)
        yield look
        runner.run(look.looks.aclose())


def test_nobody_asks_while_nobody_looks(story, asking):
    assert asking().configuration is None
    asking.source.watch_configuration(True)
    assert asking().configuration == story.configuration()
    asking.source.watch_configuration(False)
    asking.now += 60
    assert asking().configuration is None
    assert asking.asked() == 1


def test_it_is_asked_for_when_the_panel_opens_and_on_a_slow_timer(asking):
    asking.source.watch_configuration(True)
    for _ in range(3):
        asking()
    assert asking.asked() == 1
    asking.now += CONFIGURATION_INTERVAL_S - 0.1
    asking()
    assert asking.asked() == 1
    asking.now += 0.1
    assert asking().configuration is None, "it is what it was"
    assert asking.asked() == 2
    asking.source.watch_configuration(False)
    asking.source.watch_configuration(True)
    asking()
    assert asking.asked() == 3


@pytest.mark.parametrize("change", ["recipe", "engine", "ready"])
def test_it_is_asked_for_again_after_a_start(story, tiny_server, asking, change):
    asking.source.watch_configuration(True)
    asking()
    later = {
        "recipe": story.state(story.snapshot(0.5), recipe_hash="other"),
        "engine": story.state(story.snapshot(0.5, uptime_s=0.2)),
        "ready": story.state(None, phase="load"),
    }
    tiny_server.answers[STATE_PATH] = (200, story.state(story.snapshot(0.4)))
    asking()
    assert asking.asked() == 1, "the engine lives on"
    tiny_server.answers[STATE_PATH] = (200, later[change])
    changed = story.configuration(started=5.0)
    tiny_server.answers[CONFIGURATION_PATH] = (200, changed)
    assert asking().configuration == changed
    assert asking().configuration is None
    assert asking.asked() == 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, {}), "this server is older than the dashboard and does not tell its configuration"),
        ((500, {}), "no configuration came: GET /v1/internal/configuration gave status 500"),
        ((200, b"<html>"), "gave status 200 and no JSON"),
        ((200, [1]), "and JSON that is no object"),
    ],
)
def test_a_server_that_does_not_tell_is_an_observation(story, tiny_server, asking, answer, words):
    good = tiny_server.answers[CONFIGURATION_PATH]
    asking.source.watch_configuration(True)
    asking()
    asking.now += CONFIGURATION_INTERVAL_S
    tiny_server.answers[CONFIGURATION_PATH] = answer
    observation = asking()
    assert observation.configuration is None and words in observation.configuration_error
    assert observation.state is not None and observation.error == ""
    assert asking().configuration_error == ""
    asking.now += CONFIGURATION_INTERVAL_S
    tiny_server.answers[CONFIGURATION_PATH] = good
    assert asking().configuration == story.configuration(), "the same as before is news after an error"


def test_without_a_state_nothing_is_asked(tiny_server, asking):
    tiny_server.answers[STATE_PATH] = (401, {})
    asking.source.watch_configuration(True)
    assert asking().configuration_error == ""
    assert asking.asked() == 0
