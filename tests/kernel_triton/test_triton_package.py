"""The package without Triton: what it lists, where it says it runs, how it cuts work. No device, no interpreter."""

import subprocess
import sys
from dataclasses import replace
from importlib import util
from itertools import product

import pytest

from tokenspeed_kernel.ops.mla_tiling import TILE_ROWS, partial_workspace_bytes, tile_rows_padded
from tokenspeed_kernel.ops.split_plan import (
    BUSY_SHARE,
    MAX_SPLITS,
    best_split_count,
    busy_share,
    makespan,
    split_shares,
)
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.plugins import load_plugins
from tokenspeed_kernel.registry import Band, active_registry
from tokenspeed_kernel_triton import configs, requirement
from tokenspeed_kernel_triton.compiler_options import compiler_options
from tokenspeed_kernel_triton.configs import PROCESSORS, SHARED_MEMORY, attention_tile, input_splits, row_blocks
from tokenspeed_kernel_triton.device import compiling_for, nvidia_entry
from tokenspeed_kernel_triton.fp4_registration import BlockScaledRequirement
from tokenspeed_kernel_triton.gated_delta_chunks import room_between_chunks
from tokenspeed_kernel_triton.paged_attention import cut_queries
from tokenspeed_kernel_triton.registration import COMPILED_ONLY
from tokenspeed_kernel_triton.requirement import TritonRequirement


def on(vendor: str, isa: str, architecture: tuple[int, int]):
    return replace(current_platform(), vendor=vendor, isa=isa, architecture=architecture, features=frozenset())


def test_every_kernel_says_that_it_has_not_run_on_a_gpu_and_does_not_run_here():
    load_plugins()
    ours = [k for k in active_registry().kernels() if k.origin.startswith("tokenspeed-appliance-kernel-triton")]
    assert len(ours) == 62
    for kernel in ours:
        assert kernel.spec.band in (Band.PORTABLE, Band.PERFORMANT) and kernel.spec.name.startswith("triton_")
        assert COMPILED_ONLY in kernel.spec.tags
        assert kernel.spec.capability.refusal(current_platform()) == "runs on amd, nvidia; this is cpu"


def test_specs_say_what_a_request_alone_takes_for_its_splits():
    load_plugins()
    latent = active_registry().kernel("triton_attention_mla_decode_bf16").spec
    most = max(PROCESSORS.values())
    assert latent.workspace is not None
    assert latent.workspace({"latent_dim": 512}) == partial_workspace_bytes(1, 128, 1, most) == 128 * most * 513 * 4
    grouped = active_registry().kernel("triton_attention_decode").spec
    assert grouped.workspace is not None and grouped.workspace({"head_dim": 128}) == 16 * most * 129 * 4
    assert active_registry().kernel("triton_attention_extend").spec.workspace is None


def test_listing_kernels_imports_no_compiler_and_no_library_that_is_wrapped():
    code = (
        "import sys; from tokenspeed_kernel.plugins import load_plugins; load_plugins(); "
        "print([name for name in ('triton', 'cutlass', 'flashinfer', 'aiter') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("platform", "reason"),
    [
        (on("nvidia", "sm_80", (8, 0)), None),
        (on("nvidia", "sm_103", (10, 3)), None),
        (on("nvidia", "sm_75", (7, 5)), "needs architecture from (8, 0); this is (7, 5)"),
        (on("amd", "gfx950", (9, 5)), None),
        (on("amd", "gfx90a", (9, 0)), "runs on gfx942 and gfx950; this is gfx90a"),
        (on("npu", "910b", (1, 0)), "runs on amd, nvidia; this is npu"),
    ],
)
def test_where_it_runs(monkeypatch, platform, reason):
    monkeypatch.setattr(requirement, "find_spec", lambda name: object())
    assert TritonRequirement().refusal(platform) == reason


def test_without_triton_it_says_so(monkeypatch):
    monkeypatch.setattr(requirement, "find_spec", lambda name: None)
    told = TritonRequirement().refusal(on("nvidia", "sm_90", (9, 0)))
    assert told == "needs the package triton, which is not installed"
    assert util.find_spec("tokenspeed_kernel_triton") is not None


