"""The engine's account of its memory: what the system does not tell is left out, and never read as 0."""

import mmap
from pathlib import Path

import pytest
import torch

from tokenspeed.device import residency
from tokenspeed.device.specs import DeviceSpecs
from tokenspeed.launch.memory_report import memory_account, proportional_bytes, report_memory
from tokenspeed.layers.huge_memory import huge_zeros
from tokenspeed.recipes.resolved import ModelSource, ResolvedConfig

CONFIG = ResolvedConfig(
    name="x",
    served_name="x",
    model=ModelSource(kind="random"),
    predicted={"weights": 5, "workspace": 3, "KV cache": 64},
)


def specs(untouched: int | None) -> DeviceSpecs:
    return DeviceSpecs(
        groups=(), prefix_granularity=16, num_parents=1, kv_tokens=0, arena_bytes=64, host_parents=0, host_bytes=0,
        storage=False, weight_bytes=5, workspace_bytes=3, untouched_bytes=untouched, vocab_size=9, max_model_len=9,
        max_num_seqs=1, device="test", kernels={}, kernel_doubts={},
    )  # fmt: skip


def test_the_sum_is_the_growth_and_what_is_not_in_memory_yet() -> None:
    account = memory_account(specs(60), before=100, after=120)
    assert account == {"weights": 5, "workspace": 3, "KV cache": 64, "libraries": 20 + 60 - 72, "sum": 80}


@pytest.mark.parametrize(("untouched", "before", "after"), [(None, 1, 2), (60, None, 2), (60, 1, None)])
def test_a_sum_that_is_not_known_is_left_out(
    untouched: int | None, before: int | None, after: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path))
    account = memory_account(specs(untouched), before, after)
    assert account == {"weights": 5, "workspace": 3, "KV cache": 64}
    _, *rows = report_memory(CONFIG, {"memory": dict(account)})
    assert [row.split()[0] for row in rows] == ["weights", "workspace", "KV"]


def test_a_system_without_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert proportional_bytes(tmp_path) is None
    pool = huge_zeros(mmap.PAGESIZE)

    class Refusing:
        @staticmethod
        def mincore(*_: object) -> int:
            return -1

    for library in (Refusing, object()):
        monkeypatch.setattr(residency, "_LIBC", library)
        assert residency.untouched_bytes(pool.data_ptr(), mmap.PAGESIZE) is None


def test_large_mappings_are_asked_about_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = huge_zeros(64 << 20)
    pool[: 8 << 20] = torch.ones(8 << 20, dtype=torch.uint8)
    whole = residency.untouched_bytes(pool.data_ptr(), pool.numel())
    monkeypatch.setattr(residency, "_STEP", 3 * mmap.PAGESIZE)
    assert residency.untouched_bytes(pool.data_ptr(), pool.numel()) == whole
    assert whole is not None
    assert (48 << 20) < whole <= (56 << 20)
