"""Trust: cases for every operation, the comparison with float64, and records of what was verified."""

from tokenspeed_kernel.numerics import (
    attention_cases,
    elementwise_cases,
    gated_norm_cases,
    gating_cases,
    matrix_cases,
    mla_cases,
    moe_cases,
    prologue_cases,
    quantize_cases,
    ragged_cases,
    recurrent_cases,
    rotary_cases,
    sampling_cases,
    scaling_cases,
    sparse_cases,
)
from tokenspeed_kernel.numerics.cases import AnyOf, Buffers, Case, Close, Exact, register_cases
from tokenspeed_kernel.numerics.verify import Report, verify_all, verify_kernel

__all__ = [
    "AnyOf",
    "Buffers",
    "Case",
    "Close",
    "Exact",
    "Report",
    "attention_cases",
    "elementwise_cases",
    "gated_norm_cases",
    "gating_cases",
    "matrix_cases",
    "mla_cases",
    "moe_cases",
    "prologue_cases",
    "quantize_cases",
    "ragged_cases",
    "recurrent_cases",
    "register_cases",
    "rotary_cases",
    "sampling_cases",
    "scaling_cases",
    "sparse_cases",
    "verify_all",
    "verify_kernel",
]
