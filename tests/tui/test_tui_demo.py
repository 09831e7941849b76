"""``--demo``: an engine without a server as a source, and the option."""

import json

import pytest

from tokenspeed_tui import main
from tokenspeed_tui.demo import LONGEST_LEAP_S, URL, WARM_S, DemoSource


class PaperEngine:
    """Tells the story; remembers how much time passed."""

    def __init__(self, story) -> None:
        self._story = story
        self.passed: list[float] = []

    def advance(self, seconds: float) -> None:
        self.passed.append(seconds)

    def state(self):
        return self._story.state(self._story.snapshot(sum(self.passed)))

    def configuration(self):
        return {"model": "paper", "keys": []}

    def detail(self, request):
        return {"request_id": request} if request == "known" else None


class PaperMachine:
    def __init__(self, story, error: str = "") -> None:
        self.engine = PaperEngine(story)
        self.error = error
        self.seed = None

    def demo(self, seed):
        if self.error:
            raise RuntimeError(self.error)
        self.seed = seed
        return lambda: self.engine

    def servers(self):
        return []

    find = servers


async def test_time_passes_as_on_the_clock_but_never_leaps(story):
    times = iter([100.0, 100.5, 1000.0, 1000.25])
    engine = PaperEngine(story)
    looks = DemoSource(lambda: engine, clock=lambda: next(times)).observations()
    for _ in range(4):
        await anext(looks)
    await looks.aclose()
    assert engine.passed == [WARM_S, 0.5, LONGEST_LEAP_S, 0.25]


async def test_with_a_step_time_passes_by_looks(story):
    engine = PaperEngine(story)
    looks = DemoSource(lambda: engine, step=0.25).observations()
    observations = [await anext(looks) for _ in range(3)]
    assert engine.passed == [WARM_S, 0.25, 0.25]
    assert [one.time - observations[0].time for one in observations] == pytest.approx([0.0, 0.25, 0.5])
    assert all(one.url == URL and one.ready.passed and not one.error for one in observations)


async def test_configuration_and_detail_come_while_they_are_watched(story):
    source = DemoSource(lambda: PaperEngine(story), step=1.0)
    looks = source.observations()
    first = await anext(looks)
    source.watch_configuration(True)
    source.watch_request("known")
    second = await anext(looks)
    source.watch_configuration(False)
    source.watch_request("gone")
    third = await anext(looks)
    assert (first.configuration, first.detail, first.detail_error) == (None, None, "")
    assert (second.configuration["model"], second.detail, second.detail_error) == ("paper", {"request_id": "known"}, "")
    assert (third.configuration, third.detail) == (None, None)
    assert "knows nothing" in third.detail_error


@pytest.mark.parametrize(("arguments", "seed"), [(["--demo"], 0), (["--demo", "7"], 7)])
def test_the_option_shows_it(story, capsys, arguments, seed):
    machine = PaperMachine(story)
    assert main([*arguments, "--once", "--json", "--interval", "0.05"], machine) == 0
    shown = json.loads(capsys.readouterr().out)
    assert machine.seed == seed
    assert shown["url"] == URL
    assert shown["configuration"] == {"model": "paper", "keys": []}
    assert shown["rates"]["decode_tokens_per_s"] == pytest.approx(60.0, rel=0.2)


@pytest.mark.parametrize(
    ("machine", "words"), [(None, "start the dashboard with `tokenspeed top --demo`"), ("no scheduler", "no scheduler")]
)
def test_where_there_is_no_scheduler_it_says_so(story, capsys, machine, words):
    assert main(["--demo", "--once"], PaperMachine(story, machine) if machine else None) == 2
    assert words in capsys.readouterr().err


def test_a_recording_is_no_demo(capsys):
    with pytest.raises(SystemExit):
        main(["--demo", "--replay", "x"])
    assert "--demo and --replay exclude each other" in capsys.readouterr().err
