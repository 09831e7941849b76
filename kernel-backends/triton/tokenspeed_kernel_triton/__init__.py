"""Portable GPU kernels in Triton, which the packages of both GPU vendors depend on.

Importing this and registering its kernels imports no Triton. ``kernels/`` holds what runs on the device, the files
beside it the host's part of each operation, ``configs.py`` everything that differs between architectures.
"""

from tokenspeed_kernel_triton.registration import register

__all__ = ["register"]
