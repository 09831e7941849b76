"""Figures and strips as the screen shows them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_tui.render import text as t


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (t.count(None), "–"), (t.count(0), "0"), (t.count(12_345), "12,345"), (t.count(99_999), "99,999"),
        (t.count(100_000), "100k"), (t.count(1_234_567), "1.2M"),
        (t.count(999_999), "1.0M"), (t.count(3 * 10**9), "3.0G"),
        (t.rate(None), "–"), (t.rate(0.0), "0"), (t.rate(0.01), "<0.1"), (t.rate(1.26), "1.3"), (t.rate(412.4), "412"),
        (t.milliseconds(None), "–"), (t.milliseconds(0.0), "0.00"), (t.milliseconds(31.44), "31.4"),
        (t.percent(None), "–"), (t.percent(0.0), "0 %"), (t.percent(0.404), "40 %"),
        (t.duration(None), "–"), (t.duration(0.42), "0.4 s"), (t.duration(42), "42 s"), (t.duration(184), "3m 04s"),
        (t.duration(3_725), "1h 02m"), (t.duration(190_000), "2d 4h"),
        (t.size(None), "–"), (t.size(512), "512 B"), (t.size(2_949_120), "2.8 MiB"),
        (t.word(""), "–"), (t.word(None), "–"),
        (t.fitted("Decoding", 5), "Deco…"), (t.fitted("Decoding", 5, keep_end=True), "…ding"),
        (t.fitted("7", 3, right=True), "  7"),
        (t.fitted("日本語", 4), "日 …"), (t.fitted("日本語", 4, keep_end=True), "… 語"),
        (t.sparkline((0.0, 4.0, 8.0), 8), "·▅█"), (t.sparkline((), 8), ""), (t.sparkline((0.0, 0.0), 8), "··"),
    ],
)  # fmt: skip
def test_figures(shown, expected):
    assert shown == expected


@given(amounts=st.lists(st.integers(0, 10**9), min_size=1, max_size=6), cells=st.integers(0, 200))
def test_shares_fill_the_strip_and_show_whatever_exists(amounts, cells):
    dealt = t.shares(amounts, cells)
    assert sum(dealt) == (cells if sum(amounts) else 0)
    for amount, number in zip(amounts, dealt, strict=True):
        assert number >= 0
        assert amount > 0 or number == 0
        if amount > 0 and cells >= len(amounts):
            assert number > 0


@given(amounts=st.lists(st.integers(1, 1000), min_size=1, max_size=4))
def test_shares_are_in_proportion(amounts):
    for amount, number in zip(amounts, t.shares(amounts, 400), strict=True):
        assert abs(number - 400 * amount / sum(amounts)) <= len(amounts)


@given(text=st.text(max_size=30), width=st.integers(0, 20), keep_end=st.booleans())
def test_fitted_text_has_exactly_the_width(text, width, keep_end):
    from rich.cells import cell_len

    from tokenspeed_tui.view import clean

    assert cell_len(t.fitted(clean(text), width, keep_end=keep_end)) == width


def test_a_title_drops_notes_that_do_not_fit():
    assert t.title("Rates", 20, "short", "much too long").plain == "── Rates ── short ──"
    assert t.title("Rates", 18, "short").plain == "── Rates ── short "
    assert t.title("Rates", 17, "short").plain == "── Rates ────────"
