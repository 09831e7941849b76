"""What a KV cache may hold, and how values become what it holds.

The KV dtype is float32, bfloat16, float16 or float8_e4m3fn: the elements themselves, under no scale. A writer rounds to
the nearest of them, ties to even. With 8 bits what lies beyond ±448, infinities included, becomes ±448, and a NaN stays
one, so that it is still found in the logits. A reader takes an element for the number that it is, exactly; queries,
outputs and sums are float32 whatever the KV dtype.
"""

import torch

from tokenspeed_kernel.signature import BFLOAT16, FLOAT8_E4M3, FLOAT16, FLOAT32, FormatSignature, TensorFormat, dense

KV_FORMATS: tuple[TensorFormat, ...] = (FLOAT32, BFLOAT16, FLOAT16, FLOAT8_E4M3)
"""What a cache may hold."""


def kv_format(kv_dtype: torch.dtype) -> TensorFormat:
    """The format of a cache of this dtype; FormatError for a dtype that no tensor can have."""
    return dense(str(kv_dtype).removeprefix("torch."))


def attention_signature(kv_dtype: torch.dtype) -> FormatSignature:
    """The signature with float32 activations and a cache of this dtype; FormatError as kv_format."""
    return FormatSignature.of(input=FLOAT32, kv=kv_format(kv_dtype))


ATTENTION_SIGNATURES = frozenset(FormatSignature.of(input=FLOAT32, kv=kv) for kv in KV_FORMATS)
"""The signatures with any cache."""


def to_cached(x: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """float32 ``x`` of any shape as what a cache of this dtype holds of it."""
    if kv_dtype is torch.float8_e4m3fn:
        largest = torch.finfo(kv_dtype).max
        x = x.clamp(-largest, largest)
    return x.to(kv_dtype)


def row_dtype(kv_dtype: torch.dtype) -> torch.dtype:
    """Of the rows that attention.compress makes entries of, where the entries are ``kv_dtype``: the same, but bfloat16
    where that has 8 bits. They are no keys that are read once, but terms of a sum, and weights under a softmax."""
    return torch.bfloat16 if kv_dtype.itemsize == 1 else kv_dtype
