"""The trait ``activations`` of the operations that read a cache: what queries and weights are rounded to.

"float32", nothing, is the default. Under "bfloat16" queries, and the weights of the softmax, are rounded to bfloat16
before their products with keys and values; scores, softmax and sums stay float32. A kernel that rounds takes "bfloat16"
only, so none is chosen unless somebody asked for it. What a cache of 8 bits holds, bfloat16 holds exactly.
"""

import os

import torch

from tokenspeed_kernel.binding import Bound, bind
from tokenspeed_kernel.ops.gemm import ACTIVATIONS_VARIABLE
from tokenspeed_kernel.ops.kv_cache import attention_signature
from tokenspeed_kernel.selection import SelectionError
from tokenspeed_kernel.traits import OneOf, TraitDeclaration, TraitValue

ROUNDED = "bfloat16"

ACTIVATIONS_TRAIT = TraitDeclaration(
    (OneOf,), str, "what queries and weights are rounded to before their products", "float32", default="float32"
)


def allowed_rounding(activations: str | None) -> str:
    """What a reader may round to: ``activations`` or, where it is None, what TOKENSPEED_KERNEL_ACTIVATIONS says, else
    "float32"; ValueError for activations that attention does not know."""
    if activations not in (None, "float32", ROUNDED):
        raise ValueError(f"activations is {activations!r}; attention knows float32 and {ROUNDED}")
    return activations or os.environ.get(ACTIVATIONS_VARIABLE) or "float32"


def bind_reader(
    mode: str,
    kv_dtype: torch.dtype,
    traits: dict[str, TraitValue],
    activations: str | None,
    override: str | None,
) -> Bound:
    """Chooses the kernel of attention.``mode``.

    activations: what may be rounded, "float32" or "bfloat16"; None: "bfloat16" where TOKENSPEED_KERNEL_ACTIVATIONS says
    so, else "float32". Where no kernel rounds over such a cache here, or the override names one that does not, nothing
    is rounded. Raises SelectionError where nothing fits, ValueError for other activations.
    """
    allowed = allowed_rounding(activations)
    signature = attention_signature(kv_dtype)
    if allowed == ROUNDED:
        try:
            return bind("attention", mode, signature, {**traits, "activations": ROUNDED}, override=override)
        except SelectionError:
            pass  # nothing rounds here
    return bind("attention", mode, signature, traits, override=override)
