"""The supervisor over real processes: small scripts stand where the engine would."""

import json
import signal
import sys
from pathlib import Path

import pytest
from supervised import POLICY, Link

from tokenspeed.engine.process import EngineProcess
from tokenspeed.engine.supervisor import EXIT_CONFIGURATION, RestartPolicy, Supervisor
from tokenspeed.messages import PROTOCOL_VERSION, EngineStatus

ECHO_LIFE_LINE = "import sys; sys.stdin.readline(); print('up', flush=True); sys.stdin.read()"


def supervisor_of(code: str, link: Link, gave_up: list[str] | None = None) -> Supervisor:
    def note(cause: str, ever_ready: bool) -> None:
        assert not ever_ready
        if gave_up is not None:
            gave_up.append(cause)

    return Supervisor(
        command=[sys.executable, "-c", code],
        configuration=b"{}",
        environment={"PLANTED": "yes"},
        link=link,
        policy=POLICY,
        on_give_up=note,
    )


def ready() -> EngineStatus:
    return EngineStatus(version=PROTOCOL_VERSION, phase="ready")


async def test_a_killed_engine_is_named_and_started_again_on_fresh_endpoints() -> None:
    link = Link()
    supervisor = supervisor_of(ECHO_LIFE_LINE, link)
    supervisor.start()
    await link.until(lambda: supervisor.pid is not None)
    supervisor.status_received(ready())
    first = supervisor._process
    assert first is not None
    first.send_signal(signal.SIGKILL)
    await link.until(lambda: link.generations == 2)
    assert link.lost == ["the engine process was ended by SIGKILL"]
    await supervisor.stop()
    assert supervisor.pid is None


async def test_what_fails_every_time_is_given_up_after_the_attempts() -> None:
    link, gave_up = Link(), []
    supervisor = supervisor_of("raise SystemExit(9)", link, gave_up)
    supervisor.start()
    await link.until(lambda: bool(gave_up))
    assert len(link.lost) == POLICY.attempts
    assert gave_up == ["the engine process ended with status 9"] == link.given_up
    await supervisor.stop()


async def test_a_configuration_error_is_not_tried_twice() -> None:
    link, gave_up = Link(), []
    supervisor = supervisor_of(f"raise SystemExit({EXIT_CONFIGURATION})", link, gave_up)
    supervisor.start()
    await link.until(lambda: supervisor.pid is not None)
    supervisor.status_received(EngineStatus(version=PROTOCOL_VERSION, phase="failed", error="no such file"))
    await link.until(lambda: bool(gave_up))
    assert link.generations == 1
    assert gave_up == ["the engine failed: no such file"]
    await supervisor.stop()


async def test_a_retired_engine_may_end_and_no_other_starts() -> None:
    link = Link()
    supervisor = supervisor_of("import sys; sys.stdin.readline()", link)
    supervisor.start()
    await supervisor.first_start()
    supervisor.retire()
    await link.until(lambda: supervisor.pid is None)
    await supervisor.stop()
    assert link.generations == 1
    assert link.lost == []


async def test_a_retired_engine_that_dies_still_ends_its_requests() -> None:
    link = Link()
    supervisor = supervisor_of(ECHO_LIFE_LINE, link)
    supervisor.start()
    await link.until(lambda: supervisor.pid is not None)
    supervisor.retire()
    assert supervisor._process is not None
    supervisor._process.send_signal(signal.SIGKILL)
    await link.until(lambda: bool(link.lost))
    assert link.lost == ["the engine process was ended by SIGKILL"]
    assert link.generations == 1
    await supervisor.stop()


async def test_a_command_that_is_not_there_is_an_error_at_once() -> None:
    supervisor = Supervisor(command=["/no/such/engine"], configuration=b"{}", environment={}, link=Link())
    supervisor.start()
    with pytest.raises(FileNotFoundError, match="/no/such/engine"):
        await supervisor.first_start()


async def test_an_engine_that_was_started_before_is_the_first_and_the_next_is_started_here() -> None:
    link = Link()
    early = EngineProcess([sys.executable, "-c", "import sys; sys.stdin.readline()"], {})
    command = [sys.executable, "-c", ECHO_LIFE_LINE]
    supervisor = Supervisor(command=command, configuration=b"{}", environment={}, link=link, early=early)
    supervisor.start()
    await supervisor.first_start()
    assert supervisor._process is early
    await link.until(lambda: supervisor.pid not in (None, early.pid))
    assert link.lost == ["the engine process ended with status 0"]
    assert link.generations == 2
    await supervisor.stop()


async def test_an_engine_is_told_its_endpoints_and_its_configuration(tmp_path: Path) -> None:
    link, told = Link(), tmp_path / "told"
    code = f"import sys, pathlib; pathlib.Path({str(told)!r}).write_text(sys.stdin.readline()); sys.stdin.read()"
    supervisor = supervisor_of(code, link)
    supervisor.start()
    await link.until(lambda: told.exists() and told.read_text().endswith("\n"))
    assert json.loads(told.read_text()) == {"endpoints": ["in-1", "out-1"], "configuration": {}}
    await supervisor.stop()


async def test_stop_ends_an_engine_that_ignores_its_life_line() -> None:
    link = Link()
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    supervisor = supervisor_of(stubborn, link)
    supervisor.start()
    await link.until(lambda: supervisor.pid is not None)
    await supervisor.stop(grace_s=0.3)
    assert supervisor.pid is None and link.lost == []


@pytest.mark.parametrize(("failures", "expected"), [(1, 0.2), (2, 0.4), (4, 1.6), (30, 30.0)])
def test_the_back_off_doubles_up_to_a_bound(failures: int, expected: float) -> None:
    assert RestartPolicy().delay(failures) == pytest.approx(expected)
