"""The device check on the CPU: its parts, what becomes of crashes and want of time, and the page made of its file."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts import render_device_check
from scripts.device_check import __main__ as command
from scripts.device_check import bandwidth, engines, graphs, isolation, large_model, numerics, plan, served
from scripts.device_check.isolation import Child, run_child, run_family_isolated, run_isolated
from scripts.device_check.results import Document, Figure, KernelOutcome, NotHere, PartResult
from scripts.device_check.target import Target
from tokenspeed.recipes.catalogue import load_recipe
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed_kernel.records import read_records

ROOT = Path(__file__).parents[2]
TINY = Target("cpu", "tiny")


def document(*parts: PartResult) -> Document:
    device = {"platform": "nvidia-sm_90", "driver": "570.1", "sizes": "full", "name": "A GPU"}
    return Document("2026-11-30T15:00:00+00:00", 100.0, 480.0, device, {"torch": "2.13.0"}, parts)


RIGHT = PartResult(
    "numerics of norm",
    kernels=[KernelOutcome("a_kernel", "norm.rms", "right", 5, 0.25, (), {"kernel": "a_kernel", "error": 0.25})],
)
MEASURED = PartResult(
    "bandwidth", figures=[Figure("decode", 3100.5, "GB/s", 0.775, "copy ceiling"), Figure("a copy", 4.0, "TB/s")]
)

# ---------------------------------------------------------------- the document


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (["passed", "not here"], 0),
        (["passed", "failed", "left out"], 1),
        (["crashed"], 1),
        (["out of time"], 1),
        (["passed", "left out"], 3),
        (["not here"], 2),
        ([], 2),
    ],
)
def test_the_exit_status_tells_wrong_from_left_out(statuses, expected):
    assert document(*(PartResult(f"part {i}", status) for i, status in enumerate(statuses))).exit_status == expected


def test_a_document_is_read_as_it_was_written(tmp_path):
    written = document(RIGHT, MEASURED)
    written.write(tmp_path / "found.json")
    assert Document.read(tmp_path / "found.json") == written
    values = json.loads((tmp_path / "found.json").read_text())
    (tmp_path / "found.json").write_text(json.dumps({**values, "format": 0}))
    with pytest.raises(ValueError, match=r"found\.json: not a device check: its format is 0, this reads 1"):
        Document.read(tmp_path / "found.json")


def test_parts_with_problems_or_wrong_kernels_fail():
    assert PartResult("one", problems=["it is wrong"]).settle().reason == "it is wrong"
    for status in ("wrong", "crashed", "not verified"):
        settled = replace(RIGHT, kernels=[replace(RIGHT.kernels[0], status=status)]).settle()
        assert (settled.status, settled.reason) == ("failed", f"a_kernel is {status}")
    assert replace(RIGHT).settle().status == "passed"


def test_the_page_gets_the_section_of_its_device_and_keeps_the_others():
    begin, end = render_device_check.markers("nvidia-sm_90")
    page = f"before\n{begin}\nnot run yet\n{end}\nbetween\n<!-- device check of amd-gfx950: begin -->\nkept"
    made = render_device_check.with_section(page, document(RIGHT, MEASURED))
    assert (
        made.startswith(f"before\n{begin}\nRun on 2026-11-30") and made.endswith("kept") and "not run yet" not in made
    )
    assert "| norm.rms | a_kernel | right | 5 | 0.25 |" in made
    assert "| decode | 3,100 GB/s | 78% of the copy ceiling |" in made and "| a copy | 4 TB/s |  |" in made
    assert render_device_check.with_section(made, document(RIGHT, MEASURED)) == made
    with pytest.raises(ValueError, match="lacks the markers <!-- device check of nvidia-sm_90: begin -->"):
        render_device_check.with_section("nothing", document())


def test_the_page_has_a_section_for_every_device_that_is_meant():
    page = render_device_check.PAGE.read_text()
    for platform in ("nvidia-sm_90", "nvidia-sm_100", "amd-gfx950"):
        begin, end = render_device_check.markers(platform)
        assert page.count(begin) == page.count(end) == 1


# ---------------------------------------------------------------- parts


def test_the_numerics_of_a_family_leave_records_that_selection_reads(tmp_path):
    found = numerics.run_family("hyper")
    assert found.status == "passed" and len(found.kernels) > 3
    command.write_records(tmp_path / "records.json", command.verified([found]))
    assert {record.kernel for record in read_records(tmp_path / "records.json")} == {k.kernel for k in found.kernels}
    assert numerics.run_family("hyper", passed_over=frozenset(k.kernel for k in found.kernels)).kernels == []


def test_decode_is_measured_and_must_give_numbers(monkeypatch):
    found = bandwidth.run(TINY)
    assert found.status == "passed" and len(found.figures) == 5 and all(figure.value > 0 for figure in found.figures)
    make = bandwidth.grouped_decode

    def spoilt(*arguments):
        decode = make(*arguments)
        decode.arguments[1].fill_(torch.nan)
        return decode

    monkeypatch.setattr(bandwidth, "grouped_decode", spoilt)
    assert "values that are not finite" in bandwidth.run(TINY).reason


def test_a_replay_that_differs_is_a_problem(monkeypatch):
    result = PartResult("graphs")
    graphs.compare_step(TINY, result)
    assert result.checks == ["a replayed step of 5 kernels has the bits of the plain one"] and not result.problems
    monkeypatch.setattr(graphs, "record", lambda target, step: lambda: step.x.add_(1.0))
    graphs.compare_step(TINY, result)
    assert "a replayed step differs from the plain one by up to" in result.problems[0]


def test_the_large_model_has_the_layers_that_time_allows():
    assert large_model.layers_within(large_model.BESIDE_SECONDS) == large_model.FEW_LAYERS
    assert large_model.layers_within(1e9) == large_model.WHOLE_LAYERS
    eight = read_model_config(engines.random_llama(TINY, "8b").model)
    assert large_model.parameters_of(eight) == 32 * (2 * 40 * 128 * 4096 + 3 * 4096 * 14336) + 128256 * 4096


@pytest.mark.parametrize(("kind", "vendor"), [("cpu", "cpu"), ("cuda", "nvidia"), ("npu", "npu")])
def test_the_smoke_model_is_served_on_the_target(tmp_path, kind, vendor):
    arguments = served.serve_arguments(Target(kind, "full"), tmp_path)
    recipe, profile = arguments[1], arguments[arguments.index("--profile") + 1]
    assert load_recipe(Path(recipe)).recipe.profiles[profile].when.vendor == vendor


def test_what_a_part_raises_is_its_reason():
    def missing(*_):
        raise NotHere("no such thing")

    def broken(*_):
        raise RuntimeError("out of order")

    parts = [plan.run_here(plan.Part("a part", 0, 1, run), TINY, {}, 1.0) for run in (missing, broken)]
    assert [(p.status, p.reason) for p in parts] == [
        ("not here", "no such thing"),
        ("failed", "RuntimeError: out of order"),
    ]


# ---------------------------------------------------------------- processes and time


def test_a_kernel_that_ends_its_process_costs_itself_and_no_other(monkeypatch):
    """The first process dies in the second kernel; the next one goes on behind it."""
    names = [kernel.spec.name for kernel in numerics.kernels_here("hyper")]
    asked = []

    def child(arguments, limit, environment):
        options = dict(zip(arguments[::2], arguments[1::2], strict=True))
        asked.append(options["--done"])
        progress = numerics.Progress(Path(options["--progress"]))
        if len(asked) == 1:
            progress.note([KernelOutcome(names[0], "hyper.x", "right", 1)], names[1])
            return Child(None, "killed by SIGSEGV", "its last words")
        done = [KernelOutcome(name, "hyper.x", "right", 1) for name in names[2:]]
        progress.note(done, "")
        return Child(PartResult("numerics of hyper", kernels=done), "ended", "")

    monkeypatch.setattr(isolation, "run_child", child)
    found = run_family_isolated("hyper", [], 60.0, {})
    assert asked == ["", ",".join(names[:2])]
    assert [kernel.status for kernel in found.kernels] == ["right", "crashed", *["right"] * (len(names) - 2)]
    assert found.status == "failed" and found.kernels[1].details == ("killed by SIGSEGV: its last words",)


def test_kernels_that_time_did_not_reach_are_named(monkeypatch):
    monkeypatch.setattr(isolation, "run_child", lambda *_: Child(None, "out of time", ""))
    found = run_family_isolated("hyper", [], 5.0, {})
    assert found.status == "out of time" and {kernel.status for kernel in found.kernels} == {"not reached"}
    assert "kernels were not reached within 5 s" in found.reason
    everything = [KernelOutcome(kernel.spec.name, "hyper.x", "right", 1) for kernel in numerics.kernels_here("hyper")]

    def ended_late(arguments, limit, environment):
        numerics.Progress(Path(arguments[arguments.index("--progress") + 1])).note(everything, "")
        return Child(None, "out of time", "")

    monkeypatch.setattr(isolation, "run_child", ended_late)
    assert run_family_isolated("hyper", [], 5.0, {}).status == "passed"


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        ("killed by SIGABRT", "crashed", "killed by SIGABRT: last words"),
        ("out of time", "out of time", "it took more than 9 s; last words"),
    ],
)
def test_a_part_whose_process_left_nothing_says_how_it_ended(monkeypatch, end, status, reason):
    monkeypatch.setattr(isolation, "run_child", lambda *_: Child(None, end, "last words"))
    found = run_isolated("graphs", [], 9.0, {})
    assert (found.status, found.reason) == (status, reason)


def test_parts_without_time_are_left_out_and_ceilings_reach_those_behind(monkeypatch):
    given = {}

    def isolated(name, arguments, limit, environment):
        given[name] = arguments[-1], limit, environment
        return PartResult(name, ceilings={"copy": 2.0} if name == "bandwidth" else {})

    monkeypatch.setattr(plan, "run_isolated", isolated)
    names = [part.name for part in plan.PARTS]
    told = []
    found = list(plan.Plan(TINY, names, 40.0, 1).run(told.append))
    assert [part.status for part in found] == ["passed", "passed", "passed", "left out"]
    assert told == names[:3] and "it takes 60 s" in found[3].reason
    assert given["bandwidth"][0] == "" and given["graphs"][0] == "copy=2.0"
    assert given["graphs"][1] <= 40.0 and given["graphs"][2] == {"TOKENSPEED_KERNEL_DEVICE": "cpu"}


@pytest.mark.parametrize("arguments", [[], ["--platform", "cuda"]])
def test_without_an_accelerator_it_says_so(monkeypatch, capsys, arguments):
    monkeypatch.setattr(command, "found_kind", lambda: None)
    assert command.main(arguments) == 2
    assert "no such accelerator here; --platform cpu runs the same parts" in capsys.readouterr().err


CRASHING = """
import os
from tokenspeed_kernel.ops.norm import NORM_SIGNATURE
from tokenspeed_kernel.registry import Band, KernelSpec, register_kernel


