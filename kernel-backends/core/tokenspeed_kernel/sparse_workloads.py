"""Workloads of sparse attention: one query over a long row in decode, a chunk behind a prefix in prefill."""

import torch

from tokenspeed_kernel.signature import FormatSignature
from tokenspeed_kernel.workloads import Traits, Work, Workload, bits_of, register_workload

QUERIES = {"decode": 1, "prefill": 64}
"""Phase to the queries of one call: each has a list of its own, so few of them say how fast many are."""

ENTRIES = 4096
"""Of the one row."""

CHOSEN = 512
HEADS = 16
"""Query heads, which no trait says."""

_FLOAT_BYTES = 4


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _cache(signature: FormatSignature, width: int, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of ENTRIES entries and the page table of their row, in an order of its own."""
    pages = -(-ENTRIES // page)
    dtype: torch.dtype = getattr(torch, signature["kv"].storage_dtype)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)) + 1
    return _random(pages + 1, 1, page, width).to(dtype), table.to(torch.int32).unsqueeze(0)


def _starts(queries: int) -> torch.Tensor:
    return torch.tensor([0, queries], dtype=torch.int32)


def _select_work(signature: FormatSignature, traits: Traits, phase: str) -> Work:
    heads, width, queries = int(traits["index_heads"]), int(traits["index_dim"]), QUERIES[phase]
    cache = int(ENTRIES * width * bits_of(signature["kv"]) / 8)
    moved = cache + queries * _FLOAT_BYTES * (heads * (width + 1) + CHOSEN)
    return Work(moved, 2 * queries * ENTRIES * heads * (width + 1))


def _select_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    heads, width, queries = int(traits["index_heads"]), int(traits["index_dim"]), QUERIES[phase]
    cache, table = _cache(signature, width, int(traits["kernel_page_size"]))
    q, weights = _random(queries, heads, width), _random(queries, heads)
    length, selected = torch.tensor([ENTRIES], dtype=torch.int32), torch.empty(queries, CHOSEN, dtype=torch.int32)
    arguments = (q, weights, cache, table, _starts(queries), length, 1, selected)
    description = f"{queries} queries of {heads} x {width}, {CHOSEN} of {ENTRIES} entries"
    return Workload(description, arguments, work=_select_work(signature, traits, phase), cold=True)


def _selected_work(signature: FormatSignature, traits: Traits, phase: str) -> Work:
    latent, width, queries = int(traits["latent_dim"]), _width(traits), QUERIES[phase]
    read = int(min(ENTRIES, queries * CHOSEN) * width * bits_of(signature["kv"]) / 8)
    operations = 2 * queries * HEADS * CHOSEN * (width + latent)
    return Work(read + queries * _FLOAT_BYTES * (HEADS * (width + latent) + CHOSEN), operations)


def _width(traits: Traits) -> int:
    return int(traits["latent_dim"]) + int(traits["rotary_dim"])


def _selected_workload(signature: FormatSignature, traits: Traits, phase: str, _bound: object) -> Workload:
    latent, width, queries = int(traits["latent_dim"]), _width(traits), QUERIES[phase]
    cache, table = _cache(signature, width, int(traits["kernel_page_size"]))
    q = _random(queries, HEADS, width)
    order = torch.rand(queries, ENTRIES, generator=torch.Generator().manual_seed(0)).argsort(dim=1)
    selected = order[:, :CHOSEN].sort(dim=1).values.to(torch.int32)
    out = torch.empty(queries, HEADS, latent)
    read = (q[..., :latent], q[..., latent:], cache, table, _starts(queries), selected)
    description = f"{queries} queries, {HEADS} heads of {latent} + {width - latent}, {CHOSEN} of {ENTRIES} entries"
    work = _selected_work(signature, traits, phase)
    return Workload(description, (*read, width**-0.5, out, None), work=work, cold=True)


register_workload("attention.index_select", _select_workload, _select_work)
register_workload("attention.mla_selected", _selected_workload, _selected_work)
