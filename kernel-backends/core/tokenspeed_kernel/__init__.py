"""The only door to kernels. Imports on a machine with no accelerator.

Look here first: ``ops`` (what can be bound), ``quantized`` (weights), ``registry`` (how a kernel joins),
``selection`` (how one is chosen), ``tuning`` (how it is measured), ``numerics`` (how it is trusted).
"""

from tokenspeed_kernel import (
    compressed_workloads,
    moe_workloads,
    ops,
    recurrent_workloads,
    sparse_workloads,
    standard_workloads,
)
from tokenspeed_kernel.binding import Bound, binding_objective, recording_selections, reference_selections
from tokenspeed_kernel.overrides import kernel_override, set_recipe_overrides
from tokenspeed_kernel.platform import PlatformInfo, current_platform, override_platform
from tokenspeed_kernel.plugins import load_plugins
from tokenspeed_kernel.quantized import QuantizedTensor, WeightError
from tokenspeed_kernel.registry import Band, CapabilityRequirement, KernelSpec, Operation, register_kernel
from tokenspeed_kernel.selection import OverrideError, Selection, SelectionError, select
from tokenspeed_kernel.serving_guard import begin_serving
from tokenspeed_kernel.signature import FormatSignature, ScaleFormat, TensorFormat

__all__ = [
    "Band",
    "Bound",
    "CapabilityRequirement",
    "FormatSignature",
    "KernelSpec",
    "Operation",
    "OverrideError",
    "PlatformInfo",
    "QuantizedTensor",
    "ScaleFormat",
    "Selection",
    "SelectionError",
    "TensorFormat",
    "WeightError",
    "begin_serving",
    "binding_objective",
    "compressed_workloads",
    "current_platform",
    "kernel_override",
    "load_plugins",
    "moe_workloads",
    "ops",
    "override_platform",
    "recording_selections",
    "recurrent_workloads",
    "reference_selections",
    "register_kernel",
    "select",
    "set_recipe_overrides",
    "sparse_workloads",
    "standard_workloads",
]
