"""Binds the operations of attention, and of what writes its caches."""

import torch

from tokenspeed.layers.kernel_choice import Kernel, KernelChoice
from tokenspeed_kernel import ops
from tokenspeed_kernel.binding import Bound, binding_captured, present_objective
from tokenspeed_kernel.page_sizes import kernel_page_size
from tokenspeed_kernel.quantized import QuantizedTensor


class AttentionKernels(KernelChoice):
    """One engine's choice of kernels for attention."""

    def gqa_prologue(
        self, *, head_dim: int, q_per_kv: int, qk_norm: bool, partial_rotary: bool, kv_dtype: torch.dtype
    ) -> Kernel:
        """``fn(q, k, v, positions, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, slots)``."""
        return self._keep(
            ops.bind_gqa_prologue(
                head_dim=head_dim,
                q_per_kv=q_per_kv,
                qk_norm=qk_norm,
                partial_rotary=partial_rotary,
                kv_dtype=kv_dtype,
                override=self._overrides.get("attention.gqa_prologue"),
            )
        )

    def mla_prologue(self, *, latent_dim: int, rotary_dim: int, plain_dim: int, kv_dtype: torch.dtype) -> Kernel:
        """``fn(q, compressed, positions, cos_sin, latent_norm, eps, latent_cache, slots)``."""
        return self._keep(
            ops.bind_mla_prologue(
                latent_dim=latent_dim,
                rotary_dim=rotary_dim,
                plain_dim=plain_dim,
                kv_dtype=kv_dtype,
                override=self._overrides.get("attention.mla_prologue"),
            )
        )

    def mla_read(self, mode: str, *, latent_dim: int, rotary_dim: int, page: int, kv_dtype: torch.dtype) -> Kernel:
        """The kernel of ``mode`` ("mla_decode" or "mla_extend") for blocks of ``page`` tokens; raises as attention_read
        does."""
        with binding_captured(self._captured and mode == "mla_decode"):
            bound = ops.bind_mla_read(
                mode,
                latent_dim=latent_dim,
                rotary_dim=rotary_dim,
                kernel_page_size=page,
                kv_dtype=kv_dtype,
                activations=self._attention_rounding(kv_dtype),
                override=self._overrides.get(f"attention.{mode}"),
            )
        return self._keep(_reads(bound, page))

    def mla_extend_expanded(
        self,
        weight: QuantizedTensor,
        heads: int,
        *,
        rotary_dim: int,
        plain_dim: int,
        page: int,
        kv_dtype: torch.dtype,
    ) -> Kernel | None:
        """``fn(q, latent_cache, page_table, query_start, seq_lens, scale, out)`` of an up-projection [heads * (plain +
        value), latent], for blocks of ``page`` tokens; raises as attention_read does.

        None where the reference alone can run and nobody asked for it; and under the objective determinism, where the
        bits of a token must not hang on its chunk, as they do where long chunks are expanded and short ones not.
        """
        if present_objective() == "determinism":
            return None
        bound = ops.bind_mla_extend_expanded(
            weight,
            heads,
            rotary_dim=rotary_dim,
            plain_dim=plain_dim,
            kernel_page_size=page,
            kv_dtype=kv_dtype,
            activations=self._attention_rounding(kv_dtype),
            override=self._overrides.get("attention.mla_extend_expanded"),
            reference=False,
        )
        return None if bound is None else self._keep(_reads(bound, page))

    def write_entries(self, *, entry_dim: int, kv_dtype: torch.dtype) -> Kernel:
        """``fn(x, cache, slots)``."""
        override = self._overrides.get("attention.write")
        return self._keep(ops.bind_write(entry_dim=entry_dim, kv_dtype=kv_dtype, override=override))

    def compress(self, *, entry_dim: int, overlapping: bool, page: int, kv_dtype: torch.dtype) -> Kernel:
        """``fn(values_cache, gates_cache, page_table, query_start, seq_lens, bias, norm, eps, cos_sin, entry_cache,
        entry_slots, overlapping)`` for blocks of ``page`` tokens; raises as attention_read does."""
        bound = ops.bind_compress(
            entry_dim=entry_dim,
            overlapping=overlapping,
            kernel_page_size=page,
            kv_dtype=kv_dtype,
            override=self._overrides.get("attention.compress"),
        )
        return self._keep(_reads(bound, page))

    def merge_partials(self, *, head_dim: int) -> Kernel:
        """``fn(partials, partial_lse, out, lse)``."""
        override = self._overrides.get("attention.merge_partials")
        return self._keep(ops.bind_merge_partials(head_dim=head_dim, override=override))

    def apply_sinks(self, *, head_dim: int) -> Kernel:
        """``fn(x in/out, lse, sinks)``."""
        override = self._overrides.get("attention.apply_sinks")
        return self._keep(ops.bind_apply_sinks(head_dim=head_dim, override=override))

    def index_prologue(self, *, index_dim: int, rotary_dim: int, kv_dtype: torch.dtype) -> Kernel:
        """``fn(q, key, positions, cos_sin, norm_weight, norm_bias, eps, index_cache, slots)``."""
        override = self._overrides.get("attention.index_prologue")
        return self._keep(
            ops.bind_index_prologue(index_dim=index_dim, rotary_dim=rotary_dim, kv_dtype=kv_dtype, override=override)
        )

    def index_select(self, *, index_dim: int, index_heads: int, page: int, kv_dtype: torch.dtype) -> Kernel:
        """``fn(q, weights, index_cache, page_table, query_start, seq_lens, stride, selected)`` for blocks of ``page``
        entries; raises as attention_read does."""
        bound = ops.bind_index_select(
            index_dim=index_dim,
            index_heads=index_heads,
            kernel_page_size=page,
            kv_dtype=kv_dtype,
            override=self._overrides.get("attention.index_select"),
        )
        return self._keep(_reads(bound, page))

    def mla_selected(self, *, latent_dim: int, rotary_dim: int, page: int, kv_dtype: torch.dtype) -> Kernel:
        """``fn(q_latent, q_rope, latent_cache, page_table, query_start, selected, scale, out, lse)`` for blocks of
        ``page`` entries; raises as attention_read does."""
        bound = ops.bind_mla_selected(
            latent_dim=latent_dim,
            rotary_dim=rotary_dim,
            kernel_page_size=page,
            kv_dtype=kv_dtype,
            activations=self._attention_rounding(kv_dtype),
            override=self._overrides.get("attention.mla_selected"),
        )
        return self._keep(_reads(bound, page))

    def attention_read(
        self,
        mode: str,
        *,
        head_dim: int,
        q_per_kv: int,
        page: int,
        windowed: bool,
        sinks: bool,
        soft_cap: bool,
        kv_dtype: torch.dtype,
    ) -> Kernel:
        """The kernel of attention ``mode`` ("decode" or "extend") for blocks of ``page`` tokens.

        ``windowed``: whether calls give a window above 0; ``sinks`` and ``soft_cap``: whether they give these. Raises
        ValueError where the kernel's own page size does not divide a block.
        """
        bind = ops.bind_attention_decode if mode == "decode" else ops.bind_attention_extend
        with binding_captured(self._captured and mode == "decode"):
            bound = bind(
                head_dim=head_dim,
                q_per_kv=q_per_kv,
                kernel_page_size=page,
                windowed=windowed,
                sinks=sinks,
                soft_cap=soft_cap,
                kv_dtype=kv_dtype,
                activations=self._attention_rounding(kv_dtype),
                override=self._overrides.get(f"attention.{mode}"),
            )
        return self._keep(_reads(bound, page))

    def _attention_rounding(self, kv_dtype: torch.dtype) -> str | None:
        """As _rounding, of what attention knows. Over 8 bits it may round as over bfloat16: queries and weights keep
        more than the cache has."""
        rounding = self._rounding("bfloat16" if kv_dtype.itemsize == 1 else str(kv_dtype).removeprefix("torch."))
        return "float32" if rounding in ("int8", "int16") else rounding


def _reads(bound: Bound, page: int) -> Bound:
    """The kernel, if it reads blocks of ``page`` tokens; ValueError where its own page size does not divide them."""
    sizes = kernel_page_size(bound.spec.name)
    if all(page % size for size in sizes):
        raise ValueError(
            f"blocks of {page} tokens: {bound.spec.name} reads pages of {', '.join(map(str, sizes))} tokens; "
            "set kv.granularity to a multiple"
        )
    return bound
