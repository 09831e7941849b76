"""Floats of 8 bits: what caches hold, and e4m3 from its bits and back, for devices that have no such type (sm_80, sm_86
and, of this kind, gfx942).
"""

import triton
import triton.language as tl


@triton.jit
def e4m3_of_bits(bits):
    """float32 of bits in an integer; they are no NaN."""
    wide = bits.to(tl.int32)
    size = ((wide & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((wide & 128) != 0, -size, size)


@triton.jit
def bits_of_e4m3(value):
    """uint8 of float32 up to 448 in size, or NaN: to the nearest, and where two are as near to the even one."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # below 2^-6 multiples of 2^-9, which are what float32 has next to 2^14
    subnormal = (tl.abs(value) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    rounded = tl.where(size < 0x3C800000, subnormal, normal)
    rounded = tl.where(value != value, 127, rounded)
    return (rounded | ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def widened(value):
    """float32 of what was loaded; an uint8 is an e4m3 and no NaN."""
    if value.dtype == tl.uint8:
        wide = e4m3_of_bits(value)
    else:
        wide = value.to(tl.float32)
    return wide


@triton.jit
def loaded_as(value, KIND: tl.constexpr):
    """What was loaded from a cache, or of a query, as KIND, float32 or bfloat16; an uint8 is an e4m3, which both hold
    exactly."""
    if value.dtype == tl.uint8:
        wide = tl.where((value & 127) == 127, float("nan"), e4m3_of_bits(value)).to(KIND)
    else:
        wide = value.to(KIND)
    return wide


@triton.jit
def stored_as(value, KIND: tl.constexpr):
    """float32 as a cache of KIND holds it, to the nearest; uint8 takes the bits of an e4m3. What is beyond the largest
    e4m3, 448, becomes that; a NaN stays one."""
    if tl.uint8 == KIND or tl.float8e4nv == KIND:
        value = tl.where(value > 448.0, 448.0, value)
        value = tl.where(value < -448.0, -448.0, value)
    if tl.uint8 == KIND:
        narrow = bits_of_e4m3(value)
    else:
        narrow = value.to(KIND)
    return narrow
