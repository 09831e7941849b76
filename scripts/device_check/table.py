"""The outcome as tables, for people."""

from rich.console import Console
from rich.table import Table

from scripts.device_check.results import WRONG, Document, Figure

_COLOURS = {"passed": "green", "left out": "yellow", "not here": "yellow"}


def shown_share(figure: Figure) -> str:
    """ "57 % of the copy ceiling", or nothing."""
    if figure.share is None:
        return ""
    return f"{figure.share:.0%} of the {figure.ceiling}".replace("of the reading", "of reading")


def shown_value(figure: Figure) -> str:
    """Three digits that count, and the unit."""
    return f"{figure.value:,.0f} {figure.unit}" if abs(figure.value) >= 100 else f"{figure.value:.3g} {figure.unit}"


def print_document(document: Document, console: Console) -> None:
    """Parts with what was found and what went wrong, then the figures."""
    device = document.device
    name = device.get("name", device["platform"])
    console.print(f"[bold]{name}[/bold] ({device['platform']}, driver {device['driver']}), {document.date}")
    parts = Table("part", "outcome", "seconds", "found")
    for part in document.parts:
        colour = _COLOURS.get(part.status, "red")
        right = sum(kernel.status == "right" for kernel in part.kernels)
        found = [f"{right} of {len(part.kernels)} kernels right"] if part.kernels else []
        found += part.checks + ([part.reason] if part.reason else [])
        found += [f"{kernel.kernel}: {kernel.status}" for kernel in part.kernels if kernel.status != "right"]
        parts.add_row(part.name, f"[{colour}]{part.status}[/{colour}]", f"{part.seconds:.0f}", "\n".join(found))
    console.print(parts)
    for part in document.parts:
        for kernel in part.kernels:
            for line in kernel.details:
                console.print(f"{kernel.kernel}: {line}", markup=False)
        if part.status in WRONG:
            for problem in part.problems:
                console.print(f"{part.name}: {problem}", markup=False)
    figures = Table("measured", "", "")
    for part in document.parts:
        for figure in part.figures:
            figures.add_row(figure.what, shown_value(figure), shown_share(figure))
    if figures.row_count:
        console.print(figures)
    console.print(f"{document.seconds:.0f} s of {document.budget:.0f} s; exit status {document.exit_status}")
