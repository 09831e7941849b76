"""Checks of the compiled MLA kernels, each run in a process of its own: ``python mla_checks.py NAME [number ...]``.

They compile, and the compiler holds a gigabyte and patches Python; a process that has compiled is not to run other
tests.
"""

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from unittest.mock import patch

import torch
from cuda.bindings.driver import CUstream
from mla_machine import decode_runner, on_machine, prefill_runner
from ptx_arithmetic import MachineError
from ptx_host import shared_bytes, tensor_columns
from ptx_program import Program

from tokenspeed_kernel.numerics.__main__ import main as check_numerics
from tokenspeed_kernel.ops.mla import reference_mla_decode_partial
from tokenspeed_kernel.ops.ragged import reference_ragged
from tokenspeed_kernel.plugins import load_plugins
from tokenspeed_mla import DecodePlan, compilation, compiled_store, mla_decode, mla_prefill
from tokenspeed_mla.addressing import PAIR_KEYS, PAIR_ROWS, TILE_KEYS, TILE_ROWS
from tokenspeed_mla.ahead import MachineCode, compile_ahead
from tokenspeed_mla.compilation import BLACKWELLS, HOPPER, compile_merge, decode_variant, merge_variant, prefill_variant
from tokenspeed_mla.kernels import blackwell as blackwell_decode
from tokenspeed_mla.kernels import (
    blackwell_pair,
    blackwell_prefill,
    blackwell_steps,
    hopper_prefill_steps,
    hopper_steps,
)
from tokenspeed_mla.plan import tile_rows_of

SCALE = 0.06
BYTES = torch.float8_e4m3fn

ALL, ORDERED, URGENT = ("loads", "products"), ("loads", "in order"), ("loads", "by priority")
"""How a block may run (ptx_cluster.run)."""


