"""What tokens leave for the entries that stand for several of them: no attention, but where these rows lie."""

from collections.abc import Mapping, Sequence

import torch

from tokenspeed.device.attention.backend import device_of
from tokenspeed.device.attention.paged_rows import PagedRows
from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.batch import Compressor
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.kernels import KernelBinder

OPERATIONS = ("attention.compress",)
"""Of which any solution can compute for this backend that has a kernel for each."""


class Backend(PagedRows):
    """One sliding_window group whose layers write their rows themselves and name the caches in each call."""

    def __init__(
        self,
        kernels: KernelBinder,  # noqa: ARG002 - the contract has it; layers bind the kernel, which differs among them
        *,
        group: CacheGroupSpec,
        spec: AttentionSpec,  # noqa: ARG002 - the contract has it
        caches: Sequence[Mapping[str, torch.Tensor]],
        max_rows: int,
        table_slots: int,
    ) -> None:
        super().__init__(group.group_id, device=device_of(caches), max_rows=max_rows, table_slots=table_slots)

    def compress(
        self,
        values: torch.Tensor,
        gates: torch.Tensor,
        compressor: Compressor,
        entry_cache: torch.Tensor,
        entry_slots: torch.Tensor,
    ) -> None:
        """See tokenspeed.layers.batch.Attention."""
        for part, rows, starts in self._kinds():
            compressor.kernel(
                values, gates, rows.pages, starts, rows.lengths, compressor.bias, compressor.norm, compressor.eps,
                compressor.cos_sin, entry_cache, entry_slots[part], compressor.overlapping,
            )  # fmt: skip
