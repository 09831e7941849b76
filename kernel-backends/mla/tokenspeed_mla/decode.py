"""The calls: latent decode of a batch, and the merge of its parts."""

from functools import cache

import torch

from tokenspeed_kernel.accelerators import accelerator
from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_mla.addressing import LATENT, WIDTH
from tokenspeed_mla.compilation import BLACKWELLS, CACHED_BYTES, address_of, compile_decode, compile_merge, stream_of
from tokenspeed_mla.plan import DecodePlan, tile_rows_of

ALIGNMENT = 16
"""Bytes: of every row that TMA reads, and of the outputs."""


def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    max_seq_len: int | None = None,
    splits: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent attention of every request's last tokens (DeepSeek-V2, arXiv:2405.04434, absorbed form).

    q          bfloat16 or float16 [B, q_len, H, 576]: latent part, then rotary part; contiguous. A request's queries
               are at its last q_len positions; each sees the positions up to its own.
    cache      [pages, page, 576] of q's dtype, or float8_e4m3fn under no scale; strided (the last stride is
               1, the others multiples of 16 bytes), page 16, 32, 64 or 128. Page 0 may be read where a table has no
               entry any more.
    page_table int32 [B, max_pages], its row stride its own; entries behind a request's length are not read.
    seq_lens   int32 [B], contiguous.
    scale      of the scores, above 0.
    max_seq_len  a bound on seq_lens, for the choice of splits; None: what the table has room for.
    splits     parts that the keys are cut into; None: chosen (DecodePlan.choose). The result does not depend on it but
               for rounding.
    out        [B, q_len, H, 512], contiguous, of q's dtype or float32; None: made, of q's dtype.
    lse        float32 [B, q_len, H], contiguous; None: made. The natural logarithm of the sum of the exponentials.
    workspace  float32, contiguous, of at least DecodePlan.workspace_bytes; None: made where it is needed.

    Returns out and lse; a query that sees no key has zeros and -inf. Runs on the present stream, may be captured in a
    graph. Raises ValueError for operands other than these, and what compile_decode does.
    """
    _check(q, cache, page_table, seq_lens, scale)
    batch, q_len, heads, _ = q.shape
    out = result_of("mla_decode", "out", out, (batch, q_len, heads, LATENT), (q.dtype, torch.float32), q)
    lse = result_of("mla_decode", "lse", lse, (batch, q_len, heads), (torch.float32,), q)
    # What other lengths may need is compiled by the first call already: nothing may be while serving.
    architecture, tile_rows = architecture_of(q.device), tile_rows_on(q.device, heads, q_len, cache.dtype)
    for dtype in (out.dtype, torch.float32):
        compile_decode(architecture, q.dtype, dtype, cache.shape[1], tile_rows, cache.dtype)
    compile_merge(architecture, out.dtype)
    if splits is None:
        page = cache.shape[1]
        pages = page_table.shape[1] if max_seq_len is None else -(-max_seq_len // page)
        plan = DecodePlan.choose(batch, q_len, heads, pages, processors_of(q.device), tile_rows)
    else:
        plan = DecodePlan(batch, q_len, heads, splits, tile_rows)
    if batch == 0:
        return out, lse
    if plan.splits == 1:
        launch_decode(plan, q, cache, page_table, seq_lens, scale, *by_group(plan, out, lse))
        return out, lse
    partials, partial_lse = split_workspace(plan, _workspace(plan, workspace, q))
    launch_decode(plan, q, cache, page_table, seq_lens, scale, partials, partial_lse)
    launch_merge(partials[:, :, : plan.rows], partial_lse[:, :, : plan.rows], out, lse)
    return out, lse


def merge_partials(
    partials: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None = None
) -> None:
    """One output of those over parts of the keys: attention.merge_partials.

    partials float32 [S, rows, 512] and partial_lse float32 [S, rows], contiguous; out [rows, 512] in bfloat16, float16
    or float32 and lse float32 [rows], contiguous. A part whose lse is -inf is not read.
    """
    splits, rows = partial_lse.shape
    if partials.shape != (splits, rows, LATENT) or out.shape != (rows, LATENT):
        raise ValueError(
            f"merge_partials: partials {tuple(partials.shape)}, their lse {tuple(partial_lse.shape)} and out "
            f"{tuple(out.shape)} do not fit; they are [S, rows, {LATENT}], [S, rows] and [rows, {LATENT}]"
        )
    if rows == 0:
        return
    lse = torch.empty(rows, dtype=torch.float32, device=out.device) if lse is None else lse
    launch_merge(partials.unsqueeze(1), partial_lse.unsqueeze(1), out, lse)


def by_group(plan: DecodePlan, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous outputs of all splits as launch_decode takes them: views, for a group's rows lie as its tokens' heads
    do."""
    shape = (plan.splits, plan.batch * plan.groups, plan.rows)
    return out.view(*shape, LATENT), lse.view(shape)


