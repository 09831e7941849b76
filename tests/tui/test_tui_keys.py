"""The page of keys is made of the bindings, and up to date; every answer it promises is there in two keys."""

import re
import subprocess
import sys
from pathlib import Path

from textual.binding import Binding

from tokenspeed_tui.controls import KeyWords
from tokenspeed_tui.dashboard import DashboardScreen
from tokenspeed_tui.keys import key_table, key_words
from tokenspeed_tui.operator import OperatorScreen

ROOT = Path(__file__).resolve().parents[2]


def test_the_document_is_up_to_date():
    checked = subprocess.run(
        [sys.executable, ROOT / "scripts" / "dashboard_keys.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout) == (0, "")


def test_a_key_that_is_not_in_the_document_is_noticed():
    table = key_table([*key_words(OperatorScreen.all_bindings()), KeyWords("w", "Wave", "greets")])
    assert table[-1] == "| `w` | Wave | greets |"
    assert table[-1] not in (ROOT / "docs" / "dashboard.md").read_text(encoding="utf-8")


def test_no_two_keys_are_the_same():
    keys = [
        key
        for binding in OperatorScreen.all_bindings()
        if isinstance(binding, Binding)
        for key in binding.key.split(",")
    ]
    assert len(keys) == len(set(keys))
    assert len(OperatorScreen.all_bindings()) == len(DashboardScreen.BINDINGS) + 3


def test_each_of_the_ten_questions_takes_two_keys_that_exist():
    text = (ROOT / "docs" / "dashboard.md").read_text(encoding="utf-8")
    section = text.partition("## Ten questions")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("|")][2:]
    assert len(rows) == 10
    known = {key.key for key in key_words(DashboardScreen.all_bindings())}
    for row in rows:
        keys = re.findall(r"`([^`]+)`", row.split("|")[2])
        assert 1 <= len(keys) <= 2, row
        assert set(keys) <= known, row
