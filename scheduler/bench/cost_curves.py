"""Draws what a step costs the scheduler against what must not matter: how many wait, and how long contexts are.

A step is plan() and the advance() that lands its result. Each point is a fresh scheduler with eight decoders (contexts)
or thirty-two (waiting), the best of several repeats; medians and 99th percentiles in microseconds of CPU time.

    python scheduler/bench/cost_curves.py [--svg docs/design/scheduler-cost.svg] [--rounds 300] [--repeats 3]
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from plan_cost import GRANULARITY, Line, Loop, best, make_scheduler, measure, random_prompt, waiting_for_blocks

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, GAP = 420, 300, 56, 46, 40, 24
COLOURS = {"median": "#1f77b4", "99th percentile": "#d95f02"}


@dataclass(frozen=True)
class Curve:
    """One panel: its title, the name of the x axis, and the measured lines."""

    title: str
    axis: str
    lines: list[Line]


def context(length: int, rounds: int) -> Line:
    """Eight decoders whose contexts are ``length`` tokens long."""
    random = np.random.default_rng(0)
    residents, new = 8, 4 * rounds
    blocks = residents * (-(-(length + new) // GRANULARITY) + 1)
    loop = Loop(make_scheduler(blocks=blocks, seqs=residents))
    for handle in range(residents):
        loop.submit(handle, random_prompt(random, length), new)
    loop.until_prefilled(set(range(residents)))
    return measure(loop, rounds, length)


def curve(
    title: str, axis: str, build: Callable[[int, int], Line], values: Sequence[int], rounds: int, repeats: int
) -> Curve:
    return Curve(title, axis, [best([build(value, rounds) for _ in range(repeats)]) for value in values])


def table(curves: Sequence[Curve]) -> str:
    """The curves as a Markdown table each."""
    parts = []
    for its in curves:
        rows = [
            f"| {its.axis} | step µs, median | step µs, 99th percentile | plan µs, median |",
            "|---:|---:|---:|---:|",
        ]
        rows += [f"| {x.value:,} | {x.step_us:.1f} | {x.step_p99_us:.1f} | {x.plan_us:.1f} |" for x in its.lines]
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def svg(curves: Sequence[Curve]) -> str:
    """The curves side by side over one scale of microseconds, which begins at 0."""
    highest = max(line.step_p99_us for its in curves for line in its.lines)
    top = _round_up(highest)
    width = len(curves) * (WIDTH + GAP)
    panels = [_panel(its, index * (WIDTH + GAP), top) for index, its in enumerate(curves)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}"'
            ' font-family="sans-serif" font-size="11" fill="#333">',
            f'<rect width="{width}" height="{HEIGHT}" fill="#fff"/>',
            *panels,
            "</svg>\n",
        ]
    )


def _panel(its: Curve, offset: int, top: float) -> str:
    def y(microseconds: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * microseconds / top

    # Even steps: the values are chosen to be a factor apart, and one of them may be 0.
    xs = [offset + LEFT + (WIDTH - LEFT) * (i + 0.5) / len(its.lines) for i in range(len(its.lines))]
    parts = [f'<text x="{offset + LEFT}" y="18" font-size="13" font-weight="bold">{its.title}</text>']
    for tick in range(6):
        at = top * tick / 5
        parts.append(
            f'<line x1="{offset + LEFT}" x2="{offset + WIDTH}" y1="{y(at):.1f}" y2="{y(at):.1f}" stroke="#ddd"/>'
            f'<text x="{offset + LEFT - 6}" y="{y(at) + 4:.1f}" text-anchor="end">{at:g}</text>'
        )
    for x, line in zip(xs, its.lines, strict=True):
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_short(line.value)}</text>')
    middle = offset + (LEFT + WIDTH) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{its.axis}; µs a step</text>')
    series = {"median": [x.step_us for x in its.lines], "99th percentile": [x.step_p99_us for x in its.lines]}
    for place, (name, values) in enumerate(series.items()):
        points = " ".join(f"{x:.1f},{y(value):.1f}" for x, value in zip(xs, values, strict=True))
        colour = COLOURS[name]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3" fill="{colour}"/>' for p in points.split()
        ]
        left = offset + LEFT + 110 * place
        parts.append(f'<line x1="{left}" x2="{left + 18}" y1="30" y2="30" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 23}" y="34">{name}</text>')
    return "\n".join(parts)


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20 ... above ``value``."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value)


def _short(value: int) -> str:
    """1024 as 1K where that is exact, else with commas."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if value >= size and value % size == 0:
            return f"{value // size}{unit}"
    return f"{value:,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300, help="steps that are timed for one point")
    parser.add_argument("--repeats", type=int, default=3, help="fresh schedulers for one point; the best counts")
    parser.add_argument("--svg", type=Path, help="write the picture here")
    arguments = parser.parse_args()
    rounds, repeats = arguments.rounds, arguments.repeats
    waiting = [0, 10, 100, 1000, 10_000]
    lengths = [1 << power for power in range(10, 21, 2)]
    curves = [
        curve(
            "32 decoders, a full pool, a line behind them",
            "requests that wait",
            waiting_for_blocks,
            waiting,
            rounds,
            repeats,
        ),
        curve("8 decoders", "context of each, tokens", context, lengths, rounds, repeats),
    ]
    print(table(curves))
    if arguments.svg:
        arguments.svg.write_text(svg(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
