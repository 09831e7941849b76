"""An engine process that is started before anybody knows what it serves: taken, or gone without a trace."""

import asyncio
import os
import sys

import pytest

from tokenspeed.cli.commands import CONTAINER_PROGRAMS
from tokenspeed.cli.containers import PROGRAMS
from tokenspeed.engine.process import EngineProcess
from tokenspeed.launch import early_engine
from tokenspeed.launch.early_engine import EarlyEngine
from tokenspeed.launch.environment import default_environment, engine_environment
from tokenspeed.recipes.resolved import ModelSource, ResolvedConfig

SAYS_WHAT_IT_IS_TOLD = "import sys; print('told', sys.stdin.readline(), flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def _light_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_engine, "engine_command", lambda: [sys.executable, "-c", SAYS_WHAT_IT_IS_TOLD])


def has_ended(process: EngineProcess) -> bool:
    return asyncio.run(asyncio.wait_for(process.wait(), 20)) is not None


def test_it_is_taken_by_who_wants_it_as_it_is_and_told_what_to_serve() -> None:
    early = EarlyEngine()
    begun = early.take(default_environment())
    assert begun is not None
    early.discard()  # it is another's now
    begun.process.tell(b"what to serve")
    with os.fdopen(begun.output, "rb") as output:
        assert output.readline() == b"told what to serve\n"
        begun.process.cut()
        assert has_ended(begun.process)
    os.close(begun.traceback)


def test_one_in_another_environment_ends() -> None:
    early = EarlyEngine()
    begun = early._begun
    assert begun is not None
    assert early.take({**default_environment(), "CUDA_VISIBLE_DEVICES": "1"}) is None
    assert has_ended(begun.process)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(begun.output)


def test_one_that_died_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_engine, "engine_command", lambda: [sys.executable, "-c", "raise SystemExit(1)"])
    early = EarlyEngine()
    assert early._begun is not None
    assert has_ended(early._begun.process)
    assert early.take(default_environment()) is None


def test_who_takes_none_leaves_none_behind() -> None:
    with early_engine.early_engine(wanted=True) as early:
        assert early is not None and early._begun is not None
        process = early._begun.process
    assert has_ended(process)
    with early_engine.early_engine(wanted=False) as early:
        assert early is None


def test_the_environment_is_the_defaults_unless_the_configuration_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plain = ResolvedConfig(name="m", served_name="m", model=ModelSource(kind="random", random_config="{}"))
    assert engine_environment(plain) == default_environment()
    assert engine_environment(plain.model_copy(update={"threads": 1000})) != default_environment()
    assert engine_environment(plain.model_copy(update={"env": {"A": "b"}})) == default_environment() | {"A": "b"}


def test_where_containers_may_run_is_asked_of_the_same_programs() -> None:
    assert CONTAINER_PROGRAMS == PROGRAMS
