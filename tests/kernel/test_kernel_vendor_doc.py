"""docs/add-a-vendor.md is no story: its files are written, its commands run, and an engine serves by the outcome."""

import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from running_server import RunningServer, run_cli

DOCUMENT = Path(__file__).parents[2] / "docs" / "add-a-vendor.md"
FILE = re.compile(r"<!-- file: (?P<name>\S+) -->\n```\w+\n(?P<content>.*?)```", re.DOTALL)
PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"

# The documented commands, one after another, each in a fork of a process that has imported what they need.
EACH_IN_A_FORK = """
import os, runpy, shlex, subprocess, sys
from tokenspeed_kernel.plugins import cli
from tokenspeed_kernel.numerics import __main__ as numerics
for line in sys.stdin.read().splitlines():
    print("$", line, flush=True)
    words = shlex.split(line)
    child = os.fork()
    if child == 0:
        while "=" in words[0]:
            name, _, os.environ[name] = words.pop(0).partition("=")
        match words:
            case ["tokenspeed-kernel", *rest]:
                status = cli.main(rest)
            case ["python", "-m", "tokenspeed_kernel.numerics", *rest]:
                status = numerics.main(rest)
            case ["python", *rest]:
                status = subprocess.call([sys.executable, *rest])
            case ["pip", *rest]:
                status = subprocess.call([sys.executable, "-m", "pip", *rest])
            case [program, *rest]:
                status = subprocess.call([program, *rest])
        print("status", status, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def lines_of(section: str) -> list[str]:
    """The commands of a section, as they stand on the page but for the version of Python in a wheel's name."""
    text = DOCUMENT.read_text(encoding="utf-8").partition(f"## {section}\n")[2].partition("\n## ")[0]
    assert text, f"no section {section!r}"
    return [line[2:].replace("cp311", PYTHON) for line in text.splitlines() if line.startswith("$ ")]


def clean_environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOKENSPEED_", "ACME_"))}
    return {**kept, "TOKENSPEED_ENGINE": "native", "OMP_NUM_THREADS": "2", **more}


def run(place: Path, lines: list[str]) -> list[str]:
    """What each line printed; all of them have to end well."""
    done = subprocess.run(
        [sys.executable, "-c", EACH_IN_A_FORK],
        input="\n".join(lines),
        cwd=place,
        env=clean_environment(TOKENSPEED_CACHE=str(place / "cache")),
        capture_output=True,
        text=True,
        check=False,
    )
    printed = [part.partition("\n")[2] for part in re.split(r"^\$ ", done.stdout, flags=re.MULTILINE)[1:]]
    ended_well = [part.endswith("status 0\n") for part in printed]
    assert len(ended_well) == len(lines) and all(ended_well), done.stdout + done.stderr
    return printed


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files."""
    place = tmp_path_factory.mktemp("vendor")
    for match in FILE.finditer(DOCUMENT.read_text(encoding="utf-8")):
        path = place / match["name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(match["content"], encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def printed(place: Path) -> dict[str, str]:
    """What every command of the page but the last printed, by command. The wheel lies in dist then, and is installed
    to a folder of its own."""
    install, _ = lines_of("Serve with it")
    lines = [*lines_of("Prove it, measure it"), *lines_of("Ship it without sources"), f"{install} --target site"]
    return dict(zip(lines, run(place, lines), strict=True))


@pytest.fixture(scope="module")
def site(place: Path, printed: dict[str, str]) -> Path:
    """Where the wheel is installed."""
    return place / "site"


def of(printed: dict[str, str], *words: str) -> str:
    """What the one command with these words printed."""
    (text,) = [text for line, text in printed.items() if all(word in line for word in words)]
    return text


def test_the_commands_of_the_page_do_what_it_says(place: Path, printed: dict[str, str]) -> None:
    without, there = (text for line, text in printed.items() if "list gemm.linear" in line)
    assert "acme_gemm_linear" in without and "not here: runs on acme; this is cpu" in without
    assert re.search(r"acme_gemm_linear +plugin +runs here", there)
    assert re.search(r"cpu_gemm_linear +\w+ +not here: runs on cpu; this is acme", there)
    verified = of(printed, "numerics")
    assert verified.startswith("platform acme-a1, ") and verified.count(" right, error ") == 2
    assert "latencies written to acme/acme_chip/measured/acme-a1.json" in of(printed, "tune")
    assert re.search(r"acme_norm_rms \[plugin\]  \d+\.\d us measured; .* verified, error", of(printed, "explain"))


def test_the_wheel_has_no_sources_and_brings_what_was_verified(place: Path, printed: dict[str, str]) -> None:
    (wheel,) = (place / "dist").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith(".py")]
    assert {"acme_chip/kernels.pyc", "acme_chip/measured/records.json", "acme_chip/measured/acme-a1.json"} <= {*names}
    told = of(printed, "info acme_gemm_linear")
    assert re.search(r"verified +on acme-a1, error 0\.\d+ of bound", told)
    assert "needs      acme, tiles: runs here" in told and f"from {wheel}" in told
    assert "workspace  2304 B" in told


def test_an_engine_serves_by_it(place: Path, site: Path) -> None:
    _, line = lines_of("Serve with it")
    words = shlex.split(line)
    assert words[:3] == ["ACME_CHIPS=1", "tokenspeed", "serve"]
    environment = clean_environment(ACME_CHIPS="1", PYTHONPATH=str(site), TOKENSPEED_CACHE=str(place / "cache"))
    flags = ("--max-model-len", "256", "--max-num-seqs", "2", "--kv-cache-gb", "0.02")
    with RunningServer(words[3], *words[4:], *flags, environment=environment) as server:
        body = {"model": server.model, "prompt": "Hello", "max_tokens": 4, "temperature": 0}
        answer = server.client.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 4
        doubts = server.state()["facts"]["kernel_doubts"]
    assert re.search(r"kernel of norm\.rms \(.*\): acme_norm_rms, ", server.output)
    assert re.search(r"kernel of gemm\.linear \(.*weight=float32.*\): acme_gemm_linear, ", server.output)
    assert "norm.rms" not in doubts and "reference_attention_decode" in doubts["attention.decode"]


CALLS = """
import torch
from acme_chip import kernels
from tokenspeed_kernel.ops import bind_linear, bind_rms_norm
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.recording import recorder_of
weight = QuantizedTensor.from_dense(torch.randn(48, 32), "a weight")
linear, norm = bind_linear(weight, None), bind_rms_norm()
assert (linear.spec.name, norm.spec.name) == ("acme_gemm_linear", "acme_norm_rms")
x, normed, out = torch.randn(3, 32), torch.empty(3, 32), torch.empty(3, 48)
def step():
    norm(x, torch.ones(32), 1e-6, normed)
    linear(normed, out)
    return out
