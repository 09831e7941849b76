"""The set-up of logging: forms, streams, secrets, and what a child process prints."""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.telemetry import logs as telemetry_logs
from tokenspeed.telemetry.log_records import RECORD, Entry, as_json, as_text, as_wire, visible
from tokenspeed.telemetry.log_relay import Allowance, Relay
from tokenspeed.telemetry.logs import DROPS, Logs, LogSettings, server_logs
from tokenspeed.telemetry.metrics import EngineReading, Metrics
from tokenspeed.telemetry.redaction import Redactor, hub_token_files, is_secret_name, secret_values

logger = logging.getLogger("tokenspeed.some.room")


class Console:
    """Standard output and error as files, so that what a server writes can be read back."""

    def __init__(self, folder: Path) -> None:
        self.paths = {1: folder / "stdout", 2: folder / "stderr"}

    def text(self, descriptor: int) -> str:
        return self.paths[descriptor].read_text()

    def records(self, descriptor: int = 2) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text(descriptor).splitlines()]

    @contextlib.contextmanager
    def logs(
        self,
        settings: LogSettings | None = None,
        redact: Redactor | None = None,
        *,
        file: Path | None = None,
        one: bool = False,
    ) -> Iterator[Logs]:
        """A server's logging, whose descriptors 1 and 2 lead to the two files; with ``one`` both to the first."""
        with contextlib.ExitStack() as stack:
            for number in self.paths:
                path = self.paths[1 if one else number]
                stack.enter_context(leading_to(number, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)))
            yield stack.enter_context(
                server_logs(settings or LogSettings(), redact or Redactor(), console_file=str(file or ""))
            )


@contextlib.contextmanager
def leading_to(number: int, opened: int) -> Iterator[None]:
    """The descriptor leads to an open file, whose own descriptor is closed, and afterwards where it led before."""
    kept = os.dup(number)
    os.dup2(opened, number)
    os.close(opened)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


def flush(logs: Logs) -> None:
    """Otherwise the writer takes together what waits, and a file is closed later than at its size."""
    assert all(sink.flush(10) for sink in logs._sinks)


@pytest.fixture
def console(tmp_path: Path) -> Console:
    return Console(tmp_path)


def test_text_is_one_line_and_a_traceback_is_indented(console: Console) -> None:
    with console.logs():
        logger.info("loaded %d tensors", 3)
        logger.debug("not asked for")
        try:
            raise ValueError("of no use")
        except ValueError:
            logger.exception("it failed")
    first, second, *traceback = console.text(2).splitlines()
    assert first.endswith(" api INFO loaded 3 tensors") and len(first.split()) == 7
    assert second.endswith(" api ERROR it failed")
    assert traceback[0] == "  Traceback (most recent call last):" and traceback[-1] == "  ValueError: of no use"
    assert console.text(1) == ""


def test_json_has_the_request_and_the_traceback(console: Console) -> None:
    with console.logs(LogSettings(format="json", level="debug")):
        token = telemetry_logs.request_id.set("request-7")
        logger.debug("begun")
        telemetry_logs.request_id.reset(token)
        try:
            raise ValueError("of no use")
        except ValueError:
            logger.exception("it failed")
        print("shown to a person", flush=True)
        print("and complained about", file=sys.stderr)
    begun, failed, complained = console.records()
    assert {**begun, "time": ""} == {
        "time": "",
        "level": "debug",
        "process": "api",
        "logger": "tokenspeed.some.room",
        "message": "begun",
        "request_id": "request-7",
    }
    assert begun["time"].endswith("Z") and "T" in begun["time"]
    assert failed["exception"].startswith("Traceback") and "request_id" not in failed
    assert complained["message"] == "and complained about"
    assert [record["message"] for record in console.records(1)] == ["shown to a person"]


def test_prints_keep_their_order_with_the_log_where_both_lead_to_one_place(console: Console) -> None:
    with console.logs(one=True):
        for number in range(20):
            print("printed", number)
            logger.info("logged %d", number)
    kinds = [line.split()[-2:] for line in console.text(1).splitlines()]
    assert kinds == [[kind, str(number)] for number in range(20) for kind in ("printed", "logged")]


