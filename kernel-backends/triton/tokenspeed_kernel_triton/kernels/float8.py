"""e4m3 from its bits and back, for devices that have no such type: sm_80, sm_86 and, of this kind, gfx942."""

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
    """uint8 of float32 up to 448 in size: to the nearest, and where two are as near to the even one."""
    bits = tl.abs(value * 7.52316384526264e-37).to(tl.int32, bitcast=True)  # 2^-120
    size = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    return (size | tl.where(value < 0.0, 128, 0)).to(tl.uint8)


@triton.jit
def widened(value):
    """float32 of what was loaded; an uint8 is an e4m3."""
    if value.dtype == tl.uint8:
        wide = e4m3_of_bits(value)
    else:
        wide = value.to(tl.float32)
    return wide
