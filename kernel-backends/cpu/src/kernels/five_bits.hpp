// GGUF's Q5_0 and Q5_1: 32 weights of five bits, quant * scale + offset, rounded once as when the blocks are dequantised.
// Layouts: tokenspeed_kernel/gguf_blocks.py.

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

typedef uint32_t Words8 __attribute__((vector_size(32)));
typedef uint8_t Nibbles16 __attribute__((vector_size(16)));

// The quants of a block: their high bits lie in four bytes, one bit an element, their low bits in sixteen.
inline Bytes32 five_bits(const uint8_t* high, const uint8_t* low) {
    const Bytes32 places = {0,  0,  0,  0,  0,  0,  0,  0,  1,  1,  1,  1,  1,  1,  1,  1,
                            18, 18, 18, 18, 18, 18, 18, 18, 19, 19, 19, 19, 19, 19, 19, 19};
    const Bytes32 bits = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128,
                          1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const Bytes32 of_low = {15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15};  // then zeros
    uint32_t word;
    memcpy(&word, high, 4);
    // A byte of high bits eight times, once for each element it belongs to.
    const Bytes32 spread = __builtin_shuffle((Bytes32)(Words8{} + word), places);
    const Bytes32 high_bit = (Bytes32)((spread & bits) == bits) & 16;
    Nibbles16 packed;
    memcpy(&packed, low, 16);
    const Packed twice = (Packed)__builtin_shufflevector(packed, packed, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                                                         0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return ((Bytes32)twice & of_low) | ((Bytes32)(twice >> 4) & (of_low ^ 15)) | high_bit;
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