def test_the_interpreter_counts_as_a_device(monkeypatch):
    monkeypatch.setattr(requirement, "find_spec", lambda name: object())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonRequirement().refusal(current_platform()) is None


@pytest.mark.parametrize(
    ("major", "minor", "entry"),
    [(8, 0, "sm_80"), (8, 9, "sm_86"), (9, 0, "sm_90"), (10, 3, "sm_100"), (13, 0, "sm_130")],
)
def test_devices_take_the_tiles_of_their_generation(major, minor, entry):
    assert nvidia_entry(major, minor) == entry


def test_an_unknown_architecture_is_refused_by_name():
    with pytest.raises(ValueError, match="'sm_9000' is unknown; use one of sm_80"), compiling_for("sm_9000"):
        pytest.fail("not reached")


@pytest.mark.parametrize("architecture", sorted(SHARED_MEMORY))
def test_every_architecture_has_a_tile_for_everything(architecture):
    for kind in ("decode", "extend", "latent"):
        for width in (16, 128, 256):
            for rounded, eight in product((True, False), repeat=2):
                tile = attention_tile(kind, architecture, width, rounded, eight)
                assert tile.rows in (16, 32, 64, 128) and tile.keys in (16, 32, 64) and tile.warps in (4, 8)
    assert {"LANES", "PROCESSORS"} <= set(vars(configs))


def test_the_compiler_is_told_more_on_gfx942_alone():
    chunk, decode = {"RAGGED": True, "LATENT": False}, {"RAGGED": False, "LATENT": True}
    for architecture in sorted(SHARED_MEMORY):
        told = compiler_options(architecture, "attend", chunk)
        assert told == ({"kpack": 2, "matrix_instr_nonkdim": 16} if architecture == "gfx942" else {})
        assert "matrix_instr_nonkdim" not in compiler_options(architecture, "attend", decode)
    assert compiler_options("gfx942", "attend", {"RAGGED": True, "LATENT": True}) == {"kpack": 2}
    assert compiler_options("gfx942", "linear", {}) == {"kpack": 2}
    assert compiler_options("gfx942", "attend", {"RAGGED": False, "LATENT": False}, byte_cache=True) == {}
    assert compiler_options("gfx942", "attend", decode, byte_cache=True) == {"kpack": 2}


def test_row_blocks_are_powers_of_two_that_hold_the_rows():
    for most in (16, 64, 128):
        for rows in range(1, 300):
            block = row_blocks(rows, most)
            assert 16 <= block <= most and block & (block - 1) == 0
            assert block >= min(rows, most)


def test_few_tokens_split_a_weight_until_every_processor_reads_a_part_of_it():
    assert input_splits(tiles=256, tokens=1, inputs=4096, processors=132) == 1
    assert input_splits(tiles=128, tokens=1, inputs=4096, processors=132) == 2
    assert input_splits(tiles=16, tokens=32, inputs=4096, processors=132) == 8
    assert input_splits(tiles=16, tokens=33, inputs=4096, processors=132) == 1
    assert input_splits(tiles=16, tokens=1, inputs=500, processors=132) == 1


