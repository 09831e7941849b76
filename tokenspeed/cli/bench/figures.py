"""Pictures of what was measured, with matplotlib, which is an extra: ``require_plotting`` says how to get it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenspeed.cli.bench.mixture import Phase, phase_of
from tokenspeed.cli.bench.report import Level, MixtureLevel, ServeReport
from tokenspeed.cli.bench.statistics import percentile
from tokenspeed.cli.records import ServerError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tokenspeed.cli.bench.pareto import Curve

_SUFFIXES = (".png", ".svg", ".pdf")
_SHARES = [share / 2 for share in range(200)]
_PANELS = (("first token", "ttft"), ("each token after it", "tpot"), ("between chunks", "itl"), ("last token", "e2e"))
_COLOURS: dict[Phase | None, str] = {"before": "tab:green", "during": "tab:red", "after": "tab:blue", None: "tab:grey"}
_INCHES = (10, 6.5)


def require_plotting(path: Path) -> None:
    """Raises ServerError where no picture can be drawn, before anything is measured for it."""
    if path.suffix not in _SUFFIXES:
        raise ServerError(f"--plot {path}: a name that ends with {', '.join(_SUFFIXES)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        way_out = "pip install 'matplotlib>=3.9,<4' (the extra tokenspeed-appliance[plot])"
        raise ServerError(f"--plot needs matplotlib ({error}): {way_out}") from error


def draw_serve(report: ServeReport, path: Path) -> None:
    """Draws what fits the workload: a timeline, a curve over turns, or percentiles. Raises ServerError."""
    figure = new_figure()
    if report.mixture is not None:
        _timeline(figure, report.mixture)
    elif any(level.summary.turns for level in report.levels):
        _turns(figure, report.levels)
    else:
        _percentiles(figure, report.levels)
    figure.suptitle(f"{report.label}: {report.described}", fontsize=9, wrap=True)
    save(figure, path)


def draw_curves(curves: "Sequence[Curve]", path: Path) -> None:
    """Draws throughput of a device against tokens/s of a user, and rings what no other point beats."""
    figure = new_figure()
    axes = figure.subplots()
    for curve in curves:
        users, devices = [point.user for point in curve.points], [point.device for point in curve.points]
        axes.plot(users, devices, marker="o", label=curve.name)
        for point in curve.points:
            axes.annotate(point.load, (point.user, point.device), xytext=(4, 4), textcoords="offset points", fontsize=7)
    best = sorted((point.user, point.device) for curve in curves for point in curve.points if point.optimal)
    users, devices = [user for user, _ in best], [device for _, device in best]
    axes.scatter(users, devices, s=120, facecolors="none", edgecolors="black", label="optimal")
    titles = sorted({f"{curve.model}: {curve.workload}" for curve in curves})
    _dress(axes, "\n".join(titles), "tokens/s of a user", "tokens/s of a device")
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    save(figure, path)


def new_figure() -> "Figure":
    """An empty picture."""
    from matplotlib.figure import Figure

    return Figure(figsize=_INCHES, layout="constrained")


def save(figure: "Figure", path: Path) -> None:
    """Writes the picture in the form its name says; raises ServerError."""
    try:
        figure.savefig(path.expanduser(), dpi=120)
    except OSError as error:
        raise ServerError(f"--plot {path} cannot be written: {error.strerror}") from error


def _percentiles(figure: "Figure", levels: Sequence[Level]) -> None:
    """One panel a time, one line a load."""
    panels = figure.subplots(2, 2).flat
    for axes, (title, name) in zip(panels, _PANELS, strict=True):
        for level in levels:
            ordered = _samples(level, name)
            if ordered:
                axes.plot(_SHARES, [percentile(ordered, share) for share in _SHARES], label=level.summary.load)
        _dress(axes, title, "per cent of them", "ms")
        axes.set_ylim(bottom=0)


def _samples(level: Level, name: str) -> list[float]:
    good = [answer for answer in level.outcome.answers if answer.ok]
    match name:
        case "ttft":
            seconds = [answer.first_token_s for answer in good]
        case "tpot":
            seconds = [value for answer in good if (value := answer.each_token_s) is not None]
        case "itl":
            seconds = [gap for answer in good for gap in answer.gaps_s]
        case _:
            seconds = [answer.whole_s for answer in good]
    return sorted(1000 * value for value in seconds)


def _turns(figure: "Figure", levels: Sequence[Level]) -> None:
    """Above the time to the first token of each turn, below how much of the prompt came from a cache."""
    above, below = figure.subplots(2, 1, sharex=True)
    for level in levels:
        turns = level.summary.turns
        places = [turn.turn + 1 for turn in turns]
        line = above.plot(places, [turn.ttft_ms.p50 for turn in turns], marker="o", label=level.summary.load)[0]
        highs = [turn.ttft_ms.p90 for turn in turns]
        above.fill_between(places, [turn.ttft_ms.p50 for turn in turns], highs, alpha=0.2, color=line.get_color())
        known = [(turn.turn + 1, 100 * turn.cached) for turn in turns if turn.cached is not None]
        below.plot([place for place, _ in known], [share for _, share in known], marker="o", label=level.summary.load)
    _dress(above, "first token, median to 90th percentile", "", "ms")
    _dress(below, "of the prompt from a cache", "turn", "%")
    below.xaxis.get_major_locator().set_params(integer=True)
    above.set_ylim(bottom=0)
    below.set_ylim(0, 100)


def _timeline(figure: "Figure", level: MixtureLevel) -> None:
    """Every gap of every stream at the moment it ended, and when the long prompts were computed."""
    axes = figure.subplots()
    began, spans = level.outcome.began, level.outcome.spans
    for begin, end in spans:
        axes.axvspan(begin - began, end - began, color="tab:red", alpha=0.1)
    pairs = [
        pair for answer in level.outcome.streams for pair in zip(answer.arrivals, answer.arrivals[1:], strict=False)
    ]
    for phase, colour in _COLOURS.items():
        chosen = [pair for pair in pairs if phase_of(*pair, level.outcome.steady, spans) == phase]
        found = [(later - began, 1000 * (later - sooner)) for sooner, later in chosen]
        if found:
            axes.scatter(
                [at for at, _ in found], [gap for _, gap in found], s=5, color=colour, label=phase or "neither"
            )
    _dress(axes, "time between chunks of the streams; shaded: a long prompt until its first token", "s", "ms")
    axes.set_yscale("log")


def _dress(axes: "Axes", title: str, across: str, up: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
