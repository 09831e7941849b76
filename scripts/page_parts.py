"""Parts of a page that a script writes, between two markers that stay where they are."""

import difflib
import sys
from pathlib import Path


def with_part(page: str, text: str, begin: str, end: str, body: str) -> str:
    """``text``, the content of ``page``, with ``body`` on lines of its own between the markers ``begin`` and ``end``.
    ValueError, naming the page and both, where they do not stand there once, one behind the other."""
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    if text.count(begin) != 1 or text.count(end) != 1 or end not in rest:
        raise ValueError(f"{page} lacks the markers {begin} and {end}, once each, between which the part goes")
    return f"{head}{begin}\n{body}\n{end}{tail}"


def write_or_compare(page: Path, wanted: str, *, check: bool, script: str) -> int:
    """Writes ``wanted``; with ``check`` nothing, but a diff, and what ``script`` to run, where the page says something
    else. Returns the exit status: 1 where it does."""
    if not check:
        page.write_text(wanted, encoding="utf-8")
        return 0
    text = page.read_text(encoding="utf-8")
    if text == wanted:
        return 0
    before, after = text.splitlines(keepends=True), wanted.splitlines(keepends=True)
    sys.stdout.writelines(difflib.unified_diff(before, after, "document", "made anew"))
    print(f"{page.name} is out of date: run scripts/{Path(script).name}")
    return 1
