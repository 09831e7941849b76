"""Registration, what is refused and why, and that no compiler is imported for it."""

import re
import subprocess
import sys

import pytest
import torch

from tokenspeed_kernel.ops.kv_cache import attention_signature
from tokenspeed_kernel.platform import PlatformInfo, override_platform
from tokenspeed_kernel.plugins import load_plugins
from tokenspeed_kernel.registry import active_registry
from tokenspeed_kernel.selection import SelectionError, select
from tokenspeed_mla import compiled_store, mla_decode, mla_prefill
from tokenspeed_mla import requirement as mla_requirement
from tokenspeed_mla.compilation import decode_variant

READERS = ["mla_decode", "mla_decode_partial", "mla_extend"]
NAMES = sorted(["merge_partials", "ragged", *READERS, *(f"{mode}_e4m3" for mode in READERS)])
REQUEST = ("attention", "mla_decode", attention_signature(torch.bfloat16))
TRAITS = {"latent_dim": 512, "rotary_dim": 64, "kernel_page_size": 64, "activations": "bfloat16"}


def gpu(major: int, minor: int) -> PlatformInfo:
    return PlatformInfo(
        vendor="nvidia",
        machine="x86_64",
        isa=f"sm_{major}{minor}",
        architecture=(major, minor),
        driver=(580, 0),
        cores=8,
        memory_bytes=1 << 38,
    )


@pytest.fixture(autouse=True)
def _loaded() -> None:
    load_plugins()


def test_the_kernels_join_through_the_plugin_door_and_say_that_they_never_ran():
    ours = [kernel for kernel in active_registry().kernels() if kernel.spec.solution == "mla_cute"]
    assert [kernel.spec.name for kernel in ours] == [f"mla_cute_{name}" for name in NAMES]
    for kernel in ours:
        assert kernel.origin.startswith("tokenspeed-appliance-mla")
        assert "compiled_only" in kernel.spec.tags


@pytest.mark.parametrize("architecture", [(9, 0), (10, 0), (10, 3)])
def test_the_decode_is_chosen_where_rounding_is_allowed(architecture):
    with override_platform(gpu(*architecture)):
        assert select(*REQUEST, TRAITS).spec.name == "mla_cute_mla_decode"
        exact = select(*REQUEST, {**TRAITS, "activations": "float32"})
    assert exact.spec.solution != "mla_cute"


@pytest.mark.parametrize("architecture", [(9, 0), (10, 0), (10, 3)])
def test_a_cache_of_8_bits_has_a_kernel_of_its_own(architecture):
    with override_platform(gpu(*architecture)):
        found = select("attention", "mla_decode", attention_signature(torch.float8_e4m3fn), TRAITS).spec
    assert found.name == "mla_cute_mla_decode_e4m3"


@pytest.mark.parametrize(("cached", "tile_rows"), [(torch.float8_e4m3fn, 128), (torch.float8_e5m2, 64)])
def test_a_pair_converts_no_cache_and_nobody_one_of_another_type(cached, tile_rows):
    with pytest.raises(ValueError, match=r"use their type, or torch\.float8_e4m3fn and tiles of 64 rows"):
        decode_variant("sm_100a", torch.bfloat16, torch.float32, 64, tile_rows, cached)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ((8, 9), "needs architecture sm_90 or sm_100 or sm_103; this is \\(8, 9\\)"),
        ((10, 7), "this is \\(10, 7\\)"),
        ((12, 0), "this is \\(12, 0\\)"),
    ],
)
def test_other_gpus_are_refused_with_the_reason(architecture, reason):
    spec = active_registry().kernel("mla_cute_mla_decode").spec
    assert re.search(reason, str(spec.capability.refusal(gpu(*architecture))))


def test_without_the_compiler_the_reason_names_its_package(monkeypatch):
    monkeypatch.setattr(mla_requirement, "find_spec", lambda name: None)
    assert "nvidia-cutlass-dsl" in str(mla_requirement.WHERE_ATTENDED.refusal(gpu(9, 0)))


@pytest.mark.parametrize("page", [8, 48, 256])
def test_pages_that_it_cannot_load_are_refused(page):
    traits = {**TRAITS, "kernel_page_size": page}
    with override_platform(gpu(9, 0)), pytest.raises(SelectionError, match=f"kernel_page_size is {page}"):
        select(*REQUEST, traits, override="mla_cute")


