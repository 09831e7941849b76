"""Grouped-query attention over paged keys and values, by whatever kernels the registry chose."""

from collections.abc import Mapping, Sequence

import torch

from tokenspeed.device.attention.backend import device_of
from tokenspeed.device.attention.paged_rows import PagedRows
from tokenspeed.layers.attention_spec import AttentionSpec
from tokenspeed.layers.cache_spec import CacheGroupSpec
from tokenspeed.layers.kernels import KernelBinder

OPERATIONS = ("attention.decode", "attention.extend")
"""Of which any solution can compute for this backend that has a kernel for each."""


class Backend(PagedRows):
    """Decode and extend for one full_history or sliding_window group.

    ``caches`` hold each layer's "k" and "v" [blocks, kv heads, granularity, head_dim]. With a window the kernels read
    no block that lies before it, so its entry in the block table may be null.
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
        self._caches = tuple((cache["k"], cache["v"]) for cache in caches)
        keys = self._caches[0][0]
        self._scale = spec.scale
        self._window = group.sliding_window_tokens or 0
        capped, sinking = spec.soft_cap > 0, bool(spec.sinks)
        sinks = spec.sinks or (None,) * len(caches)
        self._extras: tuple[tuple[object, ...], ...] = tuple(
            (sink, spec.soft_cap) if capped or sinking else () for sink in sinks
        )
        self._decode, self._extend = (
            kernels.attention_read(
                mode,
                head_dim=keys.shape[3],
                q_per_kv=spec.num_heads // keys.shape[1],
                page=keys.shape[2],
                windowed=self._window > 0,
                sinks=sinking,
                soft_cap=capped,
                kv_dtype=keys.dtype,
            )
            for mode in ("decode", "extend")
        )

    def attend(self, place: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Extending rows first, then decoding rows; q float32 [T, heads, head_dim], rows may be apart."""
        k_cache, v_cache = self._caches[place]
        extras, rows, tokens = self._extras[place], self.extend, self.extend_tokens
        if tokens:
            self._extend(
                q[:tokens], k_cache, v_cache, rows.pages, self.query_start, rows.lengths, self._scale, self._window,
                out[:tokens], *extras,
            )  # fmt: skip
            q, out = q[tokens:], out[tokens:]
        rows = self.decode
        if rows.count:
            self._decode(q, k_cache, v_cache, rows.pages, rows.lengths, self._scale, self._window, out, *extras)
