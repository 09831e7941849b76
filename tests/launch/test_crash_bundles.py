"""Crash bundles over real processes: small scripts stand where the engine would."""

import asyncio
import json
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.engine.process import TRACEBACK_VARIABLE
from tokenspeed.engine.supervisor import (
    EXIT_CONFIGURATION,
    EngineDeath,
    RestartPolicy,
    Supervisor,
)
from tokenspeed.launch.crash import KEPT, LONGEST_FILE, Crash, CrashReporter, crash_bundles, write_bundle
from tokenspeed.launch.engine_streams import EngineOutput
from tokenspeed.messages import PROTOCOL_VERSION, EngineStatus
from tokenspeed.recipes.resolved import ModelSource, ResolvedConfig
from tokenspeed.telemetry.redaction import Redactor

CONFIG = ResolvedConfig(
    name="tiny/model",
    served_name="tiny",
    model=ModelSource(kind="random"),
    recipe="tiny",
    env={"SOME_TOKEN": "abc", "OMP_NUM_THREADS": "2"},
)
READ_CONFIGURATION = "import sys, os, faulthandler; sys.stdin.readline(); "
STACKS = f"faulthandler.enable(int(os.environ['{TRACEBACK_VARIABLE}'])); "


class Link:
    def __init__(self) -> None:
        self.lost: list[str] = []

    def rebind(self) -> tuple[str, str]:
        return "in", "out"

    def engine_lost(self, cause: str) -> None:
        self.lost.append(cause)

    def engine_given_up(self, cause: str) -> None:
        pass


class Ward:
    """A supervisor whose engine is a script, with everything that looks at its end."""

    def __init__(self, code: str, attempts: int = 1) -> None:
        self.link = Link()
        self.written: list[Path] = []
        self.output = EngineOutput(Redactor({"sk-very-secret"}))
        self.reporter = CrashReporter(
            config=CONFIG,
            output=self.output,
            redact=Redactor({"sk-very-secret"}),
            server_log=lambda: "what the server said\n",
            engine_facts=lambda: ({"kernels": {"gemm": "plain"}}, None),
            on_written=self.written.append,
        )
        self.gave_up = asyncio.Event()
        self.supervisor = Supervisor(
            command=[sys.executable, "-c", READ_CONFIGURATION + code],
            configuration=b"{}",
            environment={},
            link=self.link,
            policy=RestartPolicy(first_s=0.0, attempts=attempts),
            on_give_up=lambda cause, ever_ready: self.gave_up.set(),
            streams=self.output.open,
            on_death=self.reporter.engine_died,
        )

    async def run(self, last_words: str = "") -> None:
        """Starts it and waits until it is given up and the bundle is written."""
        self.supervisor.start()
        await self.supervisor.first_start()
        if last_words:
            self.supervisor.status_received(EngineStatus(version=PROTOCOL_VERSION, phase="failed", error=last_words))
        async with asyncio.timeout(20):
            await self.gave_up.wait()
        await self.supervisor.stop()
        self.reporter.finish(20)
        self.output.close()


@pytest.fixture
def crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path))
    return tmp_path / "crashes"


def read(folder: Path, name: str = "crash.json") -> dict[str, Any]:
    return dict(json.loads((folder / name).read_text()))


async def test_a_fatal_signal_leaves_its_stacks_and_last_words(crashes: Path) -> None:
    said = "print('loading with sk-very-secret', flush=True); os.write(2, b'native words'); "
    ward = Ward(STACKS + said + "os.kill(os.getpid(), 11)")
    await ward.run()
    (folder,) = crashes.iterdir()
    assert ward.written == [folder] and folder.name.endswith("Z-tiny_model")
    about = read(folder)
    assert about["cause"] == "the engine process was ended by SIGSEGV" == ward.link.lost[0]
    assert (about["exit_status"], about["signal"], about["was_ready"]) == (-11, "SIGSEGV", False)
    assert about["engine"] == {"kernels": {"gemm": "plain"}}
    assert "Segmentation fault" in (folder / "traceback.txt").read_text()
    assert (folder / "engine.log").read_text() == "loading with ***\nnative words\n"
    assert (folder / "server.log").read_text() == "what the server said\n"
    assert read(folder, "config.json")["env"] == {"SOME_TOKEN": "***", "OMP_NUM_THREADS": "2"}
    assert read(folder, "environment.json")["python"].startswith("3.")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_a_configuration_error_says_so(crashes: Path) -> None:
    ward = Ward(f"sys.exit({EXIT_CONFIGURATION})")
    await ward.run("no kernel of this name")
    (folder,) = crashes.iterdir()
    about = read(folder)
    assert about["cause"] == "the engine failed: no kernel of this name" and about["configuration_error"]
    assert about["signal"] is None and not (folder / "traceback.txt").exists()


