"""AMD GPUs: AITER's kernels as operations of ours, beside the shared Triton layer.

Importing this and registering its kernels imports neither AITER nor Triton.
"""

from tokenspeed_kernel_amd.registration import register

__all__ = ["register"]
