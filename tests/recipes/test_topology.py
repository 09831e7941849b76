"""Where the cores are, from what the system tells in files."""

from pathlib import Path

import pytest

from tokenspeed.recipes.topology import CpuPlace, cpu_places, default_threads, one_a_core


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine(root: Path, siblings: dict[int, str], nodes: dict[int, str], name: str = "core_cpus_list") -> Path:
    for cpu, text in siblings.items():
        put(root / "cpu" / f"cpu{cpu}" / "topology" / name, text + "\n")
    for node, text in nodes.items():
        put(root / "node" / f"node{node}" / "cpulist", text + "\n")
    return root


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_two_nodes_of_two_cores_with_two_threads_each(tmp_path: Path, name: str) -> None:
    siblings = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    root = machine(tmp_path, siblings, {0: "0-1,4-5", 1: "2-3,6-7"}, name)
    places = cpu_places(range(8), root)
    assert [(place.node, place.core, place.cpu) for place in places] == [
        (0, 0, 0), (0, 0, 4), (0, 1, 1), (0, 1, 5), (1, 2, 2), (1, 2, 6), (1, 3, 3), (1, 3, 7),
    ]  # fmt: skip
    assert [place.cpu for place in one_a_core(places)] == [0, 1, 2, 3]


def test_a_process_that_may_use_some_only(tmp_path: Path) -> None:
    root = machine(tmp_path, {cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(8)}, {0: "0-7"})
    places = cpu_places([3, 5, 4], root)
    assert [(place.core, place.cpu) for place in places] == [(2, 3), (4, 4), (4, 5)]
    assert [place.cpu for place in one_a_core(places)] == [3, 4]


def test_a_system_that_tells_nothing_has_a_core_for_each_cpu_on_one_node(tmp_path: Path) -> None:
    assert cpu_places([1, 0], tmp_path) == [CpuPlace(0, 0, 0), CpuPlace(0, 1, 1)]


def test_this_machine_has_at_least_a_thread_to_compute_with() -> None:
    assert 1 <= default_threads() <= len(cpu_places())