async def test_each_start_has_its_own_stacks(crashes: Path) -> None:
    """The second engine ends by itself: the first one's stacks are not its own."""
    mark = crashes.parent / "mark"
    once = f"p = {str(mark)!r}; first = not os.path.exists(p); open(p, 'w').close(); "
    await Ward(STACKS + once + "os.kill(os.getpid(), 6) if first else sys.exit(9)", attempts=2).run()
    found = {read(folder)["exit_status"]: (folder / "traceback.txt").exists() for folder in crashes.iterdir()}
    assert found == {-signal.SIGABRT: True, 9: False}


async def test_what_cannot_be_written_harms_nobody(crashes: Path, caplog: pytest.LogCaptureFixture) -> None:
    crashes.write_text("a file stands where the folder should be")
    ward = Ward("sys.exit(9)", attempts=3)
    await ward.run()
    assert len(ward.link.lost) == 3 and ward.written == []
    assert f"no crash bundle: {crashes} cannot be written" in caplog.text


async def test_a_report_that_fails_harms_nobody(crashes: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(death: EngineDeath) -> None:
        raise RuntimeError("of no use")

    ward = Ward("sys.exit(9)", attempts=2)
    ward.supervisor._on_death = fail
    await ward.run()
    assert len(ward.link.lost) == 2 and "the engine's end could not be reported" in caplog.text


async def test_a_grandchild_that_holds_the_output_delays_only_so_long(
    crashes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenspeed.launch.crash.LAST_WORDS_S", 0.05)
    spawn = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); sys.exit(9)"
    await Ward(spawn).run()
    (folder,) = crashes.iterdir()
    os.kill(int((folder / "engine.log").read_text()), signal.SIGKILL)


def some_crash(when: float = 0.0, **changes: Any) -> Crash:
    death = EngineDeath(cause="it ended", status=9, pid=1, ran_s=1.5, was_ready=True)
    return Crash(when=when, death=death, config=CONFIG, engine={}, snapshot=None, **changes)


def test_so_many_are_kept_and_the_oldest_go(tmp_path: Path) -> None:
    written = [write_bundle(tmp_path, some_crash(when), Redactor()) for when in range(KEPT + 3)]
    assert crash_bundles(tmp_path) == written[-KEPT:]


def test_two_in_one_second_have_two_names(tmp_path: Path) -> None:
    names = [write_bundle(tmp_path, some_crash(), Redactor()).name for _ in range(3)]
    assert names == [f"19700101T000000Z-tiny_model{end}" for end in ("", "-2", "-3")]


def test_a_bundle_is_bounded_and_keeps_the_end_of_a_log(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, some_crash(engine_log="x" * 3 * LONGEST_FILE + "the end"), Redactor())
    text = (folder / "engine.log").read_text()
    assert len(text) == LONGEST_FILE and text.endswith("the end")


def test_a_bundle_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_bundle(tmp_path, some_crash(), Redactor())
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_removed_later(tmp_path: Path) -> None:
    old, new = tmp_path / ".unfinished-1-1", tmp_path / ".unfinished-2-2"
    old.mkdir()
    new.mkdir()
    os.utime(old, (0, 0))
    folder = write_bundle(tmp_path, some_crash(), Redactor())
    assert sorted(tmp_path.iterdir()) == sorted([new, folder])
    assert crash_bundles(tmp_path) == [folder]


@pytest.fixture
def output() -> Iterator[EngineOutput]:
    output = EngineOutput(Redactor())
    yield output
    output.close()


def test_descriptors_do_not_pile_up(output: EngineOutput) -> None:
    def turn() -> None:
        with output.open() as streams:
            os.write(streams.output, b"word\n")
        assert output.relay.end_of_last().wait(20)

    turn()
    before, threads = descriptors(lambda: None), threading.active_count()
    assert descriptors(turn) == before == descriptors(turn)
    assert output.relay.last_lines() == "word\n" * 3
    assert threading.active_count() <= threads


def descriptors(work: Callable[[], None]) -> int:
    work()
    return len(os.listdir("/proc/self/fd"))
