"""``bench serve`` as it is typed: what it prints, writes and draws, and how it ends."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from stand_in_endpoint import Manner, stand_in

from tokenspeed.cli.bench.answers import Answer
from tokenspeed.cli.bench.endpoint import Endpoint
from tokenspeed.cli.bench.load import Outcome
from tokenspeed.cli.bench.mixture import MixtureOutcome
from tokenspeed.cli.bench.report import Level, MixtureLevel, ServeReport
from tokenspeed.cli.bench.statistics import summarize
from tokenspeed.cli.bench.table import render
from tokenspeed.cli.bench.tiers import Tiers, parse_counters
from tokenspeed.cli.bench.wire import Wire


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with stand_in(Manner()) as where:
        yield where


def answers(count: int, turns: int = 1) -> list[Answer]:
    """One every half second; the first token after 100 ms and more, then one each 20 ms and more."""
    made = []
    for number in range(count):
        first = number / 2 + 0.1 + number / 100
        arrivals = [first + token * (0.02 + number / 1000) for token in range(5)]
        made.append(
            Answer(
                number / 2, number / 2 + 0.001, arrivals, arrivals[-1], number // turns, number % turns, 5, 100, 5, 40
            )
        )
    return made


def report_of(**changes: Any) -> ServeReport:
    """A report whose figures are all known."""
    endpoint = Endpoint(Wire("http://127.0.0.1:8000"), "a-model")
    described = "random prompts of 100 tokens, answers of 5"
    report = ServeReport(endpoint, "label", 1, "random", described, "completions", "token ids", 7, **changes)
    report.began = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    return report


def level(load: str, found: list[Answer], **options: Any) -> Level:
    outcome = Outcome(0, found[-1].ended, found)
    return Level(summarize(outcome, load=load, client_cpu=0.042, **options), outcome)


TABLE = """\
a-model at http://127.0.0.1:8000
random prompts of 100 tokens, answers of 5; completions, prompts as token ids, seed 7

load       done  failed    s  req/s  in tok/s  out tok/s  tok/s each  peak  cached  client  goodput  good req/s
2 at once    10       0  4.8   2.08     208.1       10.4        40.8     1     40%      4%      50%        1.04
2/s           9       1  4.8   1.87     187.3        9.4        40.0     1     40%      4%      40%        0.83

load                ms   mean    p50    p90    p95    p99    max
2 at once  first token  145.0  145.0  181.0  185.5  189.1  190.0
            each token   24.5   24.5   28.1   28.5   28.9   29.0
               between   24.5   24.5   28.1   29.0   29.0   29.0
                 whole  243.0  243.0  293.4  299.7  304.7  306.0
2/s        first token  150.0  150.0  182.0  186.0  189.2  190.0
            each token   25.0   25.0   28.2   28.6   28.9   29.0
               between   25.0   25.0   28.5   29.0   29.0   29.0
                 whole  250.0  250.0  294.8  300.4  304.9  306.0
           client late   1.00   1.00   1.00   1.00   1.00   1.00
