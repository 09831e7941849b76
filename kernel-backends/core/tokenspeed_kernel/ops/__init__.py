"""The operations: one file a family, each with its contract, its PyTorch reference and its ``bind_…`` function.

Bind once, at build; keep ``Bound.fn`` and call it. Nothing is selected on a hot path. Outputs are the caller's,
preallocated.
"""

from tokenspeed_kernel.ops.activation import bind_silu_and_mul
from tokenspeed_kernel.ops.attention import bind_attention_decode, bind_attention_extend, bind_gqa_prologue
from tokenspeed_kernel.ops.embedding import bind_embedding
from tokenspeed_kernel.ops.gemm import bind_linear
from tokenspeed_kernel.ops.norm import bind_fused_add_rms_norm, bind_rms_norm
from tokenspeed_kernel.ops.sampling import bind_apply_penalties, bind_has_nan, bind_logprobs, bind_sample

__all__ = [
    "bind_apply_penalties",
    "bind_attention_decode",
    "bind_attention_extend",
    "bind_embedding",
    "bind_fused_add_rms_norm",
    "bind_gqa_prologue",
    "bind_has_nan",
    "bind_linear",
    "bind_logprobs",
    "bind_rms_norm",
    "bind_sample",
    "bind_silu_and_mul",
]