def split_workspace(plan: DecodePlan, workspace: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same two in a workspace, every group padded to whole tiles: first all partial outputs, then their lse."""
    shape = (plan.splits, plan.batch * plan.groups, plan.padded_rows)
    count = shape[0] * shape[1] * shape[2]
    return workspace[: count * LATENT].view(*shape, LATENT), workspace[count * LATENT :][:count].view(shape)


def launch_decode(
    plan: DecodePlan,
    q: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """One launch of the decode; out [splits, B * groups, rows or more, 512] and lse without the last axis. Outputs of a
    request whose length is negative are left alone."""
    compile_decode(architecture_of(q.device), q.dtype, out.dtype, cache.shape[1], plan.tile_rows, cache.dtype)(
        address_of(q, ALIGNMENT),
        address_of(cache, ALIGNMENT),
        address_of(page_table),
        address_of(seq_lens),
        address_of(out, ALIGNMENT),
        address_of(lse),
        plan.batch,
        plan.groups,
        plan.fold,
        plan.heads,
        plan.splits,
        cache.shape[0],
        cache.stride(0),
        cache.stride(1),
        page_table.stride(0),
        out.stride(1),
        out.stride(0),
        lse.stride(1),
        lse.stride(0),
        scale,
        stream_of(q.device),
    )


def launch_merge(partials: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """One launch of the merge; partials [splits, groups, rows, 512], whose rows are dense, and partial_lse without the
    last axis; out and lse contiguous."""
    splits, groups, rows, _ = partials.shape
    compile_merge(architecture_of(out.device), out.dtype)(
        address_of(partials, ALIGNMENT),
        address_of(partial_lse),
        address_of(out, ALIGNMENT),
        address_of(lse),
        groups,
        rows,
        splits,
        partials.stride(1),
        partials.stride(0),
        partial_lse.stride(1),
        partial_lse.stride(0),
        stream_of(out.device),
    )


def tile_rows_on(device: torch.device, heads: int, q_len: int, cached: torch.dtype) -> int:
    """Rows of a decode's tile on a GPU over a cache of ``cached`` (tile_rows_of). A pair of blocks converts nothing."""
    return tile_rows_of(cached != CACHED_BYTES and architecture_of(device) in BLACKWELLS, heads, q_len)


@cache
def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return _platform_of(device).cores


@cache
def architecture_of(device: torch.device) -> str:
    """What to compile for, such as "sm_80", or "sm_90a" with what only that generation has; raises ValueError for a
    device that is no NVIDIA GPU."""
    architecture = _platform_of(device).architecture if device.type == "cuda" else None
    if architecture is None or torch.version.hip is not None:
        raise ValueError(f"mla: the tensors are on {device}; these kernels run on NVIDIA GPUs")
    major, minor = architecture
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def _platform_of(device: torch.device) -> PlatformInfo:
    index = torch.cuda.current_device() if device.index is None else device.index
    return accelerator(device.type, index)


def _check(
    q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, scale: float
) -> None:
    """ValueError for operands that mla_decode does not take; the variant is checked when it is compiled."""
    batch = q.shape[0]
    faults = {
        f"q {tuple(q.shape)} is not [B, q_len, H, {WIDTH}]": q.dim() != 4 or q.shape[-1] != WIDTH or 0 in q.shape[1:],
        "q is not contiguous": not q.is_contiguous(),
        f"cache {tuple(cache.shape)} is not [pages, page, {WIDTH}]": cache.dim() != 3 or cache.shape[-1] != WIDTH,
        f"cache is {cache.dtype} and q {q.dtype}; give both one type, or a cache of {CACHED_BYTES}": cache.dtype
        not in (q.dtype, CACHED_BYTES),
        f"page_table {page_table.dtype} {tuple(page_table.shape)} is not int32 [{batch}, pages]": page_table.dim() != 2
        or page_table.shape[0] != batch
        or page_table.dtype != torch.int32,
        f"seq_lens {seq_lens.dtype} {tuple(seq_lens.shape)} is not int32 [{batch}]": seq_lens.shape != (batch,)
        or seq_lens.dtype != torch.int32,
        f"scale is {scale}; it must be above 0": not scale > 0.0,
    }
    _refuse(faults)
    strides = (cache.data_ptr(), cache.stride(0) * cache.element_size(), cache.stride(1) * cache.element_size())
    _refuse(
        {
            f"cache begins and steps at bytes {strides}; TMA takes multiples of {ALIGNMENT}": cache.stride(2) != 1
            or any(number % ALIGNMENT for number in strides),
            f"q begins at byte {q.data_ptr()}; TMA takes multiples of {ALIGNMENT}": q.data_ptr() % ALIGNMENT != 0,
            "page_table and seq_lens have gaps in their last axis": 1 not in (page_table.stride(1), page_table.shape[1])
            or not seq_lens.is_contiguous(),
        }
    )


def _refuse(faults: dict[str, bool]) -> None:
    found = [fault for fault, is_so in faults.items() if is_so]
    if found:
        raise ValueError(f"mla_decode: {'; '.join(found)}")


def result_of(
    call: str,
    name: str,
    given: torch.Tensor | None,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    q: torch.Tensor,
) -> torch.Tensor:
    """A tensor to write to: the caller's, once it was looked at, or a new one of the first dtype. Raises ValueError, in
    the name of the ``call``, where it does not fit."""
    if given is None:
        return torch.empty(shape, dtype=dtypes[0], device=q.device)
    fits = given.shape == shape and given.dtype in dtypes and given.is_contiguous() and given.device == q.device
    if not fits:
        raise ValueError(
            f"{call}: {name} is {given.dtype} {tuple(given.shape)} on {given.device}; give a contiguous tensor "
            f"{shape} of {' or '.join(map(str, dtypes))} on {q.device}, or None"
        )
    return given


def _workspace(plan: DecodePlan, given: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor:
    """Room for the partials in float32; ValueError where the caller's is too small."""
    elements = plan.workspace_bytes // 4
    if given is None:
        return torch.empty(elements, dtype=torch.float32, device=q.device)
    if given.dtype != torch.float32 or given.dim() != 1 or not given.is_contiguous() or given.numel() < elements:
        raise ValueError(
            f"mla_decode: the workspace is {given.dtype} {tuple(given.shape)}; {plan} needs {elements} float32 in one "
            "contiguous axis (DecodePlan.workspace_bytes)"
        )
    return given