failed at 2/s: 1 x status 500: it broke
note: no /ready
interrupted: this is what was measured until then"""


def test_the_table() -> None:
    goodput = {"ttft": 142.0, "tpot": 1000.0}
    bad = answers(10)
    bad[0] = replace(bad[0], error="status 500", detail="it broke")
    report = report_of(notes=["no /ready"], interrupted=True)
    report.levels = [
        level("2 at once", answers(10), concurrency=2, targets=goodput),
        level("2/s", bad, rate=2.0, targets=goodput),
    ]
    assert "\n".join(render(report)) == TABLE


METRICS = """\
# TYPE tokenspeed_engine_prefix_query_tokens_total counter
tokenspeed_engine_prefix_query_tokens_total {}.0
tokenspeed_engine_prefix_hit_tokens_total {}.0
tokenspeed_engine_host_hit_tokens_total {}.0
tokenspeed_engine_storage_hit_tokens_total {}.0
tokenspeed_engine_finished_total {}.0
tokenspeed_engine_rounds_total 4.0
"""


TURNS = """\
turn  done  prompt  cached  first token ms p50    p90    p99  each token ms p50
1        2     100     40%               110.0  118.0  119.8               21.0
2        2     100     40%               120.0  128.0  129.8               22.0"""


def test_the_tiers_of_the_cache_are_told_where_something_was_cached() -> None:
    before = parse_counters(METRICS.format(1000, 10, 2, 1, 7))
    after = parse_counters(METRICS.format(3000, 1510, 402, 101, 9))
    tiers = Tiers.between(before, after)
    assert tiers == Tiers(2000, 1000, 400, 100)
    report = report_of(levels=[replace(level("2 at once", answers(2)), tiers=tiers)])
    told = "cached at 2 at once: of 2,000 prompt tokens 1,000 on the device, 400 in host memory, 100 in storage"
    assert told in render(report)
    # The engine was started again, or the server is none of ours.
    assert Tiers.between(after, before) is None is Tiers.between(None, after)
    assert parse_counters("tokenspeed_engine_finished_total 3.0") is None


def test_the_table_of_turns() -> None:
    report = report_of(levels=[level("2 at once", answers(4, turns=2), concurrency=2, by_turn=True)])
    assert TURNS in "\n".join(render(report))


MIXTURE = """\
prompt of 3,000 tokens: first token after 2.00 s, 1,500.0 tok/s
streams     s  tok/s  between ms mean    p50    p90    p95    p99    max
before   1.00    2.0            500.0  500.0  500.0  500.0  500.0  500.0
during   2.00    0.5            2,000  2,000  2,000  2,000  2,000  2,000
after    0.50    2.0            500.0  500.0  500.0  500.0  500.0  500.0"""


def mixture() -> MixtureLevel:
    stream = Answer(0, 0, [1, 1.5, 2, 4, 4.5], 5)
    prompt = Answer(2, 2, [4], 4, prompt_tokens=3000)
    return MixtureLevel.of(MixtureOutcome(0, 1, 5, [stream], [prompt], whole=True))


def test_the_table_of_a_mixture() -> None:
    assert MIXTURE in "\n".join(render(report_of(mixture=mixture())))


def shape(value: Any) -> Any:
    """The keys of a document, and the types of what is under them."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


FIGURES = dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), "float")
ANSWER = {
    "conversation": "int", "turn": "int", "scheduled": "float", "sent": "float", "first": "float", "last": "float",
    "chunks": "int", "prompt_tokens": "int", "completion_tokens": "int", "cached_tokens": "int", "error": "str",
}  # fmt: skip
SHAPE = {
    "schema": "str", "version": "int", "command": ["str"], "label": "str", "began": "str",
    "client": {
        "cores": "int", "memory_gib": "float", "architecture": "str", "isa": ["str"], "accelerators": [],
        "python": "str", "system": "str",
    },
    "server": {
        "url": "str", "model": "str", "devices": "int",
        "abilities": {
            "tokenizes": "str", "token_ids": "bool", "exact_lengths": "bool", "usage": "bool", "max_len": "int"
        },
        "facts": {"model": {"id": "str", "max_model_len": "int"}, "version": {"version": "str"}},
    },
    "workload": {"name": "str", "described": "str", "api": "str", "prompts": "str", "seed": "int"},
    "notes": [], "interrupted": "bool",
    "levels": [
        {
            "load": "str", "concurrency": "int", "rate": "NoneType", "seconds": "float", "requests": "int",
            "completed": "int", "cut_off": "int", "errors": {}, "error_details": {}, "requests_per_s": "float",
            "input_tokens_per_s": "float", "output_tokens_per_s": "float", "tokens_per_s_per_user": "float",
            "peak_concurrency": "int", "input_tokens": "int", "output_tokens": "int", "short": "int", "chunks": "int",
            "cached_share": "float",
            **{f"{name}_ms": {"count": "int", **FIGURES} for name in ("ttft", "tpot", "itl", "e2e", "lateness")},
            "client_cpu": "float",
            "goodput": {"targets": {"ttft": "float"}, "met": "int", "share": "float", "requests_per_s": "float"},
            "turns": [], "tiers": "NoneType", "client_limited": "str", "answers": [ANSWER],
        }
    ],
    "mixture": "NoneType",
}  # fmt: skip
"""Version 1. Whoever changes it raises the version."""


