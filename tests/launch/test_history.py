"""A journal as a film: every round, in any order, is what a scheduler that is fed the same is at that round."""

import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from journal_play import record, rewrite, with_other_tokens

from tokenspeed.launch import history as module
from tokenspeed.launch.demo import Demo, demo_world
from tokenspeed.launch.history import JournalHistory
from tokenspeed.launch.replay import Replayer
from tokenspeed.launch.scheduling import compose_scheduler
from tokenspeed.recipes.resolved import SchedulerSettings
from tokenspeed.telemetry.journal import Advanced, JournalError, JournalReader, Planned, Raised, Record, Submitted
from tokenspeed_scheduler import transition_table


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    record(tmp_path / "j")
    return tmp_path / "j"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Demo]:
    """24 seconds of the demo, with their journal."""
    path = tmp_path_factory.mktemp("demo") / "j"
    demo = Demo(0, 0.0, compose_scheduler(SchedulerSettings(journal=str(path)), demo_world()))
    demo.advance(24.0)
    return path, demo


def truth(path: Path) -> list[tuple[list[int], list[tuple[int, int, int]], list[tuple[int, str]]]]:
    """By round: the scheduler's own state counts, blocks of each group, and the state of each request."""
    replayer = Replayer(JournalReader(path))
    told = []
    for call in replayer.calls():
        if isinstance(call.record, Planned):
            counts = replayer.scheduler.snapshot()
            blocks = [(group.held, group.cached, group.free) for group in counts.groups]
            rows = sorted((row.handle, row.state.name) for row in replayer.scheduler.requests())
            told.append((counts.states.tolist(), blocks, rows))
    return told


def assert_frame(history: JournalHistory, number: int, expected: tuple[list[int], list, list]) -> None:
    frame = history.frame(number)
    states, blocks, rows = expected
    assert frame.number == frame.snapshot.counters.rounds == number
    assert list(frame.snapshot.states.values()) == [None if count < 0 else count for count in states]
    assert [(group.held, group.cached, group.free) for group in frame.snapshot.groups] == blocks
    shown = sorted(
        (row.handle, "".join(f"_{c}" if c.isupper() else c for c in row.state)) for row in frame.snapshot.requests
    )
    assert [(handle, name.lstrip("_").upper()) for handle, name in shown] == rows