def test_listing_the_kernels_imports_no_compiler():
    code = "import sys, tokenspeed_mla; tokenspeed_mla.register(); sys.exit('cutlass' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def operands() -> dict[str, torch.Tensor | float]:
    return {
        "q": torch.zeros(2, 1, 4, 576, dtype=torch.bfloat16),
        "cache": torch.zeros(3, 64, 576, dtype=torch.bfloat16),
        "page_table": torch.ones(2, 1, dtype=torch.int32),
        "seq_lens": torch.tensor([5, 6], dtype=torch.int32),
        "scale": 0.1,
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"q": torch.zeros(2, 1, 4, 512, dtype=torch.bfloat16)}, "is not \\[B, q_len, H, 576\\]"),
        ({"cache": torch.zeros(3, 64, 576)}, "give both one type, or a cache of torch.float8_e4m3fn"),
        ({"cache": torch.zeros(3, 64, 580, dtype=torch.bfloat16)[..., :576]}, "TMA takes multiples of 16"),
        ({"page_table": torch.ones(2, 1)}, "is not int32 \\[2, pages\\]"),
        ({"seq_lens": torch.tensor([5], dtype=torch.int32)}, "is not int32 \\[2\\]"),
        ({"scale": 0.0}, "must be above 0"),
        ({}, "run on NVIDIA GPUs"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(changes, says):
    with pytest.raises(ValueError, match=says):
        mla_decode(**{**operands(), **changes})


def rows() -> dict[str, torch.Tensor | float | bool]:
    return {
        "q": torch.zeros(5, 2, 192, dtype=torch.bfloat16),
        "k": torch.zeros(7, 2, 192, dtype=torch.bfloat16),
        "v": torch.zeros(7, 2, 128, dtype=torch.bfloat16),
        "query_start": torch.tensor([0, 5], dtype=torch.int32),
        "key_start": torch.tensor([0, 7], dtype=torch.int32),
        "scale": 0.1,
        "causal": True,
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"q": torch.zeros(5, 2, 128, dtype=torch.bfloat16)}, "is not \\[T, H, 192\\]"),
        ({"k": torch.zeros(7, 3, 192, dtype=torch.bfloat16)}, "is not \\[S, 2, 192\\]"),
        ({"v": torch.zeros(6, 2, 128, dtype=torch.bfloat16)}, "is not \\(7, 2, 128\\)"),
        ({"v": torch.zeros(7, 2, 128)}, "give all one type"),
        ({"k": torch.zeros(7, 2, 195, dtype=torch.bfloat16)[..., :192]}, "TMA takes multiples of 16"),
        ({"query_start": torch.tensor([0, 5])}, "query_start torch.int64 .* is not a contiguous int32"),
        ({"key_start": torch.tensor([0, 3, 7], dtype=torch.int32)}, "2 entries and key_start 3"),
        ({"scale": -1.0}, "must be above 0"),
        ({"out": torch.zeros(5, 2, 192)}, "mla_prefill: out"),
        ({}, "run on NVIDIA GPUs"),
    ],
)
def test_what_the_prefill_cannot_take_is_refused_by_name(changes, says):
    with pytest.raises(ValueError, match=says):
        mla_prefill(**{**rows(), **changes})


def test_compiled_kernels_are_kept_in_a_folder_of_ones_own(tmp_path, monkeypatch):
    place = tmp_path / "kept"
    monkeypatch.setenv(compiled_store.VARIABLE, str(place))
    assert compiled_store.folder() == place
    place.chmod(0o777)
    with pytest.warns(compiled_store.StoreWarning, match="others may write to it"):
        assert compiled_store.folder() is None
    monkeypatch.setenv(compiled_store.VARIABLE, "")
    assert compiled_store.folder() is None


def test_a_kernel_of_other_sources_has_another_name(monkeypatch):
    names = {compiled_store.key_of("a variant", ""), compiled_store.key_of("another", "")}
    names.add(compiled_store.key_of("a variant", "--warnings"))
    monkeypatch.setattr(compiled_store, "_sources", lambda: ("kernel.py", "changed"))
    names.add(compiled_store.key_of("a variant", ""))
    assert len(names) == 4