def test_a_line_of_progress_is_shown_without_its_end(console: Console) -> None:
    with console.logs() as logs:
        print("\r  load 1/2", end="", flush=True)
        assert logs.tail.text() == "\r  load 1/2"
        print("\r  load 2/2")
    assert console.paths[1].read_bytes() == b"\r  load 1/2\r  load 2/2\n"


def test_everything_is_put_back(console: Console) -> None:
    before = (sys.stdout, sys.stderr, logging.getLogger().handlers[:], threading.excepthook)
    with console.logs(LogSettings(level="debug")):
        assert sys.stdout is not before[0]
    assert (sys.stdout, sys.stderr, logging.getLogger().handlers[:], threading.excepthook) == before
    assert logging.getLogger("tokenspeed").level == logging.NOTSET


def test_libraries_log_warnings_only_whatever_the_level(console: Console) -> None:
    with console.logs(LogSettings(level="debug")):
        logging.getLogger("urllib3").debug("GET /secret")
        logging.getLogger("urllib3").warning("retrying")
        warnings.warn("deprecated for long", stacklevel=1)
    text = console.text(2)
    assert "GET /secret" not in text and "retrying" in text and "deprecated for long" in text


def test_a_thread_that_fails_is_logged(console: Console) -> None:
    def fail() -> None:
        raise ValueError("of no use")

    with console.logs():
        thread = threading.Thread(target=fail, name="worker")
        thread.start()
        thread.join()
    assert "CRITICAL the thread worker failed" in console.text(2) and "ValueError: of no use" in console.text(2)


def test_a_log_file_takes_the_records_and_rotates(console: Console, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    with console.logs(LogSettings(file=str(path), max_bytes=1000, files=3)) as logs:
        print("ready")
        for number in range(100):
            logger.info("record %d", number)
            flush(logs)
    found = sorted(name.name for name in tmp_path.glob("server.log*"))
    assert found[0] == "server.log" and 1 < len(found) <= 3
    assert path.read_text().endswith("record 99\n")
    assert console.text(1) == "ready\n" and console.text(2) == ""


def test_a_log_file_on_a_full_disk_is_said_on_standard_error(console: Console, tmp_path: Path) -> None:
    path = tmp_path / "full.log"
    path.symlink_to("/dev/full")
    before = DROPS.counts().get("api", 0)
    with console.logs(LogSettings(file=str(path))):
        logger.info("lost")
    assert DROPS.counts()["api"] == before + 1
    assert f"the log file {path} cannot be written: No space left on device" in console.text(2)


def test_a_log_file_that_cannot_be_made_is_named(console: Console, tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=r"the log file .*/absent/x\.log cannot be written: No such file.*--log-file"),
        console.logs(LogSettings(file=str(tmp_path / "absent" / "x.log"))),
    ):
        pass


def test_the_output_of_a_server_in_the_background_rotates_too(console: Console, tmp_path: Path) -> None:
    path = console.paths[1]
    with console.logs(LogSettings(max_bytes=500, files=2), file=path, one=True) as logs:
        for number in range(30):
            logger.info("record %d", number)
            flush(logs)
    assert path.read_text().endswith("record 29\n")
    assert (tmp_path / "stdout.1").is_file()
    # A file that standard output does not lead to is left alone.
    other = tmp_path / "other"
    other.write_text("")
    with console.logs(file=other):
        logger.info("elsewhere")
    assert other.read_text() == ""


def test_keys_are_blanked_wherever_they_come_from(console: Console) -> None:
    redact = Redactor({"sk-very-secret-key", "sk-very-secret-key-longer"})
    with console.logs(redact=redact) as logs:
        logger.info("key %s, longer %s", "sk-very-secret-key", "sk-very-secret-key-longer")
        print("Authorization: Bearer abc.def, hf_AbCdEfGhIjKlMnOpQrSt, https://user:pass@example.org/x")
        try:
            raise ValueError("sk-very-secret-key")
        except ValueError:
            logger.exception("bad key")
        tail = logs.tail.text()
    for text in (console.text(1) + console.text(2), tail):
        assert "secret" not in text and "abc.def" not in text and "hf_" not in text and "pass" not in text
        assert "key ***, longer ***" in text and "https://***@example.org/x" in text


