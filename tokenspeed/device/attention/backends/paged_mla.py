"""Latent attention over a paged cache of latents, absorbed or with keys and values expanded, by whatever kernels the
registry chose."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from tokenspeed.device.attention.backend import ForwardMode, QueryShardPlan, device_of
from tokenspeed.device.attention.paged_rows import PagedRows
from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.kernels import KernelBinder

OPERATIONS = ("attention.mla_decode", "attention.mla_extend")
"""Of which any solution can compute for this backend that has a kernel for each."""


@dataclass(frozen=True)
class Run:
    """Neighbouring extending rows that attend in the same way: tokens ``start`` up to ``stop``, and the rows' page
    tables, first queries and lengths."""

    start: int
    stop: int
    expanded: bool
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Backend(PagedRows):
    """Decode and extend for one full_history group of latents.

    ``caches`` hold each layer's "latent" [blocks, 1, granularity, latent + rotary]. Decoding rows are absorbed; which
    extending rows are is settled for each of them when they are prepared, by AttentionSpec.expands.
    """

    def __init__(
        self,
        kernels: KernelBinder,
        *,
        group: CacheGroupSpec,
        spec: AttentionSpec,
        caches: Sequence[Mapping[str, torch.Tensor]],
        max_rows: int,
        table_slots: int,
    ) -> None:
        super().__init__(group.group_id, device=device_of(caches), max_rows=max_rows, table_slots=table_slots)
        self._caches = tuple(cache["latent"] for cache in caches)
        self._spec = spec
        self._scale = spec.scale
        self._runs: tuple[Run, ...] = ()
        self._absorbed, self._absorbed_with_decode = _slices(()), _slices([(0, None)])
        latents = self._caches[0]
        self._decode, self._extend = (
            kernels.mla_read(
                mode,
                latent_dim=spec.latent_dim,
                rotary_dim=latents.shape[3] - spec.latent_dim,
                page=latents.shape[2],
                kv_dtype=latents.dtype,
            )
            for mode in ("mla_decode", "mla_extend")
        )

    @property
    def absorbed(self) -> Sequence[slice]:
        """See tokenspeed.layers.batch.Attention."""
        return self._absorbed_with_decode if self.decode.count else self._absorbed

    def refresh_extend_metadata(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        *,
        forward_mode: ForwardMode,
        block_tables: Mapping[str, torch.Tensor],
        extend_seq_lens: torch.Tensor,
        extend_seq_lens_cpu: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_prefix_lens_cpu: torch.Tensor,
        extend_with_prefix: bool,
        query_shard: QueryShardPlan | None,
    ) -> None:
        """See the contract."""
        super().refresh_extend_metadata(
            bs,
            req_pool_indices,
            forward_mode=forward_mode,
            block_tables=block_tables,
            extend_seq_lens=extend_seq_lens,
            extend_seq_lens_cpu=extend_seq_lens_cpu,
            extend_prefix_lens=extend_prefix_lens,
            extend_prefix_lens_cpu=extend_prefix_lens_cpu,
            extend_with_prefix=extend_with_prefix,
            query_shard=query_shard,
        )
        self._runs = tuple(self._divide(extend_seq_lens_cpu.tolist(), extend_prefix_lens_cpu.tolist()))
        absorbed = [(run.start, run.stop) for run in self._runs if not run.expanded]
        self._absorbed = _slices(absorbed)
        self._absorbed_with_decode = _slices([*absorbed, (self.extend_tokens, None)])

    def _divide(self, new: list[int], before: list[int]) -> Iterator[Run]:
        """The extending rows, of which there are ``new`` tokens behind ``before``, as runs."""
        expanded = [self._spec.expands(*counts) for counts in zip(new, before, strict=True)]
        first = start = 0
        for kind, group in groupby(expanded):
            end = first + len(list(group))
            stop = start + sum(new[first:end])
            rows = self.extend.pages[first:end], self.query_start[first : end + 1], self.extend.lengths[first:end]
            yield Run(start, stop, kind, rows)
            first, start = end, stop

    def attend_latent(self, place: int, q_latent: torch.Tensor, q_rope: torch.Tensor, out: torch.Tensor) -> None:
        """Extending rows first, then decoding rows; see tokenspeed.layers.batch.Attention."""
        cache = self._caches[place]
        for run in self._runs:
            if not run.expanded:
                self._extend(q_latent, q_rope, cache, *run.rows, self._scale, out)
        rows, tokens = self.decode, self.extend_tokens
        if rows.count:
            self._decode(
                q_latent[tokens:], q_rope[tokens:], cache, rows.pages, rows.lengths, self._scale, out[tokens:], None
            )

    def attend_expanded(self, place: int, kernel: Callable[..., None], q: torch.Tensor, out: torch.Tensor) -> None:
        """See tokenspeed.layers.batch.Attention."""
        for run in self._runs:
            if run.expanded:
                kernel(q, self._caches[place], *run.rows, self._scale, out)


def _slices(parts: Sequence[tuple[int, int | None]]) -> tuple[slice, ...]:
    """Parts from … to in ascending order, of which an open end is the last, as slices; neighbours become one."""
    joined: list[tuple[int, int | None]] = []
    for start, stop in parts:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(slice(*part) for part in joined)
