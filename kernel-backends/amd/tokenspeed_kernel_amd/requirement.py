"""Where AITER's kernels run, and why they do not elsewhere."""

from tokenspeed_kernel.wrapped_library import LibraryRequirement

DRIVERS = ((7, (30, 10)),)
"""ROCm 7 wants the driver that came with it; docs/images.md names the same one."""

ON_AITER = LibraryRequirement(
    vendors=frozenset({"amd"}),
    architectures=frozenset({"gfx942", "gfx950"}),
    distribution="amd-aiter",
    oldest=(0, 1, 7),
    too_new=(0, 1, 8),
    drivers=DRIVERS,
    modules=(("triton", "needs the package triton, which comes with PyTorch's builds for ROCm"),),
)
"""An AITER whose signatures tests/kernel_amd holds our calls to."""