def register():
    spec = KernelSpec(
        name="a_crash", family="norm", mode="rms", solution="crash", signatures=frozenset({NORM_SIGNATURE}),
        band=Band.PORTABLE,
    )
    register_kernel(spec)(lambda *arguments: os.abort())
"""
PROJECT = """
[project]
name = "crashing-kernels"
version = "1.0"
[project.entry-points."tokenspeed_kernel.plugins"]
crash = "crashing_kernels:register"
"""


@pytest.mark.long
def test_a_real_crash_in_a_real_process(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "crashing_kernels").mkdir()
    (tmp_path / "crashing_kernels" / "__init__.py").write_text(CRASHING)
    monkeypatch.setenv("TOKENSPEED_KERNEL_PLUGIN_PATH", str(tmp_path))
    monkeypatch.chdir(ROOT)
    path = tmp_path / "found.json"
    arguments = ["--platform", "cpu", "--part", "numerics", "--jobs", "2", "--output", str(path)]
    child = run_child_of_the_command(arguments)
    found = {part.name: part for part in Document.read(path).parts}
    norms = {kernel.kernel: kernel for kernel in found["numerics of norm"].kernels}
    assert child == 1 and norms["a_crash"].status == "crashed" and "SIGABRT" in norms["a_crash"].details[0]
    assert {kernel.status for name, kernel in norms.items() if name != "a_crash"} == {"right"}
    assert {part.status for name, part in found.items() if name != "numerics of norm"} == {"passed"}


def run_child_of_the_command(arguments):
    ended = subprocess.run([sys.executable, "-m", "scripts.device_check", *arguments], cwd=ROOT, check=False)
    return ended.returncode


@pytest.mark.long
def test_what_takes_too_long_is_interrupted(monkeypatch):
    monkeypatch.chdir(ROOT)
    child = run_child(["--run-part", "large model", "--platform", "cpu", "--sizes", "tiny"], 1.0, {})
    assert child.end == "out of time"  # a result too, where it had one before it took notice


@pytest.mark.long
def test_every_other_part_on_the_cpu(tmp_path):
    path = tmp_path / "found.json"
    names = [word for part in plan.PARTS for word in ("--part", part.name)]
    assert run_child_of_the_command(["--platform", "cpu", "--output", str(path), *names]) == 0
    assert [part.status for part in Document.read(path).parts] == ["passed"] * len(plan.PARTS)
