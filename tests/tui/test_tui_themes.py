"""Themes: every style a render function names exists, can be read on its ground, and is never the only signal."""

import pytest
from rich.color import Color
from rich.console import Console
from rich.style import Style

from tokenspeed_tui.controls import Controls
from tokenspeed_tui.picture import Picture, advance
from tokenspeed_tui.render import render_screen
from tokenspeed_tui.themes import BACKGROUNDS, FOREGROUNDS, THEMES, other_theme

PAGES = ("main", "requests", "cache", "rates", "events", "configuration", "detail", "help")
FAINT = {"rule", "idle", "free", "elsewhere"}
"""Strokes and dots, which are not read letter by letter: a ratio of 3 is enough for them, see WCAG 2.1, 1.4.11."""


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG 2.1 defines it."""
    triplet = Color.parse(colour).get_truecolor()
    shares = [part / 255 for part in triplet]
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("name", ["dark", "light"])
def test_everything_can_be_read(name):
    ground = BACKGROUNDS[name]
    assert contrast(FOREGROUNDS[name], ground) >= 7
    own = {key: style for key, style in THEMES[name].styles.items() if key in THEMES["plain"].styles and "." not in key}
    for key in ours():
        style = own[key]
        if style.color is None:
            continue
        behind = style.bgcolor.name if style.bgcolor is not None else ground
        assert contrast(style.color.name, behind) >= (3 if key in FAINT else 4.5), (name, key)


def ours() -> set[str]:
    """Style names of the dashboard, without those that every theme of rich has."""
    return set(THEMES["plain"].styles) - set(Console()._theme_stack._entries[0])


def test_every_theme_has_the_same_names():
    assert {"held", "bad", "flow", "selected"} <= ours()
    for theme in THEMES.values():
        assert set(theme.styles) == set(THEMES["plain"].styles)


def test_render_functions_name_only_styles_that_exist(story):
    picture = Picture(url=story.url)
    for moment in (0.0, 1.0, 2.0):
        picture = advance(picture, story.observation(moment, configuration=story.configuration()))
    for size in ((120, 39), (80, 23), (40, 11)):
        for page in PAGES:
            for line in render_screen(picture, Controls(shown=page, selected=8), story.epoch, *size):
                named = {str(span.style) for span in line.spans if not isinstance(span.style, Style)}
                assert named - {""} <= ours(), (page, line.plain)


def test_without_colour_there_is_none():
    assert all(
        style.color is None and style.bgcolor is None for key, style in THEMES["plain"].styles.items() if key in ours()
    )


def test_the_theme_key_changes_between_dark_and_light_only():
    assert (other_theme("dark"), other_theme("light"), other_theme("plain")) == ("light", "dark", "plain")


def test_what_differs_by_colour_differs_by_letter_too(story):
    """For every cell of the busiest page: two meanings never share a letter."""
    picture = advance(Picture(url=story.url), story.observation())
    meanings: dict[str, set[str]] = {}
    for line in render_screen(picture, Controls(shown="cache"), story.epoch, 120, 39):
        for span in line.spans:
            if str(span.style) in ("held", "cached", "free", "pinned"):
                for letter in set(line.plain[span.start : span.end]) & set("█▒·◆"):
                    meanings.setdefault(letter, set()).add(str(span.style))
    assert meanings == {"█": {"held"}, "▒": {"cached"}, "·": {"free"}, "◆": {"pinned"}}
