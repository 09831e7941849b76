"""Puts the files that scripts.device_check wrote into docs/performance.md, a section a device.

    python scripts/render_device_check.py FILE.json ...

Sections of devices that no file is about stay as they are.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.device_check.results import Document, PartResult  # noqa: E402
from scripts.device_check.table import shown_share, shown_value  # noqa: E402
from scripts.page_parts import with_part  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"


def markers(platform: str) -> tuple[str, str]:
    """Between which the section of a device stands; ``platform`` as current_platform().key has it."""
    return f"<!-- device check of {platform}: begin -->", f"<!-- device check of {platform}: end -->"


def _kernel_lines(parts: Sequence[PartResult]) -> list[str]:
    lines = ["| operation | kernel | numbers | cases | worst error, as a share of its bound |", "|---|---|---|---|---|"]
    kernels = sorted((k for part in parts for k in part.kernels), key=lambda k: (k.operation, k.kernel))
    for kernel in kernels:
        error = "" if kernel.error is None else f"{kernel.error:.2f}"
        lines.append(f"| {kernel.operation} | {kernel.kernel} | {kernel.status} | {kernel.cases} | {error} |")
    return lines if kernels else []


def section(document: Document) -> str:
    """What a document says, as Markdown."""
    device, versions = document.device, document.versions
    driven = ", ".join(f"{name} {number}" for name, number in versions.items())
    name = device.get("name", device["platform"])
    lines = [
        f"Run on {document.date} on {name} (driver {device['driver']}; {driven}), sizes {device['sizes']}, in "
        f"{document.seconds:.0f} s; exit status {document.exit_status}.",
        "",
        "| part | outcome | found |",
        "|---|---|---|",
    ]
    for part in document.parts:
        right = sum(kernel.status == "right" for kernel in part.kernels)
        found = [f"{right} of {len(part.kernels)} kernels right"] if part.kernels else []
        text = "; ".join([*found, *part.checks, *part.problems, *([part.reason] if part.reason else [])])
        cell = text.replace("|", "/").replace("\n", " ")
        lines.append(f"| {part.name} | {part.status} | {cell} |")
    figures = [figure for part in document.parts for figure in part.figures]
    if figures:
        lines += ["", "| measured | | |", "|---|---|---|"]
        lines += [f"| {figure.what} | {shown_value(figure)} | {shown_share(figure)} |" for figure in figures]
    kernels = _kernel_lines(document.parts)
    return "\n".join([*lines, *([""] if kernels else []), *kernels])


def with_section(page: str, document: Document) -> str:
    """The page with the section of the document's device; ValueError where the page has none for it."""
    return with_part(f"docs/{PAGE.name}", page, *markers(str(document.device["platform"])), section(document))


def main(paths: list[str]) -> int:
    """Rewrites the page; returns the exit status."""
    page = PAGE.read_text(encoding="utf-8")
    try:
        for path in paths:
            page = with_section(page, Document.read(Path(path)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
