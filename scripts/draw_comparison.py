"""Draws the comparison with other engines in the README from its figures.

    python scripts/draw_comparison.py [docs/benchmarks/cpu.json] [docs/images/comparison.svg]

The file of figures says how they were measured; the picture shows each column as a panel, one bar an engine, by the
precision of the weights.
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
COLUMNS = {
    "bs1_steady_tok_s": "decode, 1 stream (tok/s)",
    "bs8_steady_tok_s": "decode, 8 streams (tok/s)",
    "bs32_steady_tok_s": "decode, 32 streams (tok/s)",
    "prefill_tok_s": "prefill of 1024 (tok/s)",
    "peak_pss_MB": "memory (MB, less is better)",
    "ready_s": "ready (s, less is better)",
}
OURS = "tab:blue"
OTHERS = {"llama.cpp": "tab:gray", "vLLM": "tab:olive", "OpenVINO GenAI": "tab:brown"}


def draw(figures: dict[str, Any]) -> Figure:
    """One panel a column; bars in the order of the file."""
    engines = figures["engines"]
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    labels = [f"{engine['engine']} {engine['weights']}" for engine in engines]
    colours = [OTHERS.get(engine["engine"], OURS) for engine in engines]
    for axes, (column, title) in zip(figure.subplots(2, 3).flat, COLUMNS.items(), strict=True):
        values = [engine.get(column) or 0.0 for engine in engines]
        bars = axes.barh(range(len(engines)), values, color=colours)
        axes.bar_label(
            bars, labels=[f"{value:,.0f}" if value >= 10 else f"{value:.1f}" for value in values], fontsize=7
        )
        axes.set_title(title, fontsize=9)
        axes.set_yticks(range(len(engines)), labels, fontsize=7)
        axes.invert_yaxis()
        axes.tick_params(axis="x", labelsize=7)
        axes.margins(x=0.15)
        if column == "ready_s":
            axes.set_xscale("log")  # seconds beside minutes
    figure.suptitle(figures["title"], fontsize=10)
    return figure


def main() -> None:
    """Writes the picture."""
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/benchmarks/cpu.json"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs/images/comparison.svg"
    draw(json.loads(source.read_text("utf-8"))).savefig(
        target, metadata={"Date": None} if target.suffix == ".svg" else None
    )


if __name__ == "__main__":
    main()
