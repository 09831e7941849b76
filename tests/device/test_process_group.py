"""What a device's collective library is prepared with before the ranks meet."""

import os

import pytest

from tokenspeed.device import process_group


@pytest.fixture
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in process_group.ENVIRONMENT.values():
        for name in variables:
            monkeypatch.setenv(name, "")  # so that what is set meanwhile is undone
            monkeypatch.delenv(name)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What init_process_group is called with, in place of a meeting."""
    calls: list[object] = []
    monkeypatch.setattr(
        process_group.distributed, "init_process_group", lambda *args, **named: calls.append((args, named))
    )
    return calls


@pytest.mark.usefixtures("_clean")
def test_hccl_is_set_up_before_the_ranks_meet(monkeypatch, asked):
    imported: list[str] = []
    monkeypatch.setattr(process_group, "import_module", imported.append)
    monkeypatch.setenv("HCCL_DETERMINISTIC", "strict")
    group = process_group.join("/meeting", rank=1, world=2, device="npu")
    assert imported == ["torch_npu"]
    assert os.environ["HCCL_CONNECT_TIMEOUT"] == "1800"
    assert 120 <= int(os.environ["HCCL_CONNECT_TIMEOUT"]) <= 7200, "what HCCL takes"
    assert os.environ["HCCL_DETERMINISTIC"] == "strict", "the operator's word counts"
    ((backends, *_), named) = asked[0]
    assert backends == "cpu:gloo,npu:hccl"
    assert (named["rank"], named["world_size"], group.rank) == (1, 2, 1)


@pytest.mark.usefixtures("_clean")
def test_without_torch_npu_the_reason_says_what_to_install(monkeypatch, asked):
    def absent(name: str) -> None:
        raise OSError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr(process_group, "import_module", absent)
    with pytest.raises(
        RuntimeError, match=r"backend hccl, cannot be imported \(OSError: libhccl.*install torch-npu and CANN"
    ):
        process_group.join("/meeting", rank=0, world=2, device="npu")
    assert asked == []


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_other_devices_are_left_as_they_are(monkeypatch, asked, device):
    before = dict(os.environ)
    monkeypatch.setattr(process_group, "import_module", pytest.fail)
    process_group.join("/meeting", rank=0, world=2, device=device)
    assert dict(os.environ) == before
    assert asked[0][0] == (process_group.BACKENDS[device],)
