"""The configuration: every key with its value and source, and memory as it was predicted and as it came out."""

import textwrap

from rich.cells import cell_len
from rich.text import Text

from tokenspeed_tui.configuration import ConfigurationView, KeyView
from tokenspeed_tui.controls import Controls
from tokenspeed_tui.picture import Picture
from tokenspeed_tui.render import text as t

DEFAULT_SOURCE = "default"
TOTAL = "sum"
LEAST_KEY_ROWS = 3
"""Rows that the keys keep, whatever the memory table would take."""
GAP = 2
LEAST_VALUE_WIDTH = 12
"""Cells that values keep beside long sources: numbers of bytes fit."""
TERM_WIDTH = 18
MOST_KERNEL_LINES = 6
TALL_ROWS = 30
FIGURE_WIDTH = 12


def render_configuration(picture: Picture, controls: Controls, now: float, width: int, rows: int) -> list[Text]:
    """The keys, those that something set first, from ``controls.scroll`` on; below them the memory table."""
    configuration = picture.configuration
    if configuration is None:
        lines = [t.title("Configuration", width, "Esc goes back")]
        lines += [t.line(part) for part in textwrap.wrap(_absence(picture, controls), max(width, 1))]
        return [t.cut(part, width) for part in lines][:rows]
    memory = [*_memory_lines(configuration, width), *_kernel_lines(picture, width, rows)]
    room = _key_rows(picture, rows, width)
    listed = _key_lines(configuration, width)
    first = min(max(controls.scroll, 0), last_scroll(picture, rows, width))
    age = max(0.0, now - configuration.started) if configuration.started is not None else None
    notes = [_count_words(configuration), _position_words(first, room, len(listed))]
    notes += [f"server started {t.duration(age)} ago", "Esc goes back"]
    lines = [t.title("Configuration", width, *filter(None, notes)), *listed[first : first + room], *memory]
    return [t.cut(part, width) for part in lines][:rows]


def last_scroll(picture: Picture, rows: int, width: int) -> int:
    """The largest ``scroll`` that still fills the room for keys, in a panel of ``rows`` lines of ``width`` cells."""
    configuration = picture.configuration
    if configuration is None:
        return 0
    return max(0, len(configuration.keys) - _key_rows(picture, rows, width))


def ordered_keys(configuration: ConfigurationView) -> tuple[list[KeyView], list[KeyView]]:
    """The keys that something set, and those at their default, each in the server's order."""
    given = [key for key in configuration.keys if key.source != DEFAULT_SOURCE]
    return given, [key for key in configuration.keys if key.source == DEFAULT_SOURCE]


def memory_rows(configuration: ConfigurationView) -> list[tuple[str, int | None, int | None]]:
    """(term, predicted, observed) of every term that either side knows, the sum last; None is unknown."""
    predicted, observed = configuration.predicted, configuration.observed
    terms = [name for name in {**predicted, **observed} if name != TOTAL]
    total = [TOTAL] if TOTAL in predicted or TOTAL in observed else []
    return [(name, predicted.get(name), observed.get(name)) for name in terms + total]


def deviation(predicted: int | None, observed: int | None) -> str:
    """How far the observed figure is from the predicted one, in per cent of that; a dash where that is unknown."""
    if predicted is None or observed is None or predicted <= 0:
        return t.DASH
    share = 100 * (observed / predicted - 1)
    return f"{share:+.1f} %" if abs(share) >= 0.05 else "0.0 %"


def _absence(picture: Picture, controls: Controls) -> str:
    """Why there is nothing to show."""
    if picture.configuration_error:
        return picture.configuration_error
    if controls.replaying:
        return "The recording holds no configuration up to here."
    return "The server has not told it yet."


def _key_rows(picture: Picture, rows: int, width: int) -> int:
    """Lines for keys below the title and above memory and kernels."""
    memory = len(_memory_lines(picture.configuration or ConfigurationView(), 1))
    return max(LEAST_KEY_ROWS, rows - 1 - memory - len(_kernel_lines(picture, width, rows)))


def _kernel_lines(picture: Picture, width: int, rows: int) -> list[Text]:
    """A title, and the kernel of each operation as far as they fit in a few lines."""
    kernels = picture.server.kernels if picture.server is not None else {}
    lines = [t.title("Kernels", width, t.counted(len(kernels), "operation") if kernels else "")]
    words = " · ".join(f"{operation} {kernel}" for operation, kernel in sorted(kernels.items())) or t.DASH
    most = MOST_KERNEL_LINES if rows >= TALL_ROWS else 1
    wrapped = textwrap.wrap(words, max(width, 1), max_lines=most, placeholder=f" {t.ELLIPSIS}", break_on_hyphens=False)
    return lines + [t.line((part, t.MUTED_STYLE)) for part in wrapped]


def _count_words(configuration: ConfigurationView) -> str:
    given, defaults = ordered_keys(configuration)
    return f"{len(given)} set, {len(defaults)} at their default"


def _position_words(first: int, room: int, count: int) -> str:
    return f"{first} above, {count - first - room} below" if count > room else ""


def _key_lines(configuration: ConfigurationView, width: int) -> list[Text]:
    """One line a key: what something set with its source, then the defaults without."""
    given, defaults = ordered_keys(configuration)
    names = _widest([key.key for key in given])
    room = width - names - 2 * GAP
    sources = min(_widest([key.source for key in given]), room - LEAST_VALUE_WIDTH)
    values = min(_widest([key.value for key in given]), room - sources)
    lines = [
        t.line(
            (t.fitted(t.word(key.key), names + GAP), t.TITLE_STYLE),
            (_ending(key.value, values) + " " * (GAP + max(0, values - cell_len(t.word(key.value)))), "accent"),
            # Of a source that is too long the end is worth more: it is the file's line.
            _ending(key.source, room - values),
        )
        for key in given
    ]
    names = _widest([key.key for key in defaults])
    return lines + [
        t.line((t.fitted(t.word(key.key), names + GAP) + _ending(key.value, width - names - GAP), "muted"))
        for key in defaults
    ]


def _widest(texts: list[str | None]) -> int:
    return max((cell_len(t.word(text)) for text in texts), default=0)


def _ending(text: str | None, width: int) -> str:
    """The text, or as much of its end as fits."""
    shown = t.word(text)
    return t.fitted(shown, min(width, cell_len(shown)), keep_end=True)


def _memory_lines(configuration: ConfigurationView, width: int) -> list[Text]:
    """A title with the table's heading, and a line a term."""
    rows = memory_rows(configuration)
    lines = [t.title("Memory", width, "of the rank, by the plan and by the engine after its start")]
    if not rows:
        return [*lines, t.line((f"{t.DASH} neither the plan nor the engine says anything of it", "muted"))]
    heading = t.fitted("term", TERM_WIDTH) + "".join(
        t.fitted(name, FIGURE_WIDTH, right=True) for name in ("predicted", "observed", "deviation")
    )
    lines.append(t.line((heading, "muted")))
    for name, predicted, observed in rows:
        figures = (t.size(predicted), t.size(observed), deviation(predicted, observed))
        style = t.TITLE_STYLE if name == TOTAL else ""
        cells = t.fitted(name, TERM_WIDTH) + "".join(t.fitted(part, FIGURE_WIDTH, right=True) for part in figures)
        lines.append(t.line((cells, style)))
    return lines
