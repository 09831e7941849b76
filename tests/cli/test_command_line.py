"""The command line: what it prints, what it refuses, and with which exit code."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Command

from tokenspeed.cli.background import without_detach
from tokenspeed.cli.installation import refuse_foreign_distributions, refuse_small_shared_memory
from tokenspeed.cli.ports import claim_port
from tokenspeed.cli.records import (
    ServerError,
    ServerRecord,
    find_server,
    remove_record,
    running_servers,
    write_record,
)
from tokenspeed.recipes.flags import FLAGS


@pytest.fixture
def own_cache(own_machine: Path) -> Path:
    """Where records, logs and downloads go."""
    return own_machine


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys; sys.argv = ['tokenspeed', '--help']\n"
        "from tokenspeed.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'pydantic', 'yaml', 'fastapi', 'numpy', 'huggingface_hub', 'textual', 'httpx', 'msgspec'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "serve" in printed
    assert printed.splitlines()[-1] == "LOADED []"


def test_planning_loads_no_torch() -> None:
    program = (
        "import sys; sys.argv = ['tokenspeed', 'recipe', 'plan', 'kimi-k2.5']\n"
        "from tokenspeed.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('LOADED', sorted({'torch', 'transformers', 'tokenspeed_kernel'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "LOADED []"


def test_a_dry_run_prints_everything_and_starts_nothing(tokenspeed: Command, own_cache: Path) -> None:
    done = tokenspeed(
        "run", "smollm2-135m", "--dry-run", "--max-num-seqs", "4", "--set", "kv.granularity=32", "--no-mixed-batches"
    )
    assert done.code == 0
    lines = [line.split() for line in done.out.splitlines()]
    assert ["scheduler.max_seqs", "4", "--max-num-seqs"] in lines
    assert ["kv.granularity", "32", "SET", "kv.granularity"] in lines
    assert ["scheduler.mixed", "False", "--mixed-batches"] in lines
    assert "profile cpu: functional" in done.out
    assert "fetched at the start" in done.out
    assert done.out.splitlines()[-1] == "nothing was started (dry run)"
    assert not own_cache.exists()


MISTAKES: list[tuple[str, int, str]] = [
    ("run smollm2", 2, '"smollm2" is no recipe and no file or folder; did you mean "smollm2-135m"?'),
    ("run ./absent/", 2, "absent: there is no such file or folder"),
    ("run smollm2-135m --vendor tpu", 2, "'tpu' is not one of"),
    ("run smollm2-135m --engine vm", 2, "'vm' is not one of"),
    ("serve smollm2", 2, '"smollm2" is no recipe and no file or folder; did you mean "smollm2-135m"?'),
    ("serve ./absent.gguf", 2, "absent.gguf: there is no such file or folder"),
    ("run smollm2-135m --profile tpu", 2, 'no profile "tpu"; did you mean "cpu"?'),
    ("run smollm2-135m --set scheduler.maxlen=1", 2, 'unknown key "maxlen" in scheduler; did you mean "max_len"?'),
    ("run smollm2-135m --overlap-depth 7", 2, "--overlap-depth: scheduler.overlap: input should be less than"),
    ("run smollm2-135m --kv-cache-dtype int3", 2, "--kv-cache-dtype: kv.dtype: input should be 'auto'"),
    ("run smollm2-135m --max-model-len 100000", 2, "scheduler.max_len is 100000, the model's context is 8192"),
    ("run smollm2-135m --tensor-parallel-size 2", 2, "9 attention heads are not a multiple of 2; tp may be 1, 3"),
    ("run smollm2-135m --set parallel.pp=2", 2, "pipeline parallelism (parallel.pp = 2)"),
    ("run smollm2-135m --kv-cache-gb 0.005 --max-model-len 8000", 3, "--max-model-len 128 fits"),
    ("run smollm2-135m --max-num-seqs many", 2, "Invalid value for '--max-num-seqs'"),
    ("run smollm2-135m --bogus", 2, "No such option: --bogus"),
    ("run kimi-k2.5 --profile b200-nvfp4", 2, "profile b200-nvfp4 of kimi-k2.5 is unsupported; it asks for"),
    ("recipe plan kimi-k2.5 --hardware a3 --profile nope", 2, 'no profile "nope"'),
    ("recipe plan kimi-k2.5 --hardware rtx-4090", 3, "needs 8 x nvidia (sm90) with 140 GB each; there are 1 x nvidia"),
    ("recipe show ./absent.yaml", 2, "absent.yaml: cannot be read"),
    ("stop", 2, "no server of yours runs; start one"),
    ("logs --port 9", 2, "only servers started with --detach"),
]


@pytest.mark.parametrize(("line", "code", "told"), MISTAKES)
def test_a_mistake_is_a_message_never_a_traceback(tokenspeed: Command, line: str, code: int, told: str) -> None:
    done = tokenspeed(*line.split())
    assert (done.code, told in done.err) == (code, True), done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64, b"PK\x03\x04"])
def test_a_damaged_file_is_named(tokenspeed: Command, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    done = tokenspeed("serve", str(path))
    assert done.code == 2
    assert str(path) in done.err
    assert "Traceback" not in done.err


def test_a_taken_port_is_found_before_anything_is_loaded(tokenspeed: Command, own_cache: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = tokenspeed("run", "smollm2-135m", "--profile", "smoke", "--port", str(port))
    assert done.code == 2
    assert f"port {port} on 127.0.0.1 is taken: choose another with --port {port + 1}" in done.err
    assert not own_cache.exists()


def test_ports() -> None:
    assert claim_port("127.0.0.1", 0) > 0
    with pytest.raises(ServerError, match=r"cannot listen on 192\.0\.2\.1 port 0"):
        claim_port("192.0.2.1", 0)


def test_recipes_are_listed_shown_and_validated(tokenspeed: Command, tmp_path: Path) -> None:
    listed = tokenspeed("recipe", "list")
    assert listed.code == 0
    assert "smollm2-135m" in listed.out
    shown = tokenspeed("recipe", "show", "qwen3-0.6b")
    assert "repository: Qwen/Qwen3-0.6B" in shown.out
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: broken\nprofile: {}\n")
    checked = tokenspeed("recipe", "validate", "kimi-k2.5", str(broken))
    assert checked.code == 2
    assert "kimi-k2.5.yaml: right (b200-nvfp4, h200-int4, mi355x-mxfp4, a3-w4a8, " in checked.out
    assert f'{broken}:2:1: unknown key "profile"; did you mean "profiles"?' in checked.out


def test_explain_names_the_source_of_every_value(tokenspeed: Command) -> None:
    done = tokenspeed("recipe", "explain", "smollm2-135m", "--port", "8001")
    rows = {line.split()[0]: line.split()[1:] for line in done.out.splitlines()}
    assert rows["api.port"] == ["8001", "--port"]
    assert rows["api.host"] == ["127.0.0.1", "default"]
    assert rows["scheduler.chunk"][0] == "256"
    assert rows["scheduler.chunk"][1:3] == ["profile", "cpu"]
    assert {flag.key for flag in FLAGS} <= set(rows)


def test_kimi_can_be_planned_for_a_machine_that_is_not_here(tokenspeed: Command) -> None:
    done = tokenspeed("recipe", "plan", "kimi-k2.5", "--hardware", "b200")
    assert done.code == 0
    assert "profile b200-nvfp4: unsupported" in done.out
    assert "35,136 B a token on each rank in float8_e4m3" in done.out


def test_a_running_server_is_found_by_its_own_process(own_cache: Path) -> None:
    record = ServerRecord.of_this_process("some", "0.0.0.0", 8123)
    assert record.url == "http://127.0.0.1:8123"
    assert ServerRecord.of_this_process("some", "::", 1).url == "http://[::1]:1"
    write_record(record)
    assert running_servers() == [record]
    assert find_server(8123) == record
    with pytest.raises(ServerError, match="on port 8124"):
        find_server(8124)
    # The same pid started at another time is another process.
    stale = {**json.loads((own_cache / "run" / "8123.json").read_text()), "port": 8124, "started": 1}
    (own_cache / "run" / "8124.json").write_text(json.dumps(stale))
    (own_cache / "run" / "8125.json").write_text("not JSON")
    assert running_servers() == [record]
    assert not (own_cache / "run" / "8124.json").exists()
    # A server that was replaced on its port removes no record but its own.
    remove_record(replace(record, pid=1))
    assert running_servers() == [record]
    remove_record(record)
    assert running_servers() == []


def test_the_background_gets_the_same_command_and_one_port() -> None:
    assert without_detach(["serve", "m", "--detach", "--port", "0", "--seed", "1"]) == ["serve", "m", "--seed", "1"]
    assert without_detach(["serve", "m", "--port=0", "--detach"]) == ["serve", "m"]


def test_a_foreign_distribution_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_foreign_distributions()
    metadata = tmp_path / "tokenspeed_scheduler-0.1.42.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenspeed-scheduler\nVersion: 0.1.42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ServerError, match=r"tokenspeed-scheduler 0\.1\.42 is installed"):
        refuse_foreign_distributions()


def test_env_looks_at_this_machine(tokenspeed: Command) -> None:
    facts = json.loads(tokenspeed("env", "--json", "--kernels").out)
    assert facts["torch"] != "not installed"
    assert "cores" in facts["machine"]
    assert "paged_gqa" in facts["attention backends"]
    assert "reference" in facts["gemm.linear"]
    assert "reference" in facts["attention backend paged_gqa"] and "triton" in facts["sampling backend registry"]


def test_no_disk_is_said_before_anything_is_fetched(tokenspeed: Command, tmp_path: Path, own_cache: Path) -> None:
    recipe = tmp_path / "large.yaml"
    recipe.write_text("extends: smollm2-135m\nname: large\nweights: {download_bytes: 900 TB}\n")
    done = tokenspeed("run", str(recipe), "--port", "0")
    assert done.code == 2
    assert "900" in done.err and "disk" in done.err and str(own_cache) in done.err
    assert "TOKENSPEED_CACHE" in done.err
    assert not list(own_cache.glob("run/*"))


KIMI_NEEDS = (
    "WHAT kimi-k2.5 NEEDS",
    "HOW NEAR EACH KNOWN BOX COMES",
    "HERE: no accelerator, so the smoke profile runs, as kimi-k2.5-smoke",
    "model     kimi-k2.5, served as kimi-k2.5-smoke",
)


def test_the_first_screen_without_accelerators_is_what_the_model_needs(tokenspeed: Command) -> None:
    done = tokenspeed("run", "kimi-k2.5", "--vendor", "cpu", "--dry-run")
    assert done.code == 0
    places = [done.out.find(line) for line in KIMI_NEEDS]
    assert places == sorted(places) and places[0] == 0
    boxes = done.out[places[1] : places[2]].splitlines()
    assert any("MI355X" in line and "fits" in line for line in boxes)
    assert any("RTX 4090" in line and "fits" not in line for line in boxes)
    assert "RANDOM WEIGHTS, this is not kimi-k2.5" in done.err
    # A model that a CPU runs has no such screen, and neither has a machine with the devices.
    assert "WHAT" not in tokenspeed("run", "smollm2-135m", "--profile", "smoke", "--vendor", "cpu", "--dry-run").out
    assert "WHAT" not in tokenspeed("run", "kimi-k2.5", "--profile", "smoke", "--vendor", "nvidia", "--dry-run").out


def test_a_user_nobody_knows_has_a_home(tmp_path: Path) -> None:
    """A uid without a passwd entry and without HOME, as in a container of any uid."""
    command = ["unshare", "--user", "--map-user=12345", "--map-group=0"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine allows no user namespaces")
    unset = ("HOME", "USER", "LOGNAME", "TOKENSPEED_CACHE", "HF_HOME", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    program = [sys.executable, "-m", "tokenspeed.cli", "run", "smollm2-135m", "--dry-run"]
    done = subprocess.run(
        [*command, *program], env={**environment, "TMPDIR": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"fetched at the start to {tmp_path}/tokenspeed-12345/" in done.stdout
    assert not (tmp_path / "~").exists()


def test_ranks_need_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(64 << 20, 0, 64 << 20))
    refuse_small_shared_memory(1)
    with pytest.raises(ServerError, match="/dev/shm has 64 MiB, too little for 2 ranks: containers: --shm-size 16g"):
        refuse_small_shared_memory(2)
