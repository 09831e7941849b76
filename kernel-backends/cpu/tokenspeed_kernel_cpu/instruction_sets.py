"""Which of the compiled instruction sets runs.

The registry's platform decides (``tokenspeed_kernel.platform``, lowered by TOKENSPEED_KERNEL_CPU_ISA); there is no
second switch.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tokenspeed_kernel.platform import host_platform
from tokenspeed_kernel_cpu import _native

_OF_LEVEL = {
    "scalar": "portable",
    "avx2": "avx2",
    "avx512": "avx512",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
}
"""Platform level to the compiled set that serves it."""


def available_instruction_sets() -> tuple[str, ...]:
    """The sets that this build and this machine have, best first."""
    return tuple(name for name in reversed(_OF_LEVEL.values()) if _native.has_instruction_set(name))


def instruction_set() -> str:
    """The set in force."""
    return _native.instruction_set()


def follow_platform() -> None:
    """Puts the set of the current platform in force."""
    _native.choose_instruction_set(_OF_LEVEL[host_platform().isa])


@contextmanager
def use_instruction_set(name: str) -> Iterator[None]:
    """Within the block, the whole process runs the set ``name``; for tests and benchmarks.

    Raises ValueError where this build or this machine lacks it. No kernel may be running on another thread.
    """
    before = _native.instruction_set()
    _native.choose_instruction_set(name)
    try:
        yield
    finally:
        _native.choose_instruction_set(before)
