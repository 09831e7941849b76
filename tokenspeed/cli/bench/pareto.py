"""``bench pareto``: what a layout gives each user, and what it gives all of them together."""

import asyncio
import json
import random
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenspeed.cli.bench.options import ServeOptions
from tokenspeed.cli.bench.report import SERVE_SCHEMA, SERVE_VERSION, ServeReport, client_facts, write_json
from tokenspeed.cli.bench.serve import measure
from tokenspeed.cli.bench.table import columns
from tokenspeed.cli.output import say, shout
from tokenspeed.cli.records import ServerError
from tokenspeed.cli.start import resolve_target
from tokenspeed.cli.temporary_server import temporary_server
from tokenspeed.recipes.machine import Machine, detect_machine
from tokenspeed.recipes.plan import make_plan
from tokenspeed.recipes.resolve import Resolution

PARETO_SCHEMA, PARETO_VERSION = "tokenspeed.bench.pareto", 1
_AS_IS = "as-is"


@dataclass(frozen=True, kw_only=True)
class ParetoOptions:
    """The options of the command; None: not given."""

    recipe: str | None
    profile: str | None
    layouts: tuple[str, ...]
    concurrency: str
    input_len: str | None
    output_len: str | None
    requests: int | None
    seed: int | None
    first_token_ms: float | None
    earlier: tuple[Path, ...]
    json: Path | None
    plot: Path | None
    dry_run: bool


@dataclass(frozen=True)
class Layout:
    """A recipe's profile with some keys set otherwise."""

    name: str
    assignments: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """From "name:key=value,key=value" or a bare name; raises ServerError."""
        name, _, rest = text.partition(":")
        assignments = tuple(part.strip() for part in rest.split(",") if part.strip())
        wrong = [part for part in assignments if "=" not in part]
        if not name.strip() or wrong:
            raise ServerError(f'--layout {text}: a name and keys of a recipe, as in "wide:scheduler.max_seqs=64"')
        return cls(name.strip(), assignments)


@dataclass(frozen=True)
class Point:
    """One load of one layout.

    Attributes:
        load: how many at once, or how many a second.
        user: tokens/s of a user, once its answer has begun: the reciprocal of the median time a token.
        device: generated tokens/s of all, for each device.
        first_token_ms: the median.
        optimal: no other point, of any layout, is better in one of the two and as good in the other.
    """

    load: str
    user: float
    device: float
    first_token_ms: float
    optimal: bool = False


@dataclass(frozen=True)
class Curve:
    """The points of one layout, in the order of their loads."""

    name: str
    devices: int
    points: tuple[Point, ...]
    model: str = ""
    workload: str = ""
    settings: Mapping[str, str] | None = None
    source: str = ""


def bench_pareto(options: ParetoOptions) -> int:
    """Measures the layouts of a recipe, or reads earlier measurements; returns the exit code."""
    if (options.recipe is None) == (not options.earlier):
        raise ServerError("bench pareto measures a RECIPE, or draws earlier measurements: --from FILE.json")
    if options.earlier and options.layouts:
        raise ServerError("--layout needs a RECIPE to lay out; what --from reads has been measured")
    if options.plot is not None:
        from tokenspeed.cli.bench.figures import require_plotting

        require_plotting(options.plot)
    code = 0
    if options.earlier:
        curves = [curve for path in options.earlier for curve in read_curves(path)]
    else:
        machine = detect_machine()
        resolved = _resolved(options, machine)
        if options.dry_run:
            for layout, resolution in resolved:
                keys = ", ".join(layout.assignments) or "as it is"
                say(f"would serve {resolution.served_name} as {layout.name}: {keys}")
            say(f"and load each with {options.concurrency} at once; nothing was started (dry run)")
            return 0
        curves, code = _measure_all(options, resolved)
    curves = mark_optimal(curves, options.first_token_ms)
    say(*render_curves(curves))
    if any(curve.model.endswith("-smoke") for curve in curves):
        shout("RANDOM WEIGHTS of small dimensions: these figures say nothing of the model it is named after")
    if options.json is not None:
        write_json(options.json, pareto_document(curves))
    if options.plot is not None:
        from tokenspeed.cli.bench.figures import draw_curves

        draw_curves(curves, options.plot)
    return code


def mark_optimal(curves: Sequence[Curve], first_token_ms: float | None = None) -> list[Curve]:
    """The same curves, whose optimal points say so.

    A layout that runs few requests at once and lets the others wait is fast for each that runs: points whose first
    token takes longer than ``first_token_ms`` do not count.
    """

    def counts(point: Point) -> bool:
        return first_token_ms is None or point.first_token_ms <= first_token_ms

    points = [point for curve in curves for point in curve.points if counts(point)]

    def beaten(point: Point) -> bool:
        return not counts(point) or any(
            other.user >= point.user
            and other.device >= point.device
            and (other.user > point.user or other.device > point.device)
            for other in points
        )

    return [
        replace(curve, points=tuple(replace(point, optimal=not beaten(point)) for point in curve.points))
        for curve in curves
    ]


