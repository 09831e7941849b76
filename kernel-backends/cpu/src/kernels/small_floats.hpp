// MXFP4 and NVFP4: four-bit floats (e2m1) under power-of-two scales of 32, or under e4m3 scales of 16 and a float32 scale; and
// e4m3 under float32 scales of 128. Layouts: tokenspeed_kernel/gguf_blocks.py. A weight is twice its e2m1, an integer, times half
// its scale, or its e4m3 times its scale: rounded once, as when the blocks are dequantised.

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

// 2^(e - 128), NaN where e is 255: half of what an e8m0 stands for.
inline float half_of_e8m0(uint8_t e) {
    uint32_t bits = e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23;
    if (e == 255) bits = 0x7fc00000u;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

struct BlockMxfp4 {
    static constexpr int kBytes = 17;
    static void widen_scales(const uint8_t* block, float* scales) { scales[0] = scales[1] = half_of_e8m0(block[0]); }
    static void decode(const uint8_t* block, const float* scales, Vec* w) { scaled_e2m1(block + 1, scales, w); }
};

struct Nvfp4 {
    static constexpr int kBytes = 40;
    static constexpr int kParts = 2;
    static constexpr bool kHasTail = false;
    static constexpr bool kBroadcasts = true;
    struct Scales {
        float values[4];
    };
    static void widen_scales(const uint8_t* block, Scales& scales) {
        float whole;
        memcpy(&whole, block, 4);
        four_e4m3(block + 4, whole * 0.5f, scales.values);
    }
    static void decode(const uint8_t* block, int part, const Scales& scales, Vec* w) {
        scaled_e2m1(block + 8 + 16 * part, scales.values + 2 * part, w);
    }
    static Vec tail(const uint8_t*, int64_t, int64_t) { return zero(); }
};

struct Fp8Blocks {
    static constexpr int kBytes = 132;
    static constexpr int kParts = 4;
    static constexpr bool kHasTail = false;
    static constexpr bool kBroadcasts = true;
    struct Scales {
        float value;
    };
    static void widen_scales(const uint8_t* block, Scales& scales) { memcpy(&scales.value, block, 4); }
    static void decode(const uint8_t* block, int part, const Scales& scales, Vec* w) {
        scaled_e4m3(block + 4 + 32 * part, scales.value, w);
    }
    static Vec tail(const uint8_t*, int64_t, int64_t) { return zero(); }
};

}  // namespace
}  // namespace tokenspeed::TOKENSPEED_ISA
