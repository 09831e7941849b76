// GGUF's Q5_0 and Q5_1: 32 weights of five bits, quant * scale + offset, rounded once as when the blocks are dequantised.
// Layouts: tokenspeed_kernel/gguf_blocks.py.

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

typedef uint64_t Words4 __attribute__((vector_size(32)));

// The quants of a block: their high bits lie in four bytes, one bit an element, their low bits in sixteen.
inline Bytes32 five_bits(const uint8_t* high, const uint8_t* low) {
    Words4 spread, packed{};  // a byte of high bits eight times, once for each element it belongs to
    for (int i = 0; i < 4; ++i) spread[i] = high[i] * 0x0101010101010101ull;
    memcpy(&packed, low, 16);
    packed[2] = packed[0] >> 4;
    packed[3] = packed[1] >> 4;
    const Bytes32 bits = (Bytes32)(Words4{} + 0x8040201008040201ull);
    const Bytes32 high_bit = (Bytes32)(((Bytes32)spread & bits) == bits) & 16;
    return ((Bytes32)packed & 15) | high_bit;
}

inline void scaled_five_bits(const uint8_t* high, const float* scales, Vec* w) {
    bytes_to_float(five_bits(high, high + 4), w);
    for (int v = 0; v < 32 / kLanes; ++v) w[v] = fma(w[v], set(scales[0]), set(scales[1]));
}

struct BlockQ5_0 {
    static constexpr int kBytes = 22;
    static void widen_scales(const uint8_t* block, float* scales) {
        scales[0] = float16_to_float(block);
        scales[1] = -16.0f * scales[0];
    }
    static void decode(const uint8_t* block, const float* scales, Vec* w) { scaled_five_bits(block + 2, scales, w); }
};
struct BlockQ5_1 {
    static constexpr int kBytes = 24;
    static void widen_scales(const uint8_t* block, float* scales) {
        scales[0] = float16_to_float(block);
        scales[1] = float16_to_float(block + 2);
    }
    static void decode(const uint8_t* block, const float* scales, Vec* w) { scaled_five_bits(block + 4, scales, w); }
};

}  // namespace
}  // namespace tokenspeed::TOKENSPEED_ISA
