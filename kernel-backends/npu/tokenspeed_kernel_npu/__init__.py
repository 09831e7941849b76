"""Kernels for Ascend NPUs, made of torch_npu's fused operators; they join through the plugin door.

Importing this, and registering, imports no torch_npu. ``operators.py`` is the one place that calls it.
"""

from tokenspeed_kernel_npu.registration import register

__all__ = ["register"]