def read_curves(path: Path) -> list[Curve]:
    """The curves in a file that ``bench serve`` or ``bench pareto`` wrote; raises ServerError, which names it."""
    try:
        found = json.loads(path.expanduser().read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ServerError(f"--from {path} cannot be read: {error}") from error
    kind = (found.get("schema"), found.get("version")) if isinstance(found, dict) else None
    try:
        if kind == (SERVE_SCHEMA, SERVE_VERSION):
            return [_curve_of(found, f"--from {path}")]
        if kind == (PARETO_SCHEMA, PARETO_VERSION):
            return [
                Curve(**{**item, "points": tuple(Point(**point) for point in item["points"])})
                for item in found["curves"]
            ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerError(f"--from {path}: it is damaged ({type(error).__name__}: {error})") from error
    raise ServerError(f"--from {path}: neither bench serve --json nor bench pareto --json of this version wrote it")


def _curve_of(document: dict[str, Any], source: str) -> Curve:
    """The curve of one run of ``bench serve``; raises ServerError where it has none."""
    devices = int(document["server"]["devices"])
    points = tuple(
        Point(
            load=level["load"],
            user=level["tokens_per_s_per_user"],
            device=level["output_tokens_per_s"] / devices,
            first_token_ms=level["ttft_ms"]["p50"],
        )
        for level in document["levels"]
        if level["tokens_per_s_per_user"] > 0
    )
    if not points:
        raise ServerError(f"{source}: no answer came in two chunks or more, so a user's tokens a second are not known")
    workload = document["workload"]["described"]
    return Curve(document["label"], devices, points, document["server"]["model"], workload, source=source)


def render_curves(curves: Sequence[Curve]) -> list[str]:
    """A table; a star marks what no other point beats."""
    rows = [["layout", "load", "tok/s each", "tok/s a device", "first token ms", "optimal"]]
    for curve in curves:
        for number, point in enumerate(curve.points):
            name = curve.name if number == 0 else ""
            figures = [f"{point.user:,.1f}", f"{point.device:,.1f}", f"{point.first_token_ms:,.0f}"]
            rows.append([name, point.load, *figures, "*" if point.optimal else ""])
    asked = {(curve.model, curve.workload) for curve in curves}
    lines = [f"{model}: {workload}" for model, workload in sorted(asked)]
    if len(asked) > 1:
        lines.append("note: these curves are of several models or workloads, so one is not the better of two layouts")
    return [*lines, *columns(rows)]


def pareto_document(curves: Sequence[Curve]) -> dict[str, Any]:
    """For JSON."""
    return {
        "schema": PARETO_SCHEMA,
        "version": PARETO_VERSION,
        "command": sys.argv[1:],
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "client": client_facts(detect_machine()),
        "curves": [asdict(curve) for curve in curves],
    }


def _resolved(options: ParetoOptions, machine: Machine) -> list[tuple[Layout, Resolution]]:
    """Every layout, checked before the first is started: a mistake in the last must not cost the others' time."""
    assert options.recipe is not None
    layouts = [Layout.parse(text) for text in options.layouts] or [Layout(_AS_IS, ())]
    names = [layout.name for layout in layouts]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ServerError(f"--layout: {', '.join(sorted(twice))} is there twice")
    found = []
    for layout in layouts:
        resolution = resolve_target(options.recipe, options.profile, list(layout.assignments), {}, machine)
        resolution.refuse_missing()
        make_plan(resolution, machine).refuse_misfit()
        found.append((layout, resolution))
    _serve_options(options, found[0][1]).loads()
    return found


def _measure_all(options: ParetoOptions, resolved: Sequence[tuple[Layout, Resolution]]) -> tuple[list[Curve], int]:
    """The curves, and 130 where it was interrupted: then those until then."""
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    curves: list[Curve] = []
    for layout, resolution in resolved:
        report = _measure(options, layout, resolution, seed)
        if any(level.summary.completed for level in report.levels):
            curve = _curve_of(report.document, f"layout {layout.name}")
            curves.append(replace(curve, source="", settings=_settings(layout)))
        for level in report.levels:
            for kind, count in level.summary.errors.items():
                shout(f"{layout.name}, {level.summary.load}: {count} x {kind}: {level.summary.error_details[kind]}")
        if report.interrupted:
            return curves, 130
    return curves, 0 if curves else 1


def _measure(options: ParetoOptions, layout: Layout, resolution: Resolution, seed: int) -> ServeReport:
    serve_options = replace(_serve_options(options, resolution), label=layout.name)
    assert options.recipe is not None
    arguments = ["serve", options.recipe, "--host", "127.0.0.1"]
    if resolution.profile:
        arguments += ["--profile", resolution.profile]
    for assignment in layout.assignments:
        arguments += ["--set", assignment]
    with temporary_server(arguments, resolution.name) as url:
        workload = serve_options.build(random.Random(seed))
        return asyncio.run(measure(serve_options, url, workload, serve_options.loads(), seed))


def _serve_options(options: ParetoOptions, resolution: Resolution) -> ServeOptions:
    return ServeOptions(
        key_file=resolution.keys.api.api_key_file or None,
        input_len=options.input_len,
        output_len=options.output_len,
        concurrency=options.concurrency,
        requests=options.requests,
        devices=_devices(resolution),
    )


def _devices(resolution: Resolution) -> int:
    """How many accelerators the layout takes; a CPU's ranks share the machine, which is one device."""
    loaded = resolution.loaded
    profile = loaded.recipe.profiles[resolution.profile] if loaded is not None else None
    if profile is None or profile.when.vendor == "cpu":
        return 1
    parallel = resolution.keys.parallel
    return parallel.tp * parallel.dp * parallel.pp


def _settings(layout: Layout) -> dict[str, str]:
    pairs = (assignment.partition("=") for assignment in layout.assignments)
    return {key: value for key, _, value in pairs}
