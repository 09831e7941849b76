"""Whether AMX's tiles may be used: only where TOKENSPEED_CPU_AMX=1 asks for them, for they have not run on hardware."""

import os

from tokenspeed_kernel_cpu import _native

VARIABLE = "TOKENSPEED_CPU_AMX"


def asked_for() -> bool:
    """Whether the environment asks for AMX, which is then enabled for this process.

    Raises RuntimeError where it asks and cannot have it, ValueError where the variable is neither 0 nor 1.
    """
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE} is {value!r}; use 1 to try AMX's tiles, or 0")
    if value == "0":
        return False
    try:
        _native.enable_amx()
    except RuntimeError as error:
        raise RuntimeError(f"{VARIABLE}=1 asks for AMX, but {error}; unset it") from error
    return True
