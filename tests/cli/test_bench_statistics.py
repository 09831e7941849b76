"""Percentiles, goodput and concurrency against plain definitions of them."""

import itertools
from dataclasses import replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.cli.bench.answers import Answer
from tokenspeed.cli.bench.load import Outcome
from tokenspeed.cli.bench.statistics import Figures, parse_targets, peak_concurrency, percentile, summarize
from tokenspeed.cli.records import ServerError

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(values=VALUES, share=st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], share: float) -> None:
    assert percentile(sorted(values), share) == pytest.approx(float(numpy.percentile(values, share)), abs=1e-6)


@given(values=VALUES)
def test_percentiles_grow_and_stay_between_the_extremes(values: list[float]) -> None:
    ordered = sorted(values)
    found = [percentile(ordered, share) for share in range(101)]
    assert (found[0], found[-1]) == (ordered[0], ordered[-1])
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(found))


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    assert Figures.of([]) == Figures(0, 0, 0, 0, 0, 0, 0)


def test_figures_are_in_milliseconds() -> None:
    found = Figures.of([0.004, 0.001, 0.002, 0.003])
    assert (found.count, found.mean, found.p50, found.max) == (4, 2.5, 2.5, 4)


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), min_size=1, max_size=25)


@given(spans=SPANS)
def test_the_peak_is_the_most_at_any_moment(spans: list[tuple[int, int]]) -> None:
    answers = [Answer(begin, begin, ended=begin + length) for begin, length in spans]
    moments = [sum(begin <= moment < begin + length for begin, length in spans) for moment in range(41)]
    assert peak_concurrency(answers) == max(moments)


def answer(first: float, each: float, tokens: int = 5, **other: object) -> Answer:
    """Due at 0."""
    arrivals = [first + number * each for number in range(tokens)]
    made = Answer(0, 0, arrivals, arrivals[-1], prompt_tokens=10, completion_tokens=tokens)
    return replace(made, **other)  # type: ignore[arg-type]


def test_goodput_counts_who_met_every_target() -> None:
    answers = [answer(0.1, 0.01), answer(0.6, 0.01), answer(0.1, 0.1), answer(0.1, 0.01, error="status 500")]
    found = summarize(Outcome(0, answers=answers), load="", targets=parse_targets(["ttft:500", "tpot:50,e2e:1000"]))
    assert found.goodput is not None
    assert (found.goodput.met, found.goodput.share) == (1, 0.25)
    assert found.goodput.requests_per_s == pytest.approx(1 / 0.64)
    assert found.goodput.targets == {"ttft": 500, "tpot": 50, "e2e": 1000}
    # One token has no time between tokens.
    one = summarize(Outcome(0, answers=[answer(0.1, 9, tokens=1)]), load="", targets={"tpot": 1})
    assert one.goodput is not None and one.goodput.met == 1


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:-1", "ttft:nan", "itl:5", "500", "ttft:inf"])
def test_a_target_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ServerError, match=f"--goodput {text}: milliseconds for ttft, tpot or e2e"):
        parse_targets([text])


def test_a_server_that_does_not_count_is_counted_by_chunks() -> None:
    found = summarize(Outcome(0, answers=[answer(1, 1, prompt_tokens=None, completion_tokens=None)]), load="")
    assert (found.output_tokens, found.input_tokens, found.input_tokens_per_s, found.cached_share) == (
        5,
        None,
        None,
        None,
    )


def test_tokens_that_share_a_chunk_share_its_time() -> None:
    found = summarize(Outcome(0, answers=[answer(1, 1, tokens=5, completion_tokens=9)]), load="")
    assert (found.tpot_ms.p50, found.itl_ms.p50) == (500, 1000)
    assert (found.output_tokens, found.chunks) == (9, 5)


def test_the_whole_ends_with_the_last_token_and_not_with_the_stream() -> None:
    assert summarize(Outcome(0, answers=[answer(1, 1, ended=99.0)]), load="").e2e_ms.p50 == 5000


def test_answers_that_ended_early_are_counted() -> None:
    answers = [answer(1, 1, asked=5), answer(1, 1, asked=6), answer(1, 1, asked=9, completion_tokens=None)]
    # Where the server does not count, a chunk may be several tokens.
    assert summarize(Outcome(0, answers=answers), load="").short == 1


def test_turns_are_told_apart_with_what_came_from_a_cache() -> None:
    answers = [
        answer(1, 1, turn=0, cached_tokens=None),
        answer(2, 1, turn=0, cached_tokens=4),
        answer(3, 1, turn=1, cached_tokens=10),
    ]
    found = summarize(Outcome(0, answers=answers), load="", by_turn=True)
    assert [(turn.turn, turn.requests, turn.prompt_tokens, turn.cached) for turn in found.turns] == [
        (0, 2, 10, 0.2),
        (1, 1, 10, 1.0),
    ]
    assert [turn.ttft_ms.p50 for turn in found.turns] == [1500, 3000]
    assert found.cached_share == pytest.approx(14 / 30)


def test_nothing_at_all_is_no_error() -> None:
    found = summarize(Outcome(3, ended=4), load="", targets={"ttft": 1})
    assert (found.requests, found.completed, found.requests_per_s) == (0, 0, 0)
    assert found.goodput is not None and found.goodput.share == 0
