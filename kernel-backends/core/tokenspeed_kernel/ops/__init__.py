"""The operations: one file a family, each with its contract, its PyTorch reference and its ``bind_…`` function.

Bind once, at build; keep ``Bound.fn`` and call it. Nothing is selected on a hot path. Outputs are the caller's,
preallocated.
"""

from tokenspeed_kernel.ops import sampling_torch
from tokenspeed_kernel.ops.activation import bind_clamped_silu, bind_clamped_swiglu, bind_silu_and_mul
from tokenspeed_kernel.ops.attention import bind_attention_decode, bind_attention_extend, bind_gqa_prologue
from tokenspeed_kernel.ops.causal_conv import bind_causal_conv
from tokenspeed_kernel.ops.compressed import bind_apply_sinks, bind_compress, bind_write
from tokenspeed_kernel.ops.embedding import bind_embedding
from tokenspeed_kernel.ops.gated_delta import bind_gated_delta
from tokenspeed_kernel.ops.gated_norm import bind_gated_rms_norm
from tokenspeed_kernel.ops.gating import bind_add, bind_sigmoid_gate
from tokenspeed_kernel.ops.gelu import bind_gelu_tanh_and_mul
from tokenspeed_kernel.ops.gemm import bind_head_linear, bind_linear
from tokenspeed_kernel.ops.hyper import bind_hyper
from tokenspeed_kernel.ops.merge import bind_merge_partials
from tokenspeed_kernel.ops.mla import bind_mla_prologue, bind_mla_read
from tokenspeed_kernel.ops.mla_expanded import bind_mla_extend_expanded
from tokenspeed_kernel.ops.moe import bind_experts, bind_route
from tokenspeed_kernel.ops.norm import bind_fused_add_rms_norm, bind_rms_norm
from tokenspeed_kernel.ops.quantize import bind_quantize_rows, bind_restore
from tokenspeed_kernel.ops.ragged import bind_attention_ragged
from tokenspeed_kernel.ops.rotary import bind_rotary
from tokenspeed_kernel.ops.sampling import (
    bind_apply_penalties,
    bind_apply_token_mask,
    bind_has_nan,
    bind_logprobs,
    bind_sample,
)
from tokenspeed_kernel.ops.scaling import bind_scale_rows
from tokenspeed_kernel.ops.sparse import bind_index_prologue, bind_index_select, bind_mla_selected
from tokenspeed_kernel.ops.table_route import bind_table_route
from tokenspeed_kernel.ops.verify import bind_verify, bind_verify_proposals

__all__ = [
    "bind_add",
    "bind_apply_penalties",
    "bind_apply_sinks",
    "bind_apply_token_mask",
    "bind_attention_decode",
    "bind_attention_extend",
    "bind_attention_ragged",
    "bind_causal_conv",
    "bind_clamped_silu",
    "bind_clamped_swiglu",
    "bind_compress",
    "bind_embedding",
    "bind_experts",
    "bind_fused_add_rms_norm",
    "bind_gated_delta",
    "bind_gated_rms_norm",
    "bind_gelu_tanh_and_mul",
    "bind_gqa_prologue",
    "bind_has_nan",
    "bind_head_linear",
    "bind_hyper",
    "bind_index_prologue",
    "bind_index_select",
    "bind_linear",
    "bind_logprobs",
    "bind_merge_partials",
    "bind_mla_extend_expanded",
    "bind_mla_prologue",
    "bind_mla_read",
    "bind_mla_selected",
    "bind_quantize_rows",
    "bind_restore",
    "bind_rms_norm",
    "bind_rotary",
    "bind_route",
    "bind_sample",
    "bind_scale_rows",
    "bind_sigmoid_gate",
    "bind_silu_and_mul",
    "bind_table_route",
    "bind_verify",
    "bind_verify_proposals",
    "bind_write",
    "sampling_torch",
]