@pytest.mark.parametrize("kept", [(512, 128, 3), (6, 2, 1)])
def test_every_round_in_any_order_is_the_schedulers_own(
    journal: Path, kept: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_FRAMES", kept[0])
    monkeypatch.setattr(module, "KEPT_BEHIND", kept[1])
    monkeypatch.setattr(module, "KEPT_CURSORS", kept[2])
    expected, history = truth(journal), JournalHistory(journal)
    assert history.rounds == len(expected) > 20
    order = [*range(1, 8), *range(7, 0, -1), *random.Random(4).choices(range(1, history.rounds + 1), k=40)]
    for number in order:
        assert_frame(history, number, expected[number - 1])
        assert len(history._frames) <= kept[0]
        assert len(history._cursors) <= kept[2]
    assert history.divergence is None


def test_rounds_beyond_the_ends_are_the_ends(journal: Path) -> None:
    history = JournalHistory(journal)
    assert history.frame(0).number == history.frame(-7).number == 1
    assert history.frame(10**9).number == history.rounds


def test_events_are_the_rounds_that_decided_against_someone(journal: Path) -> None:
    replayer = Replayer(JournalReader(journal))
    expected = []
    for call in replayer.calls():
        if isinstance(call.record, Planned):
            last = replayer.scheduler.decisions(1)
            round_ = replayer.result.rounds
            if last and last[0].round == round_ and (last[0].retracted or last[0].restored or last[0].aborted):
                expected.append(round_)
    assert expected
    history = JournalHistory(journal)
    found, here = [], 0
    while (there := history.next_event(here, forward=True)) is not None:
        found.append(here := there)
    # One request is refused before the first plan, and one batch of events is: those are told too.
    assert [number for number in found if number in expected] == expected
    extra = [number for number in found if number not in expected]
    assert extra
    assert all(
        "refused" in history.frame(number).decided or "raised" in history.frame(number).decided for number in extra
    )
    back, here = [], history.rounds + 1
    while (there := history.next_event(here, forward=False)) is not None:
        back.append(here := there)
    assert back == found[::-1]
    assert any("retracted " in history.frame(number).decided for number in expected)


def test_a_demo_goes_through_every_kind_of_event(played: tuple[Path, Demo]) -> None:
    journal, demo = played
    counters = demo.state()["snapshot"]["counters"]
    history, here, decided = JournalHistory(journal), 0, ""
    assert history.rounds == counters["rounds"]
    while (there := history.next_event(here, forward=True)) is not None:
        here = there
        decided += history.frame(here).decided
    assert decided.count("retracted ") == counters["retractions"] > 0
    assert decided.count("restored ") == counters["restores"] > 0
    end = history.frame(history.rounds).snapshot
    for name in ("steps", "prefill_tokens", "decode_tokens", "retractions", "evictions", "host_hit_tokens", "aborted"):
        assert getattr(end.counters, name) == counters[name], name


def test_a_request_is_followed_through_its_states(journal: Path) -> None:
    history = JournalHistory(journal)
    legal = {(state, to) for state, _, successors in transition_table() for to in successors}
    for handle in range(1, 7):
        detail = history.detail(handle, None)
        assert detail is not None
        states = [entry.state for entry in detail.timeline]
        assert states[-1] == detail.state == "Finished"
        assert detail.ended == detail.timeline[-1].round
        assert detail.finish_reason == ("aborted" if handle == 5 else "finished")
        assert [entry.round for entry in detail.timeline] == sorted({entry.round for entry in detail.timeline})
        # A request passes through several states between two plans: each step is a way through the table.
        assert all(_reachable(legal, a, b) for a, b in pairwise(states))


def test_a_request_that_gave_way_says_to_whom(played: tuple[Path, Demo]) -> None:
    history = JournalHistory(played[0])
    number = 0
    while "retracted " not in history.frame(number).decided:
        number = history.next_event(number, forward=True) or pytest.fail("nothing was retracted")
    handle = next(row.handle for row in history.frame(number).snapshot.requests if row.state == "Retracted")
    then = history.detail(handle, number)
    assert then is not None
    assert (then.state, then.age_rounds, then.ended, then.retractions) == ("Retracted", 0, None, 1)
    assert then.explain[:1] == [row.reason for row in history.frame(number).snapshot.requests if row.handle == handle]
    assert "gave way to request" in then.explain[0]
    later = history.detail(handle, None)
    assert later is not None
    assert [entry.state for entry in later.timeline][: len(then.timeline) + 1] == [
        *(entry.state for entry in then.timeline),
        "Restoring",
    ]


def _reachable(legal: set[tuple[str, str]], start: str, end: str) -> bool:
    seen, front = {start}, {start}
    while front:
        front = {to for at, to in legal if at in front} - seen
        seen |= front
    return end in seen


def test_what_is_told_at_the_end_is_not_of_a_plan_that_nobody_recorded(journal: Path) -> None:
    """A journal that ends with a submit, as that of an engine that runs: the request waits, nothing was planned."""
    short = rewrite(journal, lambda records: [one for one in records if isinstance(one, Submitted)][:1])
    replayer = Replayer(JournalReader(short))
    assert [call.record for call in replayer.calls()] == list(JournalReader(short))
    assert replayer.scheduler.snapshot().states.tolist()[1] == 1, "it is Submitted"


def test_a_request_that_never_came_or_comes_later_is_none(journal: Path) -> None:
    history = JournalHistory(journal)
    assert history.detail(77, None) is None
    assert history.detail(9, None) is None, "it was refused"
    assert list(history.handles()) == [1, 2, 3, 4, 5, 6, 9]


def test_the_film_ends_where_a_plan_comes_out_otherwise(journal: Path) -> None:
    def change(records: list[Record]) -> list[Record]:
        return [with_other_tokens(entry) if isinstance(entry, Advanced) else entry for entry in records]

    changed = rewrite(journal, change)
    history = JournalHistory(changed)
    whole = history.rounds
    last = history.frame(whole)
    assert history.divergence is not None
    assert last.number == history.rounds == history.divergence.round < whole
    assert history.frame(whole).number == history.rounds


def test_the_film_ends_before_a_call_that_ends_otherwise(journal: Path) -> None:
    """A submit that was refused then and is taken now: no plan behind it is what happened."""
    without = rewrite(journal, lambda records: [one for one in records if not isinstance(one, Raised)])
    history = JournalHistory(without)
    whole = history.rounds
    last = history.frame(whole)
    assert history.divergence is not None
    assert history.divergence.what.endswith("ended otherwise")
    assert last.number == history.rounds == history.divergence.round - 1 < whole
    assert JournalHistory(without).next_event(last.number, forward=True) is None


def test_a_journal_without_a_round_says_so(journal: Path) -> None:
    empty = rewrite(journal, lambda records: records[:2])
    with pytest.raises(JournalError, match="holds no round"):
        JournalHistory(empty)


def test_a_long_way_tells_how_far_it_is(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROGRESS_EVERY", 5)
    history = JournalHistory(journal)
    told: list[tuple[int, int]] = []
    history.frame(history.rounds, lambda done, target: told.append((done, target)))
    assert told[0] == (5, history.rounds)
    assert len(told) == history.rounds // 5


def test_a_frame_is_plain_data(journal: Path) -> None:
    frame = JournalHistory(journal).frame(5)
    assert msgspec.json.decode(msgspec.json.encode(frame.snapshot), type=type(frame.snapshot)) == frame.snapshot


def test_neither_the_film_nor_the_demo_needs_torch() -> None:
    code = "import sys, tokenspeed.launch.history, tokenspeed.launch.demo; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
