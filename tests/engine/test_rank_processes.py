"""Processes of several ranks held as one: small scripts stand where ranks would."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest
from supervised import POLICY, Link

from tokenspeed.engine.rank_processes import EXIT_PEER_LOST, RankProcesses
from tokenspeed.engine.supervisor import EXIT_CONFIGURATION, Supervisor

WAITS = "import sys; sys.stdin.read()"
"""Ends with its life line."""


def script(**ranks: str) -> list[str]:
    """What each rank does, rank0="...": python code; the others wait."""
    cases = "".join(f"if rank == {name.removeprefix('rank')}:\n    {code}\n" for name, code in ranks.items())
    return [
        sys.executable,
        "-c",
        f"import os, sys, time\nrank, world, folder = int(sys.argv[1]), *sys.argv[2:]\n{cases}{WAITS}",
    ]


def started(world: int = 3, **ranks: str) -> RankProcesses:
    return RankProcesses(script(**ranks), [{"RANK": str(rank)} for rank in range(world)], [None] * world)


def folder_of(processes: RankProcesses) -> Path:
    return Path(processes._folder)


async def test_each_knows_its_place_and_where_all_meet() -> None:
    says = "open(os.path.join(folder, f'{rank} of {world} {os.environ[\"RANK\"]}'), 'w'); sys.stdin.readline()"
    processes = started(2, rank0=f"{says}; sys.exit(0)", rank1=f"{says}; {WAITS}")
    folder = folder_of(processes)
    async with asyncio.timeout(20):
        while len(list(folder.iterdir())) < 2:
            await asyncio.sleep(0.005)
        assert sorted(path.name for path in folder.iterdir()) == ["0 of 2 0", "1 of 2 1"]
        processes.tell(b"a line")
        assert await processes.wait() == 0  # rank 0 ended well, and took the other with it
    assert not processes.is_alive
    assert not folder.exists()


async def test_one_that_is_killed_ends_all_and_is_named() -> None:
    processes = started()
    folder = folder_of(processes)
    processes._ranks[2].send_signal(signal.SIGKILL)
    async with asyncio.timeout(20):
        assert await processes.wait() == -signal.SIGKILL
    assert processes.name == "rank 2 of 3 of the engine"
    assert processes.pid == processes._ranks[2].pid
    assert not processes.is_alive and not folder.exists()


async def test_one_that_ends_well_before_rank_0_is_waited_with() -> None:
    processes = started(rank1="sys.exit(0)", rank2="sys.stdin.readline(); sys.exit(70)")
    async with asyncio.timeout(20):
        end = asyncio.create_task(processes.wait())
        assert await processes._ranks[1].wait() == 0
        processes.tell(b"and now the other")
        assert await end == 70
    assert processes.name == "rank 2 of 3 of the engine"


async def test_who_lost_another_is_not_the_cause() -> None:
    loses = f"sys.stdin.readline(); sys.exit({EXIT_PEER_LOST})"
    processes = started(rank0=loses, rank1=loses)
    async with asyncio.timeout(20):
        end = asyncio.create_task(processes.wait())
        processes.tell(b"one is gone")
        assert [await rank.wait() for rank in processes._ranks[:2]] == [EXIT_PEER_LOST] * 2
        processes._ranks[2].send_signal(signal.SIGKILL)
        assert await end == -signal.SIGKILL
    assert processes.name == "rank 2 of 3 of the engine"


async def test_where_all_say_that_another_is_gone_the_first_is_named() -> None:
    processes = started(2, rank0=f"sys.exit({EXIT_PEER_LOST})", rank1=f"sys.exit({EXIT_PEER_LOST})")
    async with asyncio.timeout(20):
        assert await processes.wait() == EXIT_PEER_LOST
    assert processes.name == "rank 0 of 2 of the engine"


async def test_the_supervisor_starts_all_again_and_names_who_died() -> None:
    link, groups = Link(), []

    def start() -> RankProcesses:
        groups.append(started(2))
        return groups[-1]

    supervisor = Supervisor(command=[], configuration=b"{}", environment={}, link=link, policy=POLICY, ranks=start)
    supervisor.start()
    await link.until(lambda: supervisor.pid is not None)
    groups[0]._ranks[1].send_signal(signal.SIGKILL)
    await link.until(lambda: len(groups) == 2)
    assert link.lost == ["rank 1 of 2 of the engine was ended by SIGKILL"]
    await supervisor.stop()
    assert not any(group.is_alive for group in groups)
    assert not any(folder_of(group).exists() for group in groups)


async def test_a_configuration_error_of_one_rank_is_not_tried_twice() -> None:
    link, groups = Link(), []

    def start() -> RankProcesses:
        groups.append(started(2, rank1=f"sys.exit({EXIT_CONFIGURATION})"))
        return groups[-1]

    supervisor = Supervisor(command=[], configuration=b"{}", environment={}, link=link, policy=POLICY, ranks=start)
    supervisor.start()
    await link.until(lambda: bool(link.given_up))
    assert len(groups) == 1
    await supervisor.stop()


def test_where_one_cannot_be_started_none_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        RankProcesses([str(tmp_path / "nowhere")], [{}, {}], [None, None])
    assert not list(tmp_path.iterdir())
