"""Pictures and tables of docs/dashboard.md: drawn from the demo, the same each time; made from the bindings."""

import asyncio
import sys
from pathlib import Path

import pytest

from tokenspeed_tui.fleet import FleetScreen
from tokenspeed_tui.keys import key_table, key_words
from tokenspeed_tui.watch import OWN_KEYS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from scripts import dashboard_screenshot

    yield dashboard_screenshot
    sys.modules.pop("scripts.dashboard_screenshot", None)


def test_a_picture_is_the_same_each_time(pictures):
    picture = pictures.Picture("any", ("enter",), (80, 24))
    drawn = {
        asyncio.run(pictures.draw(picture, pictures.demo_source(), "the demo", looks=2, behind=1)) for _ in range(2)
    }
    (svg,) = drawn
    words = svg.replace("&#160;", " ")
    assert all(f">{name}<" in words for name in ("Request", "Why", "Life"))
    assert "agent-" in words
    assert "font-face" not in svg


@pytest.mark.long
def test_servers_and_a_journal_are_drawn_too(pictures):
    fleet = asyncio.run(pictures.draw_fleet((110, 10), looks=1)).replace("&#160;", " ")
    assert all(url.removeprefix("http://") in fleet for url in pictures.SERVERS)
    replay = asyncio.run(pictures.draw_replay((120, 40))).replace("&#160;", " ")
    assert "retracted " in replay


def test_every_picture_that_documents_show_is_drawn(pictures):
    shown = {
        path.stem
        for document in (ROOT / "README.md", ROOT / "docs" / "dashboard.md", ROOT / "docs" / "journal.md")
        for path in map(Path, document.read_text().replace("(", " ").replace(")", " ").split())
        if path.suffix == ".svg" and path.stem.startswith("dashboard")
    }
    assert {"dashboard", "dashboard-replay"} <= shown <= set(pictures.NAMES)
    assert all((pictures.IMAGES / f"{name}.svg").exists() for name in shown)


@pytest.mark.parametrize("bindings", [FleetScreen.BINDINGS, list(OWN_KEYS)])
def test_the_keys_of_these_screens_are_in_the_document(bindings):
    assert "\n".join(key_table(key_words(bindings))) in (ROOT / "docs" / "dashboard.md").read_text(encoding="utf-8")