@pytest.mark.parametrize("heads", [1, 3, 8, 16, 48, 100, 128])
def test_tiles_hold_every_pair_of_a_token_and_a_head(heads):
    tile = attention_tile("latent", "sm_90", 512, True)
    for width in range(1, 9):
        cut = cut_queries(3 * width, 3, heads, True, tile)
        assert width % cut.tokens == 0
        per_group = -(-cut.tokens * heads // cut.rows)
        assert per_group * cut.rows >= cut.tokens * heads
        assert cut.tiles == 3 * (width // cut.tokens) * per_group
        assert cut.rows >= cut.tokens * min(heads, cut.rows)


def test_rows_of_several_chunks_never_share_the_room_for_a_state():
    for chunk in (16, 64):
        for lengths in ([chunk + 1] * 40, [1] * 60 + [chunk + 1, 1, chunk + 1], [3 * chunk, *[1] * 90, 2 * chunk]):
            tokens, rows = sum(lengths), len(lengths)
            states, apart = room_between_chunks(tokens, rows, chunk)
            firsts = [sum(lengths[:row]) for row in range(rows) if lengths[row] > chunk]
            slots = [first // apart for first in firsts] if apart else list(range(len(firsts)))
            assert len(set(slots)) == len(firsts) and max(slots) < states <= rows
    assert room_between_chunks(8192, 1, 64) == (1, 0)


# ---------------------------------------------------------------- the plan of splits


def simulated(tiles: int, pages: int, splits: int, processors: int) -> int:
    """Blocks one after the other, splits outermost, each to the processor that is free first."""
    share = -(-pages // splits)
    free = [0] * processors
    for split in range(splits):
        for _ in range(tiles):
            first = min(range(processors), key=free.__getitem__)
            free[first] += max(0, min(share, pages - split * share))
    return max(free)


def test_the_makespan_is_that_of_a_device_that_takes_block_after_block():
    for processors in (1, 3, 8):
        for tiles in (0, 1, 2, 7, 11):
            for pages in (0, 1, 5, 16, 31):
                for splits in (1, 2, 3, 7, 16):
                    assert makespan(tiles, pages, splits, processors) == simulated(tiles, pages, splits, processors)


@pytest.mark.parametrize("processors", sorted(set(PROCESSORS.values())))
def test_no_split_count_leaves_a_tenth_of_the_processors_idle_where_the_work_allows_it(processors):
    """Whatever the number of tiles: with pages enough, the chosen count keeps nine tenths busy."""
    for tiles in (*range(1, 40), *range(40, 20 * processors, 37), processors - 1, processors, processors + 1):
        splits = best_split_count(tiles, 4096, processors)
        assert busy_share(tiles, 4096, splits, processors) >= BUSY_SHARE, (tiles, splits)


@pytest.mark.parametrize(("heads", "q_len", "batch"), [(128, 1, 1), (128, 1, 7), (64, 4, 3), (16, 2, 40), (128, 2, 90)])
def test_latent_decode_of_short_rows_is_as_busy_as_any_count_makes_it(heads, q_len, batch):
    """Few pages: no other number of splits does better than the chosen one by more than the tenth that is allowed."""
    tiles = batch * tile_rows_padded(heads, q_len) // TILE_ROWS
    for pages in (1, 2, 5, 13, 64):
        chosen = busy_share(tiles, pages, best_split_count(tiles, pages, 132), 132)
        best = max(busy_share(tiles, pages, splits, 132) for splits in range(1, pages + 1))
        assert chosen >= min(best, BUSY_SHARE)


def test_splits_are_bounded_and_shares_follow_the_contract():
    assert best_split_count(0, 9, 4) == 1 and best_split_count(3, 0, 4) == 1
    assert best_split_count(1, 10**6, 10**4) == MAX_SPLITS
    assert split_shares(10, 7) == (2, 5, 0) and split_shares(10, 4) == (3, 3, 1) and split_shares(0, 3) == (0, 0, 0)
    with pytest.raises(ValueError, match="cannot be cut into 0 splits"):
        split_shares(3, 0)


@pytest.mark.parametrize(
    ("platform", "nvfp4", "mxfp4"),
    [
        (on("nvidia", "sm_100", (10, 0)), None, None),
        (on("nvidia", "sm_120", (12, 0)), None, None),
        (
            on("nvidia", "sm_90", (9, 0)),
            "needs architecture from (10, 0), this is (9, 0)",
            "needs architecture from (10, 0)",
        ),
        (on("amd", "gfx950", (9, 5)), "gfx950 has no such instruction for these scales", None),
        (on("amd", "gfx942", (9, 4)), "gfx942 has no such instruction", "gfx942 has no such instruction"),
        (on("npu", "910b", (1, 0)), "runs on amd, nvidia; this is npu", "runs on amd, nvidia; this is npu"),
    ],
)
def test_products_of_four_bits_run_where_instructions_take_their_scales(monkeypatch, platform, nvfp4, mxfp4):
    monkeypatch.setattr(requirement, "find_spec", lambda name: object())
    for told, reason in (
        (BlockScaledRequirement(amd=False).refusal(platform), nvfp4),
        (BlockScaledRequirement(amd=True).refusal(platform), mxfp4),
    ):
        assert (told is None) == (reason is None) and (reason or "") in (told or "")
