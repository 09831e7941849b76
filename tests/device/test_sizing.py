"""How large the KV cache becomes, what a sequence may be, and what the machine is found to have."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import random_config, resolved

from tokenspeed.device import sizing
from tokenspeed.device.cache_arena import ArenaLayout
from tokenspeed.device.placement import Placement
from tokenspeed.device.sizing import CacheSize, MemoryPlanError, cache_size, kv_dtype
from tokenspeed.layers.cache_spec import CacheFieldSpec, CacheGroupSpec
from tokenspeed.models import architecture
from tokenspeed.recipes.host import available_cores, free_memory_bytes
from tokenspeed.recipes.model_config import read_model_config
from tokenspeed.recipes.resolved import GIB, ModelSource

RANDOM = ModelSource(kind="random", random_config=random_config())
CONFIG = read_model_config(RANDOM)
PARENT = 2 * 2 * 2 * 16 * 16 * 4  # layers, fields, heads, tokens, dim, float32


def size(*, free: int = 10 * GIB, weight_bytes: int = 0, monkeypatch: pytest.MonkeyPatch, **changes: int) -> CacheSize:
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: free)
    layout = ArenaLayout.of(architecture("llama").cache_groups(CONFIG, granularity=16), torch.float32)
    assert layout.parent_bytes == PARENT
    return cache_size(resolved(RANDOM, **changes), CONFIG, layout, weight_bytes=weight_bytes)  # type: ignore[arg-type]


def test_all_sequences_fit_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    found = size(max_seqs=4, max_len=100, overlap=1, monkeypatch=monkeypatch)
    assert found == CacheSize(num_parents=4 * 7, kv_tokens=4 * 7 * 16, max_model_len=100, table_slots=7)


def on_a_device(free: int, total: int, fraction: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """Parents of a cache on a device with so much memory, for as many tokens as fit."""
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: 0)
    runtime = SimpleNamespace(Stream=object, empty_cache=lambda: None, mem_get_info=lambda _device: (free, total))
    config = resolved(RANDOM, max_seqs=64, max_len=256, overlap=0, granularity=16)
    config = config.model_copy(update={"kv": config.kv.model_copy(update={"fraction": fraction}), "device": "cuda"})
    layout = ArenaLayout.of(architecture("llama").cache_groups(CONFIG, granularity=16), torch.float32)
    place = Placement(torch.device("cuda", 0), runtime)
    return cache_size(config, CONFIG, layout, placement=place, weight_bytes=1 << 40).num_parents


def test_a_device_gives_what_its_fraction_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    total, free = 64 << 20, 32 << 20
    most = on_a_device(free, total, 1.0, monkeypatch)
    assert 0 < most * PARENT < free - (4 << 20), "buffers and graphs have their part"
    assert most - on_a_device(free, total, 0.9, monkeypatch) == pytest.approx(total * 0.1 / PARENT, abs=1)
    assert most - on_a_device(free - 100 * PARENT, total, 1.0, monkeypatch) == 100
    with pytest.raises(MemoryPlanError, match=r"what weights and buffers leave of kv\.fraction"):
        on_a_device(4 << 20, total, 0.9, monkeypatch)


def test_every_group_takes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window needs its blocks and two more however long a sequence is, a state two: the scheduler's arithmetic."""
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: 10 * GIB)
    fields = (CacheFieldSpec(name="k", heads=2, dim=16),)
    history = {"fields": fields, "rows_per_page": 16, "entry_stride_tokens": 1}
    layout = ArenaLayout.of(
        [
            CacheGroupSpec(group_id="full", kind="full_history", layers=(0,), **history),
            CacheGroupSpec(group_id="window", kind="sliding_window", layers=(1,), sliding_window_tokens=32, **history),
            CacheGroupSpec(
                group_id="state",
                kind="state",
                layers=(2,),
                fields=(CacheFieldSpec(name="ssm", heads=1, dim=256),),
                checkpoint_granularity=64,
            ),
        ],
        torch.float32,
    )
    assert [facts.children_per_parent for facts in layout.facts] == [1, 1, 2]
    config = resolved(RANDOM, max_seqs=3, max_len=200, overlap=0)
    found = cache_size(config, CONFIG, layout, weight_bytes=0)
    assert found.num_parents == 3 * (13 + 4 + 1)
    assert found.kv_tokens == (3 * 18 - 4 - 1) * 16
    assert (found.max_model_len, found.table_slots) == (200, 13)
    tight = config.model_copy(update={"kv": config.kv.model_copy(update={"bytes": 18 * layout.parent_bytes})})
    with pytest.raises(MemoryPlanError, match="19 parents of 2048 bytes need"):
        cache_size(tight, CONFIG, layout, weight_bytes=0)


def test_the_host_pool_counts_its_null_parent_and_takes_from_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ArenaLayout.of(architecture("llama").cache_groups(CONFIG, granularity=16), torch.float32)
    config = resolved(RANDOM, max_len=100)
    assert sizing.host_parents(config, layout) == 0
    hosted = config.model_copy(update={"kv": config.kv.model_copy(update={"host_bytes": 9 * PARENT + 5})})
    assert sizing.host_parents(hosted, layout) == 8
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: 4 * 11 * PARENT + 9 * PARENT + 5)
    assert cache_size(hosted, CONFIG, layout, weight_bytes=0).num_parents == 10


