"""What ``activations: auto`` stands for. No torch here: the plan says it before anything is loaded."""

from typing import Literal

ACTIVATIONS_VARIABLE = "TOKENSPEED_KERNEL_ACTIVATIONS"
"""Environment: goes before the configuration; tokenspeed_kernel.ops.gemm's, which brings torch."""


def auto_activations(stored: str, device: str) -> Literal["float32", "bfloat16"]:
    """What products with weights, or a cache, that are ``stored`` so round their inputs to on ``device``
    (ResolvedConfig.device).

    On the CPU nothing is rounded but what meets bfloat16, the type that such a model computes in where it was trained.
    Matrix units of devices multiply 16 bits many times faster than float32, and models whose weights have fewer bits
    were made for products of 16: only float32 keeps its own there.
    """
    if device == "cpu":
        return "bfloat16" if stored == "bfloat16" else "float32"
    return "float32" if stored == "float32" else "bfloat16"
