"""Which CPUs an engine's threads get, and how its memory is spread."""

import ctypes
import os
import platform
import sys
import threading

import pytest

from tokenspeed.launch import environment, memory_nodes
from tokenspeed.launch.environment import PLACES_VARIABLE, engine_environment, thread_places
from tokenspeed.launch.memory_nodes import interleave, node_mask, spread_memory
from tokenspeed.recipes.resolved import ModelSource, ParallelSettings, ResolvedConfig
from tokenspeed.recipes.topology import CpuPlace

HYPERTHREADED = [CpuPlace(cpu // 8, cpu // 2 * 2, cpu) for cpu in range(16)]


@pytest.mark.parametrize(
    ("threads", "places", "expected"),
    [
        (8, HYPERTHREADED, [0, 2, 4, 6, 8, 10, 12, 14]),
        (4, HYPERTHREADED, []),  # others may compute too: two engines would choose the same
        (16, HYPERTHREADED, []),
        (4, HYPERTHREADED[:8], [0, 2, 4, 6]),
        (2, HYPERTHREADED[:4], []),  # the loop and the API process need these very cores
        (3, HYPERTHREADED[:6], []),
    ],
)
def test_threads_have_places_where_there_is_one_a_core(
    threads: int, places: list[CpuPlace], expected: list[int]
) -> None:
    assert thread_places(threads, places) == expected


def test_ranks_divide_the_cores() -> None:
    places = [CpuPlace(0, core, core) for core in range(8)]
    assert [thread_places(4, places, rank=rank, ranks=2) for rank in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert thread_places(8, places, rank=1, ranks=2) == []  # as many threads as all have cores
    assert thread_places(2, places, rank=1, ranks=4) == []


def test_ranks_have_environments_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", PLACES_VARIABLE, "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    places = [CpuPlace(0, core, core) for core in range(8)]
    monkeypatch.setattr(environment, "cpu_places", lambda: places)
    monkeypatch.setattr(environment, "default_threads", lambda ranks=1: 8 // ranks)
    config = ResolvedConfig(
        name="m", served_name="m", model=ModelSource(kind="random"), parallel=ParallelSettings(tp=2)
    )
    found = [engine_environment(config, rank) for rank in range(2)]
    assert [each[PLACES_VARIABLE] for each in found] == ["0,1,2,3", "4,5,6,7"]
    assert all(each["OMP_NUM_THREADS"] == "4" and each["GLOO_SOCKET_IFNAME"] == "lo" for each in found)


def test_the_engines_environment_tells_the_places_unless_the_operator_did(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ResolvedConfig(name="x", served_name="x", model=ModelSource(kind="random"), threads=8)
    monkeypatch.setattr("tokenspeed.launch.environment.cpu_places", lambda: HYPERTHREADED)
    monkeypatch.delenv(PLACES_VARIABLE, raising=False)
    assert engine_environment(config)[PLACES_VARIABLE] == "0,2,4,6,8,10,12,14"
    monkeypatch.setenv(PLACES_VARIABLE, "")
    assert PLACES_VARIABLE not in engine_environment(config)


def test_a_bit_for_each_node() -> None:
    assert node_mask([0, 2, 65]) == 1 | 4 | 1 << 65


@pytest.mark.parametrize(("nodes", "called"), [([0, 0, 0], []), ([1, 0, 1], [[0, 1]])])
def test_only_several_nodes_are_spread_over(
    monkeypatch: pytest.MonkeyPatch, nodes: list[int], called: list[list[int]]
) -> None:
    seen: list[list[int]] = []
    monkeypatch.setattr(memory_nodes, "interleave", lambda given: not seen.append(list(given)))
    spread_memory(nodes)
    assert seen == called


@pytest.mark.skipif(
    sys.platform != "linux"
    or platform.machine() not in ("x86_64", "aarch64")
    or not os.path.exists("/sys/devices/system/node/node0"),
    reason="needs Linux's memory policies",
)
def test_the_system_takes_the_policy() -> None:
    """On a thread of its own, whose policy ends with it."""
    found: list[object] = []

    def run() -> None:
        mode = ctypes.c_int(-1)
        taken = interleave([0])
        number = {"x86_64": 239, "aarch64": 236}[platform.machine()]
        failed = ctypes.CDLL(None).syscall(number, ctypes.byref(mode), None, 0, None, 0)
        found.extend((taken, failed, mode.value))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if found[0] is False:
        pytest.skip("memory policies are forbidden here")
    assert found == [True, 0, 3]
