"""Stands in for torch_npu in a process of its own: the operators of the recorded contract, on CPU tensors.

Each has the recorded schema, so the dispatcher binds every call against it, checks what the documentation of torch-npu
2.10 asks of its inputs for the Atlas A2 and A3, and computes what it says, in another way than our references. Where
nothing is said, rows that are not computed hold NaN.
"""

from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_kernel_npu.operators import recorded
from torch_npu import attention, mixture, rows

_LIBRARY = torch.library.Library("npu", "DEF")

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    **rows.IMPLEMENTATIONS,
    **attention.IMPLEMENTATIONS,
    **mixture.IMPLEMENTATIONS,
}

_ATEN = torch.library.Library("aten", "IMPL")
for key in ("CPU", "PrivateUse1"):
    _ATEN.impl("mm.dtype", rows.mm_dtype, key)

for name, schema in recorded()["schemas"].items():
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, IMPLEMENTATIONS[name], "CPU")
