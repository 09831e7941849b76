"""``bench pareto``: which points nothing beats, layouts from one server each, and curves of earlier measurements."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
import pytest
from command_line import Command
from hypothesis import given
from hypothesis import strategies as st
from running_server import run_cli
from stand_in_endpoint import Manner, stand_in

from tokenspeed.cli.bench import pareto
from tokenspeed.cli.bench.pareto import Curve, Layout, Point, mark_optimal, read_curves, render_curves
from tokenspeed.cli.records import ServerError

POINTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


def curve(name: str, *points: tuple[float, float]) -> Curve:
    made = tuple(Point(f"{number + 1} at once", user, device, 10.0) for number, (user, device) in enumerate(points))
    return Curve(name, 1, made, "a-model", "prompts")


@given(first=POINTS, second=POINTS)
def test_a_point_is_optimal_where_no_other_is_better_in_both(
    first: list[tuple[float, float]], second: list[tuple[float, float]]
) -> None:
    marked = [point for one in mark_optimal([curve("a", *first), curve("b", *second)]) for point in one.points]
    best = {(point.user, point.device) for point in marked if point.optimal}
    assert best
    for point in marked:
        beaten = any(
            (other.user, other.device) != (point.user, point.device)
            and other.user >= point.user
            and other.device >= point.device
            for other in marked
        )
        assert point.optimal is not beaten
    # In the order of users' speeds the best ones fall.
    assert [device for _, device in sorted(best)] == sorted((device for _, device in best), reverse=True)


TABLE = """\
a-model: prompts
layout       load  tok/s each  tok/s a device  first token ms  optimal
narrow  1 at once        90.0            90.0              10        *
        2 at once        60.0           120.0              10        *
wide    1 at once        80.0            80.0              10
        2 at once        50.0         1,100.0              10        *"""


def test_the_table() -> None:
    curves = mark_optimal([curve("narrow", (90, 90), (60, 120)), curve("wide", (80, 80), (50, 1100))])
    assert "\n".join(render_curves(curves)) == TABLE


def test_a_point_that_makes_users_wait_may_be_left_out() -> None:
    waits = Curve("w", 1, (Point("1 at once", 90, 90, 500.0),))
    (marked, other) = mark_optimal([waits, curve("a", (80, 80))], first_token_ms=100)
    assert [point.optimal for point in (*marked.points, *other.points)] == [False, True]
    (marked, other) = mark_optimal([waits, curve("a", (80, 80))])
    assert [point.optimal for point in (*marked.points, *other.points)] == [True, False]


def test_curves_of_different_things_are_not_compared_in_silence() -> None:
    other = Curve("other", 1, curve("x", (1, 1)).points, "another-model", "prompts")
    lines = render_curves([curve("a", (1, 1)), other])
    assert lines[2].startswith("note: these curves are of several models or workloads")


def test_layouts_are_read() -> None:
    assert Layout.parse("as-is") == Layout("as-is", ())
    assert Layout.parse("w:kv.dtype=bfloat16, scheduler.max_seqs=4") == Layout(
        "w", ("kv.dtype=bfloat16", "scheduler.max_seqs=4")
    )
    for text in ("", ":a=1", "w:a"):
        with pytest.raises(ServerError, match=f"--layout {text}: a name and keys of a recipe"):
            Layout.parse(text)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of the servers that are started; a stand-in answers for each."""
    started: list[list[str]] = []

    @contextmanager
    def start(arguments: list[str], name: str) -> Iterator[str]:
        started.append(arguments)
        with stand_in(Manner(pause_s=0.002)) as url:
            yield url

    monkeypatch.setattr(pareto, "temporary_server", start)
    return started


