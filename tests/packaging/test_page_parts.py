"""What scripts write into pages stands between markers, and everything else stays."""

from pathlib import Path

import pytest

from scripts.page_parts import with_part, write_or_compare

PAGE = "before\n<!-- a -->\nold\n<!-- end of a -->\nafter\n<!-- b -->\n<!-- end of b -->\n"


def test_only_the_part_between_its_markers_changes() -> None:
    assert with_part("p.md", PAGE, "<!-- a -->", "<!-- end of a -->", r"new \1") == PAGE.replace("old", r"new \1")
    assert with_part("p.md", PAGE, "<!-- a -->", "<!-- end of a -->", "old") == PAGE


@pytest.mark.parametrize("page", ["", PAGE + PAGE, "<!-- end of a -->\n<!-- a -->\n", "<!-- a -->\n"])
def test_markers_that_are_missing_or_not_alone_are_named(page: str) -> None:
    with pytest.raises(ValueError, match=r"p\.md lacks the markers <!-- a --> and <!-- end of a -->, once each"):
        with_part("p.md", page, "<!-- a -->", "<!-- end of a -->", "new")


def test_a_page_is_compared_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert write_or_compare(page, PAGE, check=True, script="here/make.py") == 0
    assert capsys.readouterr().out == ""
    assert write_or_compare(page, "new\n", check=True, script="here/make.py") == 1
    said = capsys.readouterr().out
    assert "-old\n" in said and "+new\n" in said and said.endswith("page.md is out of date: run scripts/make.py\n")
    assert page.read_text() == PAGE
    assert write_or_compare(page, "new\n", check=False, script="here/make.py") == 0
    assert page.read_text() == "new\n"
