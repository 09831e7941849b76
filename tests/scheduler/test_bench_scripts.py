"""The benchmark's adapter plays a workload to its end, and the cost curves are drawn as they were measured."""

import ast
import importlib.util
import sys
import xml.etree.ElementTree as ElementTree
from argparse import Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "scheduler" / "bench"


@dataclass
class StepView:
    """What the benchmark puts into the adapter's module."""

    rows: list = field(default_factory=list)
    acks: list = field(default_factory=list)
    aborted: list = field(default_factory=list)
    tokens: int = 0


def load(name: str, **given: object) -> ModuleType:
    """Loads a script as the benchmark does: with names put into its module before it runs."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(given)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_adapter_is_the_first_class_of_its_file() -> None:
    classes = [
        node.name for node in ast.parse((BENCH / "adapter.py").read_text()).body if isinstance(node, ast.ClassDef)
    ]
    assert classes[0] == "TokenSpeed"


@pytest.mark.parametrize("groups", ["full", "hybrid"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_the_adapter_plays_a_tight_pool_to_its_end(groups: str, overlap: int) -> None:
    sizes = {"n": 6, "page": 4, "budget": 24, "prompt": [10, 20], "out": 16, "snapshot": 1.0, "host": 1.0}
    options = Namespace(**sizes, overlap=overlap, mixed=1, groups=groups, clock="cpu")
    adapter = load("adapter", StepView=StepView).TokenSpeed(options, 30)
    requests = [(f"r{i}", list(range(i, i + 10 + 2 * i)), 0) for i in range(6)]
    assert adapter.submit(requests) > 0
    left = {name: 16 for name, _, _ in requests}
    views, acks, seen = [], [], set()
    for _ in range(500):
        view = adapter.read(adapter.plan())
        assert view.tokens == sum(tokens for _, _, tokens in view.rows) <= 24
        assert not view.aborted
        views.append(view)
        seen |= {name for name, _ in view.acks}
        results, finished = [], []
        while len(views) > (overlap if view.rows else 0):
            due = views.pop(0)
            acks += due.acks
            for name, kind, _ in due.rows:
                results.append((name, [7] if kind != "chunk" and name in left else []))
                if results[-1][1]:
                    left[name] -= 1
                if left.get(name) == 0:
                    finished.append(name)
                    del left[name]
        adapter.advance(results, finished, acks)
        acks = []
        if not left:
            break
    assert not left
    assert {"image_save", "restore", "write_back"} <= seen
    assert adapter.gauges()["decoding"] == adapter.gauges()["waiting"] == adapter.gauges()["retracted"] == 0


def test_the_curves_are_drawn_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    curves = load("cost_curves")
    lines = [curves.context(length, rounds=20) for length in (64, 1024)]
    assert all(line.step_us > 0 for line in lines)
    # Drawn is what two clearly different measurements would be: the real ones may be the same to a pixel.
    lines[1] = replace(lines[0], value=1024, step_us=2 * lines[0].step_us, step_p99_us=3 * lines[0].step_us)
    its = curves.Curve("title", "tokens", lines)
    text = curves.table([its])
    assert f"| 1,024 | {lines[1].step_us:.1f} | {lines[1].step_p99_us:.1f} | {lines[1].plan_us:.1f} |" in text
    root = ElementTree.fromstring(curves.svg([its, its]))
    space = "{http://www.w3.org/2000/svg}"
    drawn = [polyline.get("points", "").split() for polyline in root.iter(f"{space}polyline")]
    assert [len(points) for points in drawn] == [2, 2, 2, 2]
    heights = [float(point.split(",")[1]) for point in drawn[0]]
    assert heights[0] > heights[1], "the y axis of a picture points down"
    assert "1K" in {label.text for label in root.iter(f"{space}text")}
