"""Elements out of blocks as they lie, one by one: for look-ups, which touch a few rows of a weight.

Layouts in tokenspeed_kernel.gguf_blocks. The arithmetic is that of its ``dequantize_blocks``, bit by bit: no product
here needs more than float32 has, so nothing changes where a product and a sum are fused.
"""

import triton
import triton.language as tl

from tokenspeed_kernel_triton.kernels.float8 import e4m3_of_bits


@triton.jit
def _byte(at, here):
    return tl.load(at, mask=here, other=0).to(tl.int32)


@triton.jit
def _half(at, here):
    """The float16 at any address, as float32."""
    bits = _byte(at, here) | (_byte(at + 1, here) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _float(at, here):
    """The float32 at any address."""
    bits = _byte(at, here) | (_byte(at + 1, here) << 8) | (_byte(at + 2, here) << 16) | (_byte(at + 3, here) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _twice_e2m1(nibble):
    """0, 1, 2, 3, 4, 6, 8, 12 and the same below 0, as float32."""
    exponent, bit = (nibble >> 1) & 3, nibble & 1
    size = tl.where(exponent == 0, bit, (2 | bit) << tl.maximum(exponent - 1, 0))
    return tl.where(nibble >= 8, -size, size).to(tl.float32)


@triton.jit
def _half_of_e8m0(exponent):
    """2^(e - 128), NaN where e is 255."""
    bits = tl.where(exponent < 2, 0x00200000 << tl.minimum(exponent, 1), (exponent - 1) << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _field(at, place, here, RUN: tl.constexpr, BITS: tl.constexpr):
    """The field of element ``place`` where each RUN bytes hold, from the lowest BITS on, RUN elements after RUN."""
    IN_RUN: tl.constexpr = RUN * (8 // BITS)
    byte = _byte(at + place // IN_RUN * RUN + place % RUN, here)
    return (byte >> (place % IN_RUN // RUN * BITS)) & ((1 << BITS) - 1)


@triton.jit
def _of_thirty_two(at, place, here, FORMAT: tl.constexpr):
    """An element of a GGUF block of 32."""
    if FORMAT == "gguf_q8_0":
        quant = tl.load(at + 2 + place, mask=here, other=0).to(tl.int8, bitcast=True)
        value = _half(at, here) * quant.to(tl.float32)
    elif FORMAT == "gguf_mxfp4":
        value = _half_of_e8m0(_byte(at, here)) * _twice_e2m1(_field(at + 1, place, here, 16, 4))
    else:
        ABOVE: tl.constexpr = FORMAT == "gguf_q4_1" or FORMAT == "gguf_q5_1"
        FIVE: tl.constexpr = FORMAT == "gguf_q5_0" or FORMAT == "gguf_q5_1"
        begin = at + (4 if ABOVE else 2)
        quant = _field(begin + (4 if FIVE else 0), place, here, 16, 4)
        if FIVE:
            quant |= ((_byte(begin + place // 8, here) >> (place % 8)) & 1) << 4
        if ABOVE:
            value = _half(at, here) * quant.to(tl.float32) + _half(at + 2, here)
        else:
            value = _half(at, here) * (quant.to(tl.float32) - (16.0 if FIVE else 8.0))
    return value


@triton.jit
def _six_bits(at, group, here):
    """The scale and the minimum of a group in the 12 bytes of Q4_K and Q5_K."""
    place, low = group % 4, group < 4
    first, second, third = _byte(at + place, here), _byte(at + 4 + place, here), _byte(at + 8 + place, here)
    scale = tl.where(low, first & 63, (third & 15) | ((first >> 6) << 4))
    minimum = tl.where(low, second & 63, (third >> 4) | ((second >> 6) << 4))
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def _of_k_block(at, place, here, FORMAT: tl.constexpr):
    """An element of a K block of 256."""
    if FORMAT == "gguf_q2_k":
        packed, quant = _byte(at + place // 16, here), _field(at + 16, place, here, 32, 2)
        scale = _half(at + 80, here) * (packed & 15).to(tl.float32)
        value = quant.to(tl.float32) * scale - _half(at + 82, here) * (packed >> 4).to(tl.float32)
    elif FORMAT == "gguf_q3_k":
        quant = _field(at + 32, place, here, 32, 2) | (_field(at, place, here, 32, 1) << 2)
        group = place // 16
        scale = _field(at + 96, group, here, 8, 4) | (_field(at + 104, group, here, 4, 2) << 4)
        value = (quant - 4).to(tl.float32) * (_half(at + 108, here) * (scale - 32).to(tl.float32))
    elif FORMAT == "gguf_q6_k":
        quant = _field(at, place, here, 64, 4) | (_field(at + 128, place, here, 32, 2) << 4)
        scale = tl.load(at + 192 + place // 16, mask=here, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        value = (quant - 32).to(tl.float32) * (_half(at + 208, here) * scale)
    else:
        FIVE: tl.constexpr = FORMAT == "gguf_q5_k"
        scale, minimum = _six_bits(at + 4, place // 32, here)
        quant = _field(at + (48 if FIVE else 16), place, here, 32, 4)
        if FIVE:
            quant |= _field(at + 16, place, here, 32, 1) << 4
        value = quant.to(tl.float32) * (_half(at, here) * scale) - _half(at + 2, here) * minimum
    return value


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["ids", "weight"])
def lookup(
    ids, weight, out, width, row_stride,
    FORMAT: tl.constexpr, ELEMENTS: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [tokens, width] = the rows ``ids`` of a weight, whose rows are ``row_stride`` bytes, or dense elements,
    apart. ELEMENTS, BYTES: of a block. Grid: (tokens, stretches of BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = place < width
    row = weight + tl.load(ids + token).to(tl.int64) * row_stride
    if FORMAT == "dense":
        value = tl.load(row + place, mask=here, other=0.0).to(tl.float32)
    else:
        at, inner = row + place // ELEMENTS * BYTES, place % ELEMENTS
        if FORMAT == "fp8_blocks":
            value = e4m3_of_bits(_byte(at + 4 + inner, here)) * _float(at, here)
        elif FORMAT == "nvfp4":
            scale = e4m3_of_bits(_byte(at + 4 + inner // 16, here)) * (_float(at, here) * 0.5)
            value = scale * _twice_e2m1(_field(at + 8, inner, here, 16, 4))
        elif ELEMENTS == 32:
            value = _of_thirty_two(at, inner, here, FORMAT)
        else:
            value = _of_k_block(at, inner, here, FORMAT)
    tl.store(out + token * width + place, value, mask=here)
