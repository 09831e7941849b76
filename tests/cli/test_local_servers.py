"""Which servers of this machine the dashboard finds by itself: records of processes, and published containers."""

from pathlib import Path

import pytest
from fake_programs import only_programs, put_program

from tokenspeed.cli.containers import published_containers
from tokenspeed.cli.local import LocalMachine
from tokenspeed.cli.records import ServerError, ServerRecord, write_record

PS = r"""printf '%s\n' "$*" > "$0.asked"
printf 'serving\t127.0.0.1:8123->8000/tcp\n'
printf 'open\t0.0.0.0:8200->8200/tcp, [::]:8200->8200/tcp\n'
printf 'inside\t8000/tcp\n'
printf 'host-network\t\n'"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    only_programs(tmp_path / "bin", monkeypatch)
    return tmp_path / "bin"


def test_containers_of_our_images_are_found_by_their_published_port(programs: Path) -> None:
    put_program(programs, "podman", PS)
    found = published_containers("podman")
    assert [(one.name, one.url) for one in found] == [
        ("serving", "http://127.0.0.1:8123"),
        ("open", "http://127.0.0.1:8200"),
    ]
    asked = (programs / "podman.asked").read_text()
    assert asked.startswith("ps --filter label=tokenspeed.vendor --format ")
    assert published_containers("docker") == [], "it is not here"


def test_a_program_that_does_not_work_finds_nothing(programs: Path) -> None:
    put_program(programs, "docker", "echo cannot connect >&2; exit 1")
    assert published_containers("docker") == []


def test_a_server_is_found_once_whatever_tells_of_it(programs: Path, own_machine: Path) -> None:
    put_program(programs, "docker", PS)
    write_record(ServerRecord.of_this_process("smollm2-135m", "127.0.0.1", 8123))
    machine = LocalMachine()
    assert [server.url for server in machine.servers()] == ["http://127.0.0.1:8123"]
    found = machine.find()
    assert [server.url for server in found] == ["http://127.0.0.1:8123", "http://127.0.0.1:8200"]
    assert found[0].name == "smollm2-135m"
    assert found[1].where == "open (docker)"


def test_the_demo_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed.cli.local.find_spec", lambda name: None)
    with pytest.raises(ServerError, match="tokenspeed-appliance-scheduler"):
        LocalMachine().demo(0)


def test_every_image_has_the_label_that_finds_its_containers() -> None:
    images = Path(__file__).resolve().parents[2] / "images"
    for vendor in ("cpu", "nvidia", "amd", "npu"):
        assert f'tokenspeed.vendor="{vendor}"' in (images / vendor / "Dockerfile").read_text()