def make_case(
    lengths: list[int], q_len: int, heads: int, page: int, dtype: torch.dtype, cached: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q of ``dtype``, a cache of ``cached``, table and lengths; NaN wherever nothing was written, and entries far
    outside behind a table's last."""
    generator = torch.Generator().manual_seed(len(lengths) * 1000 + heads + page)
    pages = [-(-n // page) for n in lengths]
    order = (torch.randperm(sum(pages), generator=generator) + 1).tolist()
    # Blocks lie further apart than they are long, as in an arena.
    cache = torch.full((sum(pages) + 1, page + 3, 576), torch.nan, dtype=cached)[:, :page]
    table = torch.full((len(lengths), max(pages) + 2), 10**6, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for index in range(pages[row]):
            table[row, index] = block = order.pop()
            count = min(page, length - index * page)
            cache[block, :count] = torch.randn(count, 576, generator=generator).to(cached)
    q = torch.randn(len(lengths), q_len, heads, 576, generator=generator).to(dtype)
    return q, cache, table, torch.tensor(lengths, dtype=torch.int32)


def compare(
    lengths: list[int],
    q_len: int,
    heads: int,
    page: int,
    splits: int,
    dtype: torch.dtype,
    architecture: str = HOPPER,
    late: tuple[str, ...] = (),
    scale: float = SCALE,
    cached: torch.dtype | None = None,
) -> None:
    """mla_decode on the machine against the reference in float32."""
    q, cache, table, seq_lens = make_case(lengths, q_len, heads, page, dtype, cached or dtype)
    out = torch.full((*q.shape[:3], 512), torch.nan)
    lse = torch.full(q.shape[:3], torch.nan)
    tile_rows = tile_rows_of(cached is None and architecture in BLACKWELLS, heads, q_len)
    plan = DecodePlan(len(lengths), q_len, heads, splits, tile_rows)
    workspace = torch.full((plan.workspace_bytes // 4,), torch.nan)
    with on_machine(architecture, late):
        mla_decode(
            q,
            cache,
            table,
            seq_lens,
            scale,
            splits=splits,
            out=out,
            lse=lse,
            workspace=workspace if splits > 1 else None,
        )
    exact, exact_lse = torch.empty(1, len(lengths) * q_len, heads, 512), torch.empty(1, len(lengths) * q_len, heads)
    flat = q.float().flatten(0, 1)
    latents = (cache if cached is None else cache.float()).unsqueeze(1)
    reference_mla_decode_partial(flat[..., :512], flat[..., 512:], latents, table, seq_lens, scale, exact, exact_lse)
    # The weights are rounded, relatively by 2^-9 or 2^-12; they sum to 1, and a value is rarely above 5.
    bound = 5 * 2.0 ** (-9 if dtype is torch.bfloat16 else -12)
    torch.testing.assert_close(out.view(exact[0].shape), exact[0], rtol=0, atol=bound)
    torch.testing.assert_close(lse.view(exact_lse[0].shape), exact_lse[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.isinf(lse).view(-1), torch.isinf(exact_lse[0]).view(-1))


def said(code: MachineCode, counts: dict[str, int], most_registers: int) -> None:
    """The code has its instructions so often, and spills nothing."""
    for word, count in counts.items():
        assert code.ptx.count(word) == count, f"{word}: {code.ptx.count(word)} times, not {count}"
    assert not re.search(r"\b(ld|st)\.local", code.ptx), "registers are spilt"
    assert code.stack_bytes == 0, f"{code.stack_bytes} bytes of stack, {code.registers} registers"
    assert code.registers <= most_registers, code.registers


def decode_code(architecture: str, tile_rows: int, cached: torch.dtype) -> MachineCode:
    """Of the variant that ``compare`` then runs: queries of bfloat16, outputs of float32, pages of 64 tokens."""
    return decode_runner(architecture, torch.bfloat16, torch.float32, 64, tile_rows, cached).code


def hopper(cached: torch.dtype | None = None) -> None:
    """The decode has the code that was asked for: products of those sizes, loads by TMA, registers and shared memory
    that fit; and it is right. Over a cache of 8 bits only queries are loaded by TMA, and every element is converted
    once."""
    code = decode_code(HOPPER, TILE_ROWS, cached or torch.bfloat16)
    counts = {
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16": 576 // 16,
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16": TILE_ROWS // 16,
        "setmaxnreg.inc.sync.aligned.u32": 1,
        "griddepcontrol.wait": 1,
        "griddepcontrol.launch_dependents": 2,
    }
    said(code, counts | loading(cached), 168)
    # Three steps a block, so that a stage is used again.
    compare([270], 2, 24, 64, 2, torch.bfloat16, cached=cached)
    assert shared_bytes == [hopper_steps.SHARED_BYTES] * 2, shared_bytes


def loading(cached: torch.dtype | None) -> dict[str, int]:
    """The instructions by which a block alone loads queries and keys."""
    return {
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier": (1 if cached else 2) * 576 // 64,
        "ld.global.v4.b32": 2 * 576 // (16 * 4) if cached else 0,
        "cvt.rn.f16x2.e4m3x2": 576 // (2 * 4) if cached else 0,
        "fence.proxy.async.shared::cta": 2 if cached else 1,
    }


def blackwell(cached: torch.dtype | None = None) -> None:
    """As hopper, on tiles of 64 rows."""
    code = decode_code("sm_100a", TILE_ROWS, cached or torch.bfloat16)
    counts = {
        "tcgen05.mma.cta_group::1.kind::f16": 576 // 16 + 2 * TILE_KEYS // 16,
        "tcgen05.ld.sync.aligned.16x32bx2.x32": 1,
        "tcgen05.ld.sync.aligned.32x32b.x32": 2 * 256 // 32,
        "tcgen05.st.sync.aligned.32x32b.x32": 256 // 32,
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one": 2,
        "tcgen05.alloc.cta_group::1": 1,
        "tcgen05.dealloc.cta_group::1": 1,
        "griddepcontrol.wait": 1,
        "griddepcontrol.launch_dependents": 1,
    }
    # Nine warps have the registers of twelve, as they go to four at once.
    said(code, counts | loading(cached), 168 if cached else blackwell_steps.MOST_REGISTERS)
    # Three steps a block, so that a stage is used again; scores so large that the sums are scaled.
    compare([270], 2, 24, 64, 1, torch.bfloat16, "sm_100a", late=ALL, scale=1.0, cached=cached)
    assert shared_bytes == [blackwell_decode.SHARED_BYTES] * 2, shared_bytes
    assert tensor_columns == [256 + 2 * 64], tensor_columns
    if cached:  # whose tiles have 64 rows where those of bfloat16 are a pair's
        compare([70], 1, 128, 64, 1, torch.bfloat16, "sm_100a", cached=cached)


def pair() -> None:
    """As hopper, on tiles of 128 rows by pairs of blocks."""
    code = decode_code("sm_100a", PAIR_ROWS, torch.bfloat16)
    counts = {
        "tcgen05.mma.cta_group::2.kind::f16": 576 // 16 + 2 * PAIR_KEYS // 16,
        "tcgen05.ld.sync.aligned.32x32b.x64": 1,
        "tcgen05.ld.sync.aligned.32x32b.x32": 2 * 256 // 32,
        "tcgen05.st.sync.aligned.32x32b.x32": 256 // 32,
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster": 3,
        "tcgen05.alloc.cta_group::2": 1,
        "tcgen05.dealloc.cta_group::2": 1,
        "mbarrier.arrive.release.cluster.shared::cluster": 1,
        "L2::cache_hint.cta_group::2": 2 * 576 // 64,
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier": 2 * 256 // 64,
        "fence.proxy.async.shared::cta": 1,
        "griddepcontrol.wait": 1,
    }
    said(code, counts, blackwell_steps.MOST_REGISTERS)
    compare([400], 1, 72, 64, 1, torch.bfloat16, "sm_100a", late=ALL, scale=1.0)
    assert shared_bytes == [blackwell_pair.SHARED_BYTES] * 2, shared_bytes
    assert tensor_columns == [256 + 2 * 64], tensor_columns


def faults(kernel: str) -> None:
    """The machine finds each wait or fence that is taken out of the code for Blackwell, and out of the decodes that
    convert a cache of 8 bits: otherwise it proved nothing of them."""
    architecture = HOPPER if kernel == "hopper_bytes" else "sm_100a"
    cached = BYTES if kernel in ("hopper_bytes", "block_bytes") else None
    if kernel == "prefill":
        runner = prefill_runner(architecture, torch.bfloat16, torch.float32, False)
    else:
        tile_rows = PAIR_ROWS if kernel == "pair" else TILE_ROWS
        runner = decode_runner(architecture, torch.bfloat16, torch.float32, 64, tile_rows, cached or torch.bfloat16)

    def check() -> None:
        for late in (ALL, ORDERED, URGENT):
            if kernel == "prefill":
                for keys in (192, 200):
                    compare_prefill([(140, keys)], 1, False, torch.bfloat16, architecture, late, scale=1.0)
            else:
                heads = 72 if kernel == "pair" else 24
                compare([400], 1, heads, 64, 1, torch.bfloat16, architecture, late, scale=1.0, cached=cached)

    check()
    sound = runner.code.ptx
    waits = [one.start() for one in re.finditer(r"mbarrier\.try_wait", sound)]
    spoilt = {f"wait {n}": sound[:at] + "mov.pred P1, -1; //" + sound[at:] for n, at in enumerate(waits)}
    words = ["fence.proxy.async.shared::cta"]
    if architecture != HOPPER:
        words += ["tcgen05.wait::ld.sync.aligned", "tcgen05.wait::st.sync.aligned"]
    for word in words:
        assert word in sound
        spoilt[word] = re.sub(re.escape(word) + "[^;]*;", "", sound)
    if cached is not None:  # that of the warps that convert, and that of the arithmetic or the softmax
        fences = [one.start() for one in re.finditer(re.escape(words[0]), sound)]
        spoilt |= {f"fence {n}": sound[:at] + "//" + sound[at:] for n, at in enumerate(fences)}
    missed = []
    for name, text in spoilt.items():
        runner.program = Program(text)
        try:
            check()
        except (MachineError, AssertionError):
            continue
        missed.append(name)
    assert not missed, f"not found: {missed}"


def same_text() -> None:
    """The code for sm_103a is that for sm_100a, so what is shown of one holds for the other."""
    pairs = [[prefill_variant(one, torch.bfloat16, torch.float32, True) for one in BLACKWELLS]]
    for tile_rows, cached in ((TILE_ROWS, None), (PAIR_ROWS, None), (TILE_ROWS, BYTES)):
        variants = [decode_variant(one, torch.bfloat16, torch.float32, 64, tile_rows, cached) for one in BLACKWELLS]
        pairs.append(variants)
    for variants in pairs:
        texts = [compile_ahead(variant).ptx for variant in variants]
        assert texts[1].count(".target sm_103a") == 1
        assert texts[0] == texts[1].replace(".target sm_103a", ".target sm_100a")


def shapes(architecture: str, page: int, half: int, converts: int) -> None:
    """One variant in many shapes: heads that fill tiles or do not, folds, more splits than pages, empty rows."""
    dtype = torch.float16 if half else torch.bfloat16
    decode = partial(compare, page=page, dtype=dtype, architecture=architecture, cached=BYTES if converts else None)
    decode([200, 70, 0], 1, 16, splits=3)
    decode([65], 1, 128, splits=1, late=ALL)
    decode([3, 129], 4, 24, splits=3)
    decode([64], 3, 40, splits=2, late=ALL)
    decode([150], 4, 16, splits=16)
    decode([390], 1, 8, splits=1, late=ALL, scale=1.0)


def compare_prefill(
    rows: list[tuple[int, int]],
    heads: int,
    causal: bool,
    dtype: torch.dtype,
    architecture: str = HOPPER,
    late: tuple[str, ...] = (),
    scale: float = 1.5 * SCALE,
) -> None:
    """mla_prefill on the machine against the reference in float32, ``rows`` of so many queries and keys. Queries come
    with gaps; keys and values are views of one tensor; behind the last row's keys stands NaN."""
    queries, keys = (sum(counts) for counts in zip(*rows, strict=True))
    generator = torch.Generator().manual_seed(queries * 1000 + keys + heads)
    q = torch.randn(queries + 2, heads, 200, generator=generator).to(dtype)[..., :192]
    kv = torch.randn(keys + 3, heads, 320, generator=generator).to(dtype)
    kv[keys:] = torch.nan
    k, v = kv[..., :192], kv[..., 192:]
    starts, key_starts = (
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32) for counts in zip(*rows, strict=True)
    )
    out, lse = torch.full((queries + 2, heads, 128), 7.0), torch.full((queries + 2, heads), 7.0)
    exact, exact_lse = out.clone(), lse.clone()
    with on_machine(architecture, late):
        mla_prefill(q, k, v, starts, key_starts, scale, causal=causal, out=out, lse=lse)
    reference_ragged(q.float(), k.float(), v.float(), starts, key_starts, scale, exact, exact_lse, causal)
    bound = 5 * 2.0 ** (-9 if dtype is torch.bfloat16 else -12)
    torch.testing.assert_close(out, exact, rtol=0, atol=bound)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-5)


def prefill(architecture: str, causal: int) -> None:
    """The prefill has the code that was asked for, and is right: several rows, tiles and steps, empty rows, rows with
    more queries than keys, keys behind a row's that are another's or nobody's."""
    code = prefill_runner(architecture, torch.bfloat16, torch.float32, bool(causal)).code
    counts = {
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier": 2 * 192 // 64 + 128 // 64,
        "griddepcontrol.wait": 1,
    }
    if architecture == HOPPER:
        counts |= {
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16": 192 // 16 + 128 // 16,
            "griddepcontrol.launch_dependents": 2,
            "setmaxnreg.inc.sync.aligned.u32": 1,
        }
        said(code, counts, 168)
    else:
        counts |= {
            "tcgen05.mma.cta_group::1.kind::f16": 2 * (192 // 16 + 64 // 16),
            "tcgen05.ld.sync.aligned.32x32b.x64": 1,
            "tcgen05.ld.sync.aligned.32x32b.x32": 2 * 128 // 32,
            "tcgen05.st.sync.aligned.32x32b.x32": 128 // 32,
            "setmaxnreg.inc.sync.aligned.u32": 1,
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one": 2 * 2 + 2,
            "griddepcontrol.launch_dependents": 1,
        }
        said(code, counts, 168)
    compare_prefill([(5, 5), (130, 300), (0, 9), (7, 3), (3, 0)], 1, bool(causal), torch.bfloat16, architecture)
    module = hopper_prefill_steps if architecture == HOPPER else blackwell_prefill
    assert shared_bytes == [module.SHARED_BYTES] * 2, shared_bytes
    for late in (ALL, URGENT):
        compare_prefill([(9, 260), (2, 129)], 2, bool(causal), torch.float16, architecture, late)
    compare_prefill([(300, 290)], 1, bool(causal), torch.bfloat16, architecture, ALL, scale=1.0)


def store() -> None:
    """A kernel is compiled once and found by the next process; what cannot be read is compiled anew."""
    variant = merge_variant(HOPPER, torch.bfloat16)
    with tempfile.TemporaryDirectory() as place, patch.dict(os.environ, {compiled_store.VARIABLE: place}):
        compiled = compile_merge(HOPPER, torch.bfloat16)
        (kept,) = Path(place).iterdir()
        compilation._compiled.clear()  # as in the next process
        with patch.object(compilation, "compile_variant", side_effect=AssertionError("compiled anew")):
            found = compile_merge(HOPPER, torch.bfloat16)
        assert found is not compiled
        if not torch.cuda.is_available():
            assert "cudaErrorInsufficientDriver" in failure_of(found)
        compilation._compiled.clear()
        kept.write_bytes(b"no object")
        compile_merge(HOPPER, torch.bfloat16)
        assert kept.stat().st_size > 1000
        assert kept.stem == compiled_store.key_of(variant, compilation.OPTIONS)


def failure_of(merge: Callable[..., None]) -> str:
    """How a launch fails where there is no driver: once its arguments were taken."""
    parts = torch.zeros(1, 1, 1, 512)
    out, sums = torch.zeros(1, 512, dtype=torch.bfloat16), torch.zeros(1, 1, 1)
    pointers = [compilation.address_of(tensor, 16) for tensor in (parts, sums, out, sums)]
    try:
        merge(*pointers, 1, 1, 1, 512, 512, 1, 1, CUstream(0))
    except Exception as error:
        return str(error)
    raise AssertionError("a kernel ran without a GPU")


def numerics(architecture: str, kernel: str) -> None:
    """The cases of the kernel's operation, as ``python -m tokenspeed_kernel.numerics`` has them."""
    load_plugins()
    said = io.StringIO()
    with on_machine(architecture), contextlib.redirect_stdout(said):
        status = check_numerics(["--kernel", kernel])
    print(said.getvalue())
    assert status == 0
    assert "skipped" not in said.getvalue()


CHECKS: dict[str, Callable[..., None]] = {
    "hopper": hopper,
    "hopper_bytes": partial(hopper, BYTES),
    "blackwell": blackwell,
    "blackwell_bytes": partial(blackwell, BYTES),
    "pair": pair,
    "same_text": same_text,
    "faults": faults,
    "prefill": prefill,
    "store": store,
    "shapes": shapes,
    "numerics": numerics,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    CHECKS[sys.argv[1]](*(int(word) if word.isdigit() else word for word in sys.argv[2:]))
