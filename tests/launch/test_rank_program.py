"""The program of an engine rank: no garbage is looked for while it starts, and it is from then on."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tokenspeed.launch import rank_process
from tokenspeed.recipes.resolved import ModelSource, ResolvedConfig

PROGRAM = """
import gc, sys, types
process = types.ModuleType("tokenspeed.launch.rank_process")
process.main = lambda arguments: 0 if not gc.isenabled() else 5
sys.modules["tokenspeed.launch.rank_process"] = process
from tokenspeed.launch.rank import main
sys.exit(main())
"""


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


def test_the_collector_is_off_before_libraries_load() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM], check=False).returncode == 0


@pytest.mark.usefixtures("collector_off")
def test_the_collector_is_on_once_the_engine_is_ready_and_leaves_the_start_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[bool, bool]] = []
    monkeypatch.setattr(rank_process, "compose_engine", lambda *_: SimpleNamespace(specs=None))
    monkeypatch.setattr(rank_process, "begin_serving", lambda: None)
    monkeypatch.setattr(rank_process, "memory_account", lambda *_: {})
    monkeypatch.setattr(rank_process, "_facts", lambda *_: {})
    channel = SimpleNamespace(send=lambda _: seen.append((gc.isenabled(), gc.get_freeze_count() > 0)))
    config = ResolvedConfig(name="x", served_name="x", model=ModelSource(kind="random", random_config="{}"))
    rank_process._start(config, channel, rank_process.Place())  # type: ignore[arg-type]
    assert seen == [(True, True)]
