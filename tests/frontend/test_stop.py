"""Stop strings, against the plain way of looking for them in the whole text."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.frontend.stop import StopMatch, StopStringFinder

LETTERS = st.text(alphabet="abc", max_size=14)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=3)


def plainly(text: str, stops: list[str]) -> StopMatch | None:
    """The stop string that is complete first when the text is read character by character; of several the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return StopMatch(stop, end - len(stop), end)
    return None


@given(LETTERS, STOPS, st.lists(st.integers(0, 14)))
def test_any_text_cut_anywhere(text: str, stops: list[str], cuts: list[int]) -> None:
    finder = StopStringFinder(stops)
    expected = plainly(text, stops)
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    shown, match = "", None
    for start, end in pairwise(bounds):
        piece, match = finder.push(text[start:end])
        shown += piece
        assert finder.released == len(shown)
        if match is not None:
            break
    assert match == expected
    if match is None:
        shown += finder.finish()
        assert shown == text
    else:
        assert shown == text[: match.start]


@given(LETTERS, STOPS)
def test_no_more_is_held_than_could_become_a_stop(text: str, stops: list[str]) -> None:
    finder = StopStringFinder(stops)
    shown, match = finder.push(text)
    if match is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_over_several_pieces() -> None:
    finder = StopStringFinder(["</end>", "STOP"])
    assert finder.push("text </") == ("text ", None)
    assert finder.push("en") == ("", None)
    assert finder.push("cil </e") == ("</encil ", None)
    assert finder.push("nd> more") == ("", StopMatch("</end>", 13, 19))


def test_overlapping_stops_hide_both() -> None:
    finder = StopStringFinder(["xab", "ab"])
    assert finder.push("..xa") == ("..", None)
    assert finder.push("b") == ("", StopMatch("xab", 2, 5))
