"""An estimate of how long a call must take at least, where nothing was measured.

The figures are those of a usual machine of its kind and good for an order of magnitude: an estimate ranks below every
measurement, and between candidates of one request it only scales what their bands say.
"""

from tokenspeed_kernel.platform import PlatformInfo
from tokenspeed_kernel.workloads import Work

CORE_BYTES_PER_SECOND = 12e9
"""Memory read by one core of a server processor while the others read too."""

CORE_OPERATIONS_PER_SECOND = {"scalar": 5e9, "avx2": 60e9, "avx512": 100e9, "avx512_vnni": 100e9, "avx512_bf16": 100e9}
"""Float32 multiplications and additions of one core: lanes, two units, two operations, 2 to 3 GHz."""


def roofline_seconds(platform: PlatformInfo, work: Work) -> float | None:
    """The larger of the time for the bytes and the time for the arithmetic; None where the platform has no figures."""
    per_core = CORE_OPERATIONS_PER_SECOND.get(platform.isa)
    if per_core is None:
        return None
    return max(work.bytes / (CORE_BYTES_PER_SECOND * platform.cores), work.operations / (per_core * platform.cores))