recorder = recorder_of([linear.spec, norm.spec])
assert not isinstance(recorder, str), recorder
found, replay = recorder(step)
x.normal_()
replay()
again = out.clone()
assert torch.equal(again, step()), "the replay is another step"
print("equal")
"""


@pytest.mark.long
def test_its_recorder_makes_a_step_again(place: Path, site: Path) -> None:
    environment = clean_environment(ACME_CHIPS="1", PYTHONPATH=str(site), TOKENSPEED_CACHE=str(place / "cache"))
    command = [sys.executable, "-c", CALLS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.long
def test_a_broken_one_stops_the_start_by_name_and_an_optional_one_is_left_out(place: Path, site: Path) -> None:
    broken = {"ACME_CHIPS": "none of your business", "PYTHONPATH": str(site), "TOKENSPEED_CACHE": str(place / "cache")}
    flags = ("--profile", "smoke", "--max-model-len", "256", "--max-num-seqs", "2", "--kv-cache-gb", "0.02")
    done = run_cli("serve", "smollm2-135m", "--port", "0", *flags, environment=clean_environment(**broken))
    told = done.stdout + done.stderr
    assert done.returncode != 0
    assert "kernel plugin 'acme' (from acme-chip 1.0) failed to load" in told
    assert "none of your business" in told and "TOKENSPEED_KERNEL_OPTIONAL_PLUGINS=acme" in told
    optional = clean_environment(**broken, TOKENSPEED_KERNEL_OPTIONAL_PLUGINS="acme")
    with RunningServer("smollm2-135m", *flags, environment=optional) as server:
        assert server.model
    assert "optional kernel plugin 'acme'" in server.output and "none of your business" in server.output
    assert "acme_" not in server.output.partition("kernel of ")[2]


@pytest.mark.long
def test_a_kind_of_device_that_nobody_brought_is_refused_by_name() -> None:
    done = run_cli(
        "serve",
        "smollm2-135m",
        "--profile",
        "smoke",
        "--port",
        "0",
        environment=clean_environment(TOKENSPEED_DEVICE="warp"),
    )
    assert done.returncode != 0
    assert "device 'warp' is unknown; it is cpu, cuda, npu" in done.stdout + done.stderr