def test_which_names_hold_secrets() -> None:
    assert all(map(is_secret_name, ("HF_TOKEN", "api_key", "DB_PASSWORD", "WANDB_API_KEY", "GITHUBTOKEN")))
    assert not any(map(is_secret_name, ("TOKENSPEED_CACHE", "TOKENIZERS_PARALLELISM", "KEYBOARD", "max_tokens_x"[:3])))


def test_which_values_are_known(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# for the team\nsk-first-key\n\nsk-second-key\n")
    environment = {"HF_TOKEN": "hf_value", "API_KEY": "1", "KEY_FILE_TOKEN": str(keys), "HOME": "/root/home"}
    assert secret_values(environment, [keys, tmp_path / "absent"]) == {"hf_value", "sk-first-key", "sk-second-key"}
    assert hub_token_files({"HF_HOME": "/cache/hub"}) == [Path("/cache/hub/token")]


def test_nested_data_is_blanked() -> None:
    redact = Redactor({"sk-very-secret"})
    data = {"env": {"HF_TOKEN": "abc", "OMP_NUM_THREADS": "2"}, "list": ["sk-very-secret", 3], "key": None}
    assert redact.values(data) == {"env": {"HF_TOKEN": "***", "OMP_NUM_THREADS": "2"}, "list": ["***", 3], "key": None}


def test_text_cannot_play_tricks(console: Console) -> None:
    with console.logs():
        logger.info("%s", "one\n2026-01-01 00:00:00.000 api INFO forged\x1b[2J\udc80")
        logger.info("%s", "x" * 100_000)
    lines = console.text(2).splitlines()
    assert lines[1] == "  2026-01-01 00:00:00.000 api INFO forged\\x1b[2J\\udc80"
    assert len(lines) == 3 and len(lines[2]) < 9000 and "(91808 characters left out)" in lines[2]


def test_visible_keeps_what_is_harmless() -> None:
    assert visible("héllo\tworld\n", 100) == "héllo\tworld\n"


def test_a_process_without_standard_error_logs_into_nothing() -> None:
    code = (
        "import logging, os\n"
        "from tokenspeed.telemetry.logs import *\n"
        "from tokenspeed.telemetry.redaction import Redactor\n"
        "with server_logs(LogSettings(), Redactor()) as logs:\n"
        "    logging.getLogger('tokenspeed').info('heard by nobody')\n"
        "    print('shown')\n"
        "    os.write(1, logs.tail.text().encode())\n"
    )
    command = f'exec {sys.executable} -c "$CODE" 2>&-'
    done = subprocess.run(
        ["sh", "-c", command], env={**os.environ, "CODE": code}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "heard by nobody" in done.stdout and done.stdout.splitlines()[-1] == "shown"


# A child process and its relay.


@pytest.fixture
def child() -> Callable[..., Relay]:
    """Runs a program whose output a relay reads, and returns the relay once everything is read."""

    def run(code: str) -> Relay:
        relay = Relay("engine", "tokenspeed.engine.output", Redactor({"sk-very-secret"}))
        output = relay.open()
        subprocess.run([sys.executable, "-c", code], stdout=output, stderr=output, timeout=60, check=False)
        os.close(output)
        assert relay.end_of_last().wait(20)
        return relay

    return run


ENGINE = """
import logging, os, sys
from tokenspeed.telemetry.logs import engine_logs
from tokenspeed.telemetry.redaction import Redactor
with engine_logs("engine", "info", Redactor()):
    logging.getLogger("tokenspeed.engine.loop").info("round %d", 7, extra={"request_id": "r-1"})
    print("printed")
    try:
        1 / 0
    except ZeroDivisionError:
        logging.getLogger("tokenspeed.engine").exception("it failed")
os.write(2, b"native: sk-very-secret aborted\\nno end of line")
"""


def test_a_childs_records_keep_what_they_say(child: Callable[..., Relay], console: Console) -> None:
    with console.logs(LogSettings(format="json")) as logs:
        relay = child(ENGINE)
        assert logs.tail.text() == ""  # that one has this process's own lines
    said = {record["message"]: record for record in console.records()}
    assert {record["process"] for record in said.values()} == {"engine"}
    assert said["round 7"]["logger"] == "tokenspeed.engine.loop" and said["round 7"]["request_id"] == "r-1"
    assert "ZeroDivisionError" in said["it failed"]["exception"] and said["it failed"]["level"] == "error"
    assert said["printed"]["logger"] == "tokenspeed.stdout"
    assert said["native: *** aborted"]["logger"] == "tokenspeed.engine.output"
    assert "no end of line" in said
    assert "engine INFO round 7 [r-1]" in relay.last_lines() and "native: *** aborted" in relay.last_lines()


def test_a_child_never_waits_for_our_reader(child: Callable[..., Relay], tmp_path: Path) -> None:
    """Known failure 38: our own standard error stands still, the child prints 8 MB and ends."""
    reading, writing = os.pipe()
    with leading_to(2, writing), server_logs(LogSettings(), Redactor()):
        relay = child("import os\nfor _ in range(8000): os.write(1, b'y' * 999 + b'\\n')")
        assert relay.last_lines().count("\n") > 100
        reader = threading.Thread(target=_drain, args=(reading,))
        reader.start()
    reader.join(20)
    assert not reader.is_alive()


def test_a_child_that_prints_without_end_is_cut_short(child: Callable[..., Relay], console: Console) -> None:
    before = DROPS.counts().get("engine", 0)
    with console.logs():
        relay = child(
            "import os\nfor n in range(100): os.write(1, b''.join(b'%d\\n' % (n * 1000 + m) for m in range(1000)))"
        )
    missing = DROPS.counts()["engine"] - before
    lines = console.text(2).splitlines()
    said = [int(line.split()[4]) for line in lines if "are missing here" in line]
    assert 0 < missing == sum(said) == 100_000 - (len(lines) - len(said))
    assert relay.last_lines().endswith("\n99998\n99999\n")  # a crash bundle has the end all the same


def test_an_allowance_fills_up_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tokenspeed.telemetry.log_relay.time.monotonic", lambda: now[0])
    allowance = Allowance(per_second=10, burst=3)
    assert [allowance.take() for _ in range(5)] == [True, True, True, False, False]
    now[0] = 0.2
    assert [allowance.take() for _ in range(3)] == [True, True, False]
    now[0] = 100.0
    assert sum(allowance.take() for _ in range(10)) == 3


def _drain(descriptor: int) -> None:
    while os.read(descriptor, 1 << 16):
        pass
    os.close(descriptor)


def test_what_a_child_dropped_is_counted_here(child: Callable[..., Relay]) -> None:
    entry = Entry(
        time="2026-01-01T00:00:00Z", level="warning", process="engine-dropping", logger="x", message="", dropped=5
    )
    child(f"import os; os.write(2, {as_wire(entry)!r})")
    assert DROPS.counts()["engine-dropping"] == 5
    nothing = EngineReading(
        ready=False, lost=0, open_choices=0, snapshot=None, snapshot_age=None, doubtful_operations=()
    )
    page, _ = Metrics(lambda: nothing).page()
    assert b'tokenspeed_log_records_dropped_total{process="engine-dropping"} 5.0' in page
    assert b'tokenspeed_log_records_dropped_total{process="api"}' in page


def test_a_torn_record_is_shown_as_it_is(child: Callable[..., Relay]) -> None:
    entry = Entry(time="2026-01-01T00:00:00Z", level="info", process="engine", logger="x", message="whole")
    relay = child(f"import os; os.write(2, b'no newline' + {as_wire(entry)!r} + {RECORD + as_json(entry)[:30]!r})")
    printed, whole, torn = relay.last_lines().splitlines()
    assert printed == "no newline" and whole.endswith("engine INFO whole") and torn.startswith('{"time"')


def test_both_forms_say_the_same() -> None:
    entry = Entry(
        time="2026-01-01T00:00:00.125Z",
        level="info",
        process="api",
        logger="x",
        message="m",
        request_id="r",
        exception="T\nE",
    )
    assert json.loads(as_json(entry))["exception"] == "T\nE"
    assert as_text(entry).decode().splitlines()[0].endswith(".125 api INFO m [r]")
    assert as_text(entry).decode().splitlines()[1:] == ["  T", "  E"]