def test_the_storage_takes_a_tenth_of_its_file_system_unless_it_is_told(tmp_path: Path) -> None:
    config = resolved(RANDOM)
    at = {"storage_dir": str(tmp_path / "not" / "made" / "yet")}
    config = config.model_copy(update={"kv": config.kv.model_copy(update=at)})
    assert sizing.storage_limit(config) == shutil.disk_usage(tmp_path).total // 10
    told = config.model_copy(update={"kv": config.kv.model_copy(update={"storage_bytes": 77})})
    assert sizing.storage_limit(told) == 77


def test_overlapping_steps_are_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert size(max_len=96, overlap=0, monkeypatch=monkeypatch).table_slots == 6
    assert size(max_len=96, overlap=1, monkeypatch=monkeypatch).table_slots == 7


def test_a_quarter_of_what_the_weights_leave_is_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 4 * 11 * PARENT + 1000
    assert size(free=free, weight_bytes=1000, max_len=100, monkeypatch=monkeypatch).num_parents == 10
    assert size(free=free, weight_bytes=1000 + 4 * PARENT, max_len=100, monkeypatch=monkeypatch).num_parents == 9


def test_length_0_is_the_models_context_or_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert size(max_len=0, monkeypatch=monkeypatch).max_model_len == CONFIG.context_length == 256
    assert size(free=4 * 6 * PARENT, max_len=0, monkeypatch=monkeypatch).max_model_len == 5 * 16


def test_explicit_bytes_count_the_null_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert size(kv_bytes=9 * PARENT + 5, max_len=100, monkeypatch=monkeypatch).num_parents == 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_len": 257}, "max_len is 257 tokens, the model was made for 256"),
        ({"max_len": 100, "kv_bytes": 5 * PARENT}, r"kv\.bytes.*8 parents of 8192 bytes need"),
        ({"max_len": 0, "kv_bytes": PARENT}, "raise kv.bytes, or lower scheduler.max_len or kv.granularity"),
        ({"max_len": 100, "free": 4 * PARENT}, "a quarter of the free memory"),
        ({"max_len": 0, "free": 100, "weight_bytes": 1000}, "may take 0.000 GiB"),
    ],
)
def test_too_little_is_refused_with_the_figures(
    changes: dict[str, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MemoryPlanError, match=words):
        size(**changes, monkeypatch=monkeypatch)


def test_the_dtype_of_the_cache(tmp_path: Path) -> None:
    bfloat16 = read_model_config(ModelSource(kind="random", random_config=random_config(dtype="bfloat16")))
    assert kv_dtype(resolved(RANDOM), CONFIG) == torch.float32
    assert kv_dtype(resolved(RANDOM), bfloat16) == torch.bfloat16
    assert kv_dtype(resolved(RANDOM, kv_dtype="float16"), CONFIG) == torch.float16
    assert kv_dtype(resolved(RANDOM, kv_dtype="float8_e4m3"), CONFIG) == torch.float8_e4m3fn
    gguf = ModelSource(kind="gguf", path=str(tmp_path / "x.gguf"))
    assert kv_dtype(resolved(gguf), bfloat16) == torch.float16


def machine(root: Path, *, cgroup: str, files: dict[str, str], available_kib: int = 1 << 20) -> tuple[Path, Path]:
    """A made-up /sys/fs/cgroup and /proc."""
    proc, groups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {available_kib} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    return groups, proc


def test_free_memory_is_the_machines_without_a_limit(tmp_path: Path) -> None:
    files = {"memory.max": "max\n", "memory.current": "5\n"}
    assert free_memory_bytes(*machine(tmp_path, cgroup="0::/\n", files=files)) == 1 << 30


def test_free_memory_is_the_least_of_all_enclosing_groups(tmp_path: Path) -> None:
    files = {
        "a/memory.max": "1000",
        "a/memory.current": "900",
        "a/memory.stat": "anon 5\ninactive_file 250\n",
        "a/b/memory.max": "5000",
        "a/b/memory.current": "100",
    }
    assert free_memory_bytes(*machine(tmp_path, cgroup="0::/a/b\n", files=files)) == 1000 - 900 + 250


def test_free_memory_of_the_older_hierarchy(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": "4000",
        "memory/job/memory.usage_in_bytes": "3000",
        "memory/job/memory.stat": "total_inactive_file 10\n",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "1",
    }
    groups, proc = machine(tmp_path, cgroup="4:cpu,cpuacct:/\n3:memory:/job\n0::/\n", files=files)
    assert free_memory_bytes(groups, proc) == 1010


def test_a_path_of_the_host_is_not_followed(tmp_path: Path) -> None:
    files = {"memory.max": "700", "memory.current": "100"}
    assert free_memory_bytes(*machine(tmp_path, cgroup="0::/../../other\n", files=files)) == 600


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/x\n", {"x/cpu.max": "100000 100000\n"}),
        ("2:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "50000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}),
    ],
)
def test_a_quota_bounds_the_cores(tmp_path: Path, cgroup: str, files: dict[str, str]) -> None:
    assert available_cores(*machine(tmp_path, cgroup=cgroup, files=files)) == 1


def test_cores_without_a_quota_are_those_of_the_affinity(tmp_path: Path) -> None:
    import os

    files = {"cpu.max": "max 100000\n"}
    assert available_cores(*machine(tmp_path, cgroup="0::/\n", files=files)) == len(os.sched_getaffinity(0))