def test_each_layout_is_served_and_loaded(servers: list[list[str]], tokenspeed: Command, tmp_path: Path) -> None:
    written, picture = tmp_path / "p.json", tmp_path / "p.svg"
    done = tokenspeed(
        "bench", "pareto", "smollm2-135m", "--profile", "smoke", "--layout", "as-is",
        "--layout", "few:scheduler.max_seqs=4,kv.dtype=bfloat16", "-c", "1,2", "-n", "3", "--input-len", "9",
        "--output-len", "5", "--json", str(written), "--plot", str(picture),
    )  # fmt: skip
    assert done.code == 0, done.err
    base = ["serve", "smollm2-135m", "--host", "127.0.0.1", "--profile", "smoke"]
    assert servers == [base, [*base, "--set", "scheduler.max_seqs=4", "--set", "kv.dtype=bfloat16"]]
    found = json.loads(written.read_text())
    assert (found["schema"], found["version"]) == ("tokenspeed.bench.pareto", 1)
    assert [(one["name"], one["devices"], len(one["points"])) for one in found["curves"]] == [
        ("as-is", 1, 2),
        ("few", 1, 2),
    ]
    assert found["curves"][1]["settings"] == {"scheduler.max_seqs": "4", "kv.dtype": "bfloat16"}
    assert any(point["optimal"] for one in found["curves"] for point in one["points"])
    assert picture.read_text().startswith("<?xml")
    # What it wrote it also reads, and what bench serve wrote beside it.
    again = tokenspeed("bench", "pareto", "--from", str(written))
    assert again.code == 0, again.err
    assert again.out == done.out
    serve = tmp_path / "s.json"
    with stand_in(Manner(pause_s=0.002)) as url:
        line = ("bench", "serve", "--url", url, "-c", "1,2", "-n", "2", "--output-len", "5", "--label", "the-other")
        assert tokenspeed(*line, "--devices", "2", "--json", str(serve)).code == 0
    level = json.loads(serve.read_text())["levels"][0]
    (drawn,) = read_curves(serve)
    assert (drawn.name, drawn.devices, drawn.points[0].device) == ("the-other", 2, level["output_tokens_per_s"] / 2)
    both = tokenspeed("bench", "pareto", "--from", str(written), "--from", str(serve))
    assert "the-other" in both.out and "few" in both.out and "note: these curves" in both.out


def test_a_dry_run_names_the_layouts(servers: list[list[str]], tokenspeed: Command) -> None:
    done = tokenspeed(
        "bench", "pareto", "smollm2-135m", "--profile", "smoke", "--layout", "few:scheduler.max_seqs=4", "--dry-run"
    )
    assert done.out.splitlines() == [
        "would serve smollm2-135m-smoke as few: scheduler.max_seqs=4",
        "and load each with 1,2,4,8,16,32 at once; nothing was started (dry run)",
    ]
    assert servers == []


MISTAKES = [
    ("", 2, "bench pareto measures a RECIPE, or draws earlier measurements"),
    ("smollm2-135m --from r.json", 2, "bench pareto measures a RECIPE, or draws earlier measurements"),
    ("--from r.json --layout a", 2, "--layout needs a RECIPE"),
    ("--from /absent.json", 2, "--from /absent.json cannot be read"),
    ("smollm2 ", 2, '"smollm2" is no recipe and no file or folder; did you mean "smollm2-135m"?'),
    ("smollm2-135m --layout a --layout a", 2, "--layout: a is there twice"),
    ("smollm2-135m --layout a --layout b:scheduler.maxseqs=1", 2, 'unknown key "maxseqs" in scheduler'),
    ("smollm2-135m --layout a:kv.bytes=10MB,scheduler.max_len=8000", 3, "--max-model-len"),
    ("smollm2-135m -c 0", 2, "--concurrency 0: one number above 0"),
    ("kimi-k2.5 --profile b200-nvfp4", 2, "profile b200-nvfp4 of kimi-k2.5 is unsupported"),
]


@pytest.mark.parametrize(("line", "code", "told"), MISTAKES)
def test_a_mistake_costs_no_server(
    servers: list[list[str]], tokenspeed: Command, line: str, code: int, told: str
) -> None:
    done = tokenspeed("bench", "pareto", *line.split())
    assert (done.code, told in done.err) == (code, True), done.err
    assert servers == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "cannot be read"),
        ("[]", "neither bench serve --json nor bench pareto --json of this version wrote it"),
        ('{"schema": "tokenspeed.bench.serve", "version": 2}', "neither bench serve"),
        ('{"schema": "tokenspeed.bench.serve", "version": 1}', "it is damaged (KeyError: 'server')"),
        ('{"schema": "tokenspeed.bench.pareto", "version": 1, "curves": [{}]}', "it is damaged (KeyError"),
    ],
)
def test_a_file_that_holds_no_curve_is_named(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(ServerError) as raised:
        read_curves(path)
    assert str(path) in str(raised.value) and told in str(raised.value)


@pytest.mark.long
def test_layouts_of_real_servers(own_machine: Path, tmp_path: Path) -> None:
    packages = Path(platformdirs.user_cache_dir("tokenspeed")) / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    own_machine.mkdir()
    (own_machine / "packages").symlink_to(packages)
    line = "bench pareto smollm2-135m --profile cpu --layout as-is --layout few:scheduler.max_seqs=2 -c 1,4 -n 8"
    path = tmp_path / "p.json"
    done = run_cli(*line.split(), "--input-len", "32", "--output-len", "16", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["curves"]
    assert [(one["name"], len(one["points"])) for one in found] == [("as-is", 2), ("few", 2)]
    assert run_cli("status").returncode == 1, "both servers were stopped"
