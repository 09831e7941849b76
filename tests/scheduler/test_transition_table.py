"""The one table of legal transitions, as the binding shows it."""

from collections import defaultdict

import pytest
from kv_model import prompt_of
from played_engine import Engine

from tokenspeed.messages.snapshot import STATES
from tokenspeed_scheduler import State, transition_table

FUSED_ONLY_ABSENT = {"Bootstrapping", "RemotePrefilling", "PrefillAwaitingResult"}
INITIAL = ("Bootstrapping", "Submitted")
"""Where a request is born: in the prefill/decode split, and everywhere else."""


def legal() -> dict[str, dict[str, list[str]]]:
    """Event (without the suffix) -> state -> successors."""
    table: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for state, event, successors in transition_table():
        table[event.removesuffix("Event")][state] = successors
    return table


def name_of(state: State | int) -> str:
    return State(state).name.title().replace("_", "")


def test_the_states_are_the_twelve_of_the_snapshot_in_its_order() -> None:
    assert tuple(name_of(state) for state in sorted(State)) == STATES
    assert [int(state) for state in State] == list(range(12))


def test_the_table_lists_each_pair_once_in_the_order_of_the_states() -> None:
    pairs = [(state, event) for state, event, _ in transition_table()]
    assert len(set(pairs)) == len(pairs)
    assert tuple(dict.fromkeys(state for state, _ in pairs)) == STATES[:-1]


def test_every_name_in_the_table_is_a_state_and_no_legal_pair_lacks_a_successor() -> None:
    for state, event, successors in transition_table():
        assert state in STATES
        assert successors, f"{event} in {state} leads nowhere"
        assert set(successors) <= set(STATES)
        assert len(set(successors)) == len(successors)


def test_finished_is_terminal() -> None:
    assert not [event for event, states in legal().items() if "Finished" in states]


def test_a_decode_is_scheduled_from_exactly_three_states() -> None:
    assert set(legal()["ScheduleDecode"]) == {"PrefillDone", "PrefillAwaitingResult", "Decoding"}
    assert {tuple(successors) for successors in legal()["ScheduleDecode"].values()} == {("Decoding",)}


def test_a_prefill_is_scheduled_only_from_states_whose_prompt_is_not_complete() -> None:
    legal_in = set(legal()["SchedulePrefill"])
    assert {"Submitted", "Prefilling"} <= legal_in
    assert not {"PrefillDone", "Decoding", "Finishing", "RemotePrefilling", "Restoring"} & legal_in


@pytest.mark.parametrize("event", ["Abort", "Finish"])
def test_an_end_is_legal_in_every_live_state_and_ends(event: str) -> None:
    assert set(legal()[event]) == set(STATES[:-1])
    for state, successors in legal()[event].items():
        assert set(successors) <= {"Finishing", "Finished"}, state


def test_abort_and_finish_are_symmetric() -> None:
    assert legal()["Abort"] == legal()["Finish"]


def test_states_that_own_nothing_end_without_finishing() -> None:
    for state in ("Bootstrapping", "Submitted", "Retracted"):
        assert legal()["Abort"][state] == ["Finished"]


def test_only_states_with_a_device_bundle_can_be_retracted() -> None:
    assert set(legal()["Retract"]) == {"Prefilling", "PrefillDone", "Decoding", "Retracted"}


def test_a_retracted_request_that_loses_its_image_computes_again() -> None:
    assert legal()["Retract"]["Retracted"] == ["Submitted"]


@pytest.mark.parametrize("target", STATES)
def test_every_state_is_reachable(target: str) -> None:
    reached = set(INITIAL)
    while True:
        more = {s for state, _, successors in transition_table() if state in reached for s in successors} - reached
        if not more:
            break
        reached |= more
    assert target in reached


@pytest.mark.parametrize("source", STATES[:-1])
def test_finished_is_reachable_from_every_live_state(source: str) -> None:
    reached = {source}
    for _ in STATES:
        reached |= {s for state, _, successors in transition_table() if state in reached for s in successors}
    assert "Finished" in reached


def test_what_happens_is_in_the_table() -> None:
    """Flows of a tight run with aborts: each is an arrow of the table, within the states of the fused role."""
    engine = Engine(num_parents=12, overlap=1, budget=8)
    for salt in range(9):
        engine.submit(prompt_of(6 + salt, salt), 20, declared=False)
        engine.rounds(2)
        if salt % 3 == 2:
            engine.abort(min(engine.requests))
    engine.run()
    arrows = {(state, target) for state, _, successors in transition_table() for target in successors}
    seen = {(name_of(source), name_of(target)) for source, target, count in engine.scheduler.snapshot().flows if count}
    assert seen <= arrows
    assert not {name for pair in seen for name in pair} & FUSED_ONLY_ABSENT
    assert {("PrefillDone", "Decoding"), ("Decoding", "Finished")} <= seen
    assert seen & {("Decoding", "Retracted"), ("Decoding", "Submitted")}, "nobody was retracted"