def test_the_document_has_the_shape_of_its_version(url: str, tokenspeed: Command, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    done = tokenspeed(
        "bench", "serve", "--url", url, "-c", "2,4", "-n", "6", "--input-len", "20", "--output-len", "5",
        "--goodput", "ttft:60000", "--json", str(path),
    )  # fmt: skip
    assert done.code == 0, done.err
    found = json.loads(path.read_text())
    if found["client"]["accelerators"]:
        found["client"]["accelerators"] = []
    assert (found["schema"], found["version"]) == ("tokenspeed.bench.serve", 1)
    assert shape(found) == SHAPE
    assert [(one["concurrency"], one["completed"]) for one in found["levels"]] == [(2, 6), (4, 6)]
    assert [one["input_tokens"] for one in found["levels"]] == [120, 120]
    assert found["levels"][0]["goodput"]["share"] == 1
    assert done.out.splitlines()[0] == f"stand-in at {url}"


WORKLOADS = [
    ("random --rate 500 --arrivals burst --burst 3 -n 6 --input-len 9 --output-len 3", "500/s"),
    ("shared-prefix --prefix-len 20 --groups 2 -c 2 -n 4 --output-len 3", "2 groups that share a prefix of 20 tokens"),
    ("sessions --sessions 2 --turns 3 --prefix-len 20 --output-len 3", "chat, prompts as text"),
    ("mixture --decoders 2 --prompt-len 300 --output-len 40", "prompt of 300 tokens: first token after"),
    ("mixture --decoders 2", "note: the long prompt has 4,032 tokens: the server takes 4,096 in one request"),
]


@pytest.mark.parametrize(("line", "told"), WORKLOADS)
def test_every_workload_runs_and_is_drawn(url: str, tokenspeed: Command, tmp_path: Path, line: str, told: str) -> None:
    picture = tmp_path / "p.svg"
    done = tokenspeed("bench", "serve", "--url", url, "--plot", str(picture), "-w", *line.split())
    assert (done.code, told in done.out) == (0, True), done.out + done.err
    assert picture.read_text().startswith("<?xml")


def test_a_file_of_messages_is_a_chat(url: str, tokenspeed: Command, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hello you"}], "max_tokens": 3}\n' * 3)
    done = tokenspeed("bench", "serve", "--url", url, "-w", "file", "--file", str(path), "-c", "2")
    assert done.code == 0, done.err
    assert "3 prompts of p.jsonl; chat, prompts as the file has them" in done.out


def test_sessions_without_chat_are_plain_completions(tokenspeed: Command) -> None:
    with stand_in(Manner(chat=False)) as where:
        done = tokenspeed(
            "bench", "serve", "-w", "sessions", "--sessions", "1", "--turns", "2", "--prefix-len", "9",
            "--output-len", "3", "--url", where,
        )  # fmt: skip
    assert done.code == 0, done.err
    assert "note: no chat (status 400: messages is refused): sessions are plain completions" in done.out


def test_a_picture_is_a_png_by_its_name(url: str, tokenspeed: Command, tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    line = ("bench", "serve", "--url", url, "-c", "1", "-n", "2", "--output-len", "3")
    done = tokenspeed(*line, "--plot", str(picture))
    assert done.code == 0, done.err
    assert picture.read_bytes().startswith(b"\x89PNG")


MISTAKES = [
    ("--workload bogus", "'bogus' is not one of"),
    ("--concurrency 1 --rate 1", "--concurrency and --rate exclude each other"),
    ("--url http://127.0.0.1:9", "http://127.0.0.1:9/v1/models: no connection: Connection refused"),
    ("--url ftp://x", "ftp://x is no http:// or https:// address"),
    ("--url URL --model other", "serves stand-in, not other"),
    ("--url URL --input-len 5000", "requests of up to 5,128 tokens, answer included: stand-in at"),
    ("--url URL -w sessions --turns 50", "ask for shorter lengths or fewer --turns"),
    ("--url URL -w mixture --prompt-len 9000", "requests of up to 9,001 tokens"),
    ("--url URL --plot p.gif", "--plot p.gif: a name that ends with .png, .svg, .pdf"),
    ("--url URL --goodput itl:3", "--goodput itl:3: milliseconds for ttft, tpot or e2e"),
    ("--url URL --api-key-file /absent", "the API key file /absent cannot be read"),
    ("--model nobody", "no server of yours serves nobody (running: none)"),
]


@pytest.mark.parametrize(("line", "told"), MISTAKES)
def test_mistakes(url: str, tokenspeed: Command, line: str, told: str) -> None:
    done = tokenspeed("bench", "serve", *line.replace("URL", url).split())
    assert (done.code, told in done.err) == (2, True), done.err
    assert "Traceback" not in done.err


def test_a_wrong_key_is_refused_and_the_right_one_taken(tokenspeed: Command, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("right\n")
    with stand_in(Manner(key="right")) as where:
        line = ("bench", "serve", "--url", where, "-c", "1", "-n", "1", "--output-len", "3")
        refused = tokenspeed(*line)
        assert (refused.code, "status 401: this key is none of ours" in refused.err) == (2, True)
        assert tokenspeed(*line, "--api-key-file", str(tmp_path / "key")).code == 0


def test_where_everything_fails_the_exit_code_says_so(tokenspeed: Command) -> None:
    with stand_in(Manner(breaks="error")) as where:  # the requests of the beginning are shorter than what breaks
        done = tokenspeed("bench", "serve", "--url", where, "-c", "2", "-n", "4", "--warmup", "0")
    assert done.code == 1
    assert "failed at 2 at once: 4 x error event: {'message': 'the engine gave up'}" in done.out


def test_a_dry_run_sends_nothing(tokenspeed: Command) -> None:
    done = tokenspeed("bench", "serve", "--url", "http://127.0.0.1:9", "--rate", "1,2", "--dry-run")
    assert done.code == 0
    assert done.out.splitlines() == [
        "would load http://127.0.0.1:9: random prompts of 512 tokens, answers of 128",
        "  1/s",
        "  2/s",
        "nothing was sent (dry run)",
    ]


def test_without_matplotlib_the_way_to_it_is_told(
    tokenspeed: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = tokenspeed("bench", "serve", "--url", "http://127.0.0.1:9", "--plot", str(tmp_path / "p.png"))
    assert done.code == 2
    assert "pip install 'matplotlib>=3.9,<4'" in done.err


def test_ctrl_c_prints_what_was_measured(tmp_path: Path) -> None:
    """Two requests are answered; the third is held by the server until the client is interrupted."""
    manner = Manner(holds_from=3)  # what is tried at the beginning has two tokens
    with stand_in(manner) as where:
        path = tmp_path / "p.jsonl"
        path.write_text('{"prompt": "a", "max_tokens": 1}\n' * 2 + '{"prompt": "b", "max_tokens": 9}\n')
        arguments = ["bench", "serve", "--url", where, "-w", "file", "--file", str(path), "-c", "1", "--warmup", "0"]
        process = subprocess.Popen(
            [sys.executable, "-m", "tokenspeed.cli", *arguments, "--json", str(tmp_path / "r.json")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert manner.held.wait(60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out.splitlines()[-1] == "interrupted: this is what was measured until then"
    assert "cut off at 1 at once: 1 open requests, which count nowhere" in out
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["interrupted"], found["levels"][0]["completed"], found["levels"][0]["cut_off"]) == (True, 2, 1)


def test_bench_without_a_subcommand_is_the_quick_one(tokenspeed: Command) -> None:
    for line in ("bench --url http://x:1 --dry-run", "bench quick --url http://x:1 --dry-run"):
        assert tokenspeed(*line.split()).out.strip() == "would measure http://x:1 for at most 120 s (dry run)"
    assert "no server of yours serves serve-2" in tokenspeed("bench", "serve-2").err
    assert "quick" in tokenspeed("bench", "--help").out


def test_the_kernels_door_is_the_kernel_cores_own_benchmark(tokenspeed: Command) -> None:
    operations = ("norm.rms", "activation.silu_and_mul")
    options = ("--phase", "decode", "--runs", "1", "--threads", "1", "--json")
    done = tokenspeed("bench", "kernels", *operations, *options)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert {result["operation"] for result in found["results"]} == set(operations)
    for result in found["results"]:
        share = result["bytes"] / result["seconds"] / found["read_bytes_per_second"]
        assert result["read_share"] == pytest.approx(share)
    wrong = tokenspeed("bench", "kernels", "norm.rms", "norm.nothing")
    assert (wrong.code, "no operation 'norm.nothing'" in wrong.err) == (2, True)
    absent = tokenspeed("bench", "kernels", "--register", "/absent")
    assert (absent.code, "/absent" in absent.err) == (1, True)
