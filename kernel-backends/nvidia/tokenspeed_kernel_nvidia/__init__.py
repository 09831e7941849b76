"""NVIDIA GPUs: FlashInfer's kernels as operations of ours, beside the shared Triton layer and the MLA kernels.

Importing this and registering its kernels imports neither FlashInfer nor Triton.
"""

from tokenspeed_kernel_nvidia.registration import register

__all__ = ["register"]
