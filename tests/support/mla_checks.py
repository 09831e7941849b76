"""Checks of the compiled MLA kernels, each run in a process of its own: ``python mla_checks.py NAME [number ...]``.

They compile, and the compiler holds a gigabyte and patches Python; a process that has compiled is not to run other
tests.
"""

import contextlib
import io
import re
import sys
from collections.abc import Callable

import torch
from mla_machine import on_machine
from ptx_host import shared_bytes

from tokenspeed_kernel.numerics.__main__ import main as check_numerics
from tokenspeed_kernel.ops.mla import reference_mla_decode_partial
from tokenspeed_kernel.plugins import load_plugins
from tokenspeed_mla import DecodePlan, mla_decode
from tokenspeed_mla.addressing import TILE_ROWS
from tokenspeed_mla.ahead import compile_ahead, variants
from tokenspeed_mla.compilation import HOPPER, decode_variant
from tokenspeed_mla.kernels.hopper_steps import SHARED_BYTES

SCALE = 0.06


def make_case(
    lengths: list[int], q_len: int, heads: int, page: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, cache, table and lengths; NaN wherever nothing was written, and entries far outside behind a table's last."""
    generator = torch.Generator().manual_seed(len(lengths) * 1000 + heads + page)
    pages = [-(-n // page) for n in lengths]
    order = (torch.randperm(sum(pages), generator=generator) + 1).tolist()
    # Blocks lie further apart than they are long, as in an arena.
    cache = torch.full((sum(pages) + 1, page + 3, 576), torch.nan, dtype=dtype)[:, :page]
    table = torch.full((len(lengths), max(pages) + 2), 10**6, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for index in range(pages[row]):
            table[row, index] = block = order.pop()
            count = min(page, length - index * page)
            cache[block, :count] = torch.randn(count, 576, generator=generator).to(dtype)
    q = torch.randn(len(lengths), q_len, heads, 576, generator=generator).to(dtype)
    return q, cache, table, torch.tensor(lengths, dtype=torch.int32)


def compare(lengths: list[int], q_len: int, heads: int, page: int, splits: int, dtype: torch.dtype) -> None:
    """mla_decode on the machine against the reference in float32."""
    q, cache, table, seq_lens = make_case(lengths, q_len, heads, page, dtype)
    out = torch.full((*q.shape[:3], 512), torch.nan)
    lse = torch.full(q.shape[:3], torch.nan)
    plan = DecodePlan(len(lengths), q_len, heads, splits)
    workspace = torch.full((plan.workspace_bytes // 4,), torch.nan)
    with on_machine():
        mla_decode(
            q,
            cache,
            table,
            seq_lens,
            SCALE,
            splits=splits,
            out=out,
            lse=lse,
            workspace=workspace if splits > 1 else None,
        )
    exact, exact_lse = torch.empty(1, len(lengths) * q_len, heads, 512), torch.empty(1, len(lengths) * q_len, heads)
    flat = q.float().flatten(0, 1)
    latents = cache.unsqueeze(1)
    reference_mla_decode_partial(flat[..., :512], flat[..., 512:], latents, table, seq_lens, SCALE, exact, exact_lse)
    # The weights are rounded, relatively by 2^-9 or 2^-12; they sum to 1, and a value is rarely above 5.
    bound = 5 * 2.0 ** (-9 if dtype is torch.bfloat16 else -12)
    torch.testing.assert_close(out.view(exact[0].shape), exact[0], rtol=0, atol=bound)
    torch.testing.assert_close(lse.view(exact_lse[0].shape), exact_lse[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.isinf(lse).view(-1), torch.isinf(exact_lse[0]).view(-1))


def instructions() -> None:
    """The code that was asked for: products of those sizes, loads by TMA, registers and shared memory that fit."""
    code = compile_ahead(decode_variant(HOPPER, torch.bfloat16, torch.float32, 64))
    counts = {
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16": 576 // 16,
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16": TILE_ROWS // 16,
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier": 2 * 576 // 64,
        "setmaxnreg.inc.sync.aligned.u32": 1,
        "fence.proxy.async.shared::cta": 1,
    }
    for word, count in counts.items():
        assert code.ptx.count(word) == count, f"{word}: {code.ptx.count(word)} times, not {count}"
    assert not re.search(r"\b(ld|st)\.local", code.ptx), "registers are spilt"
    assert code.stack_bytes == 0, code
    assert code.registers == 168, code
    compare([270], 2, 24, 64, 2, torch.bfloat16)  # three steps a block, so that a stage is used again
    assert shared_bytes == [SHARED_BYTES, SHARED_BYTES], shared_bytes


def shapes(page: int, half: int) -> None:
    """One variant in many shapes: heads that fill tiles or do not, folds, more splits than pages, empty rows."""
    dtype = torch.float16 if half else torch.bfloat16
    compare([200, 70, 0], 1, 16, page, 3, dtype)
    compare([65], 1, 128, page, 1, dtype)
    compare([3, 129], 4, 24, page, 5, dtype)
    compare([64], 3, 40, page, 2, dtype)
    compare([300], 4, 16, page, 64, dtype)
    compare([390], 1, 8, page, 1, dtype)


def everything_compiles() -> None:
    """Every variant, without a warning and without a spill."""
    for variant in variants():
        code = compile_ahead(variant)
        # The merge keeps an address while the exact reciprocal is called, once a row.
        most = 8 if variant.kernel == "merge" else 0
        assert code.stack_bytes <= most, f"{variant}: {code.stack_bytes} bytes of stack"
        assert code.registers <= 168, f"{variant}: {code.registers} registers"


def numerics(kernel: str) -> None:
    """The cases of the kernel's operation, as ``python -m tokenspeed_kernel.numerics`` has them."""
    load_plugins()
    said = io.StringIO()
    with on_machine(), contextlib.redirect_stdout(said):
        status = check_numerics(["--kernel", kernel])
    print(said.getvalue())
    assert status == 0
    assert "skipped" not in said.getvalue()


CHECKS: dict[str, Callable[..., None]] = {
    "instructions": instructions,
    "shapes": shapes,
    "everything_compiles": everything_compiles,
    "numerics": numerics,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    CHECKS[sys.argv[1]](*(int(word) if word.isdigit() else word for word in sys.argv[2:]))
