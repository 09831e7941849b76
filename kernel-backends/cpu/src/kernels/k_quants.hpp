// GGUF's K blocks: 256 weights in groups of 16 or 32, each with a scale s and an offset o; a weight is quant * s + o with a
// quant >= 0. Layouts: tokenspeed_kernel/gguf_blocks.py. d * scale and dmin * minimum are exact in float32, so each weight is
// rounded once, as when the blocks are dequantised.
//
// A part is 32 weights in a row. Its quants are unpacked in the compiler's vectors of bytes, shifted as 16-bit words: what
// crosses from one byte of a word to the other is masked away.

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

typedef uint16_t Packed __attribute__((vector_size(32)));

inline Packed load_packed(const uint8_t* p) {
    Packed packed;
    memcpy(&packed, p, sizeof packed);
    return packed;
}

// (byte >> shift) & mask of each byte, for a mask of at most 8 - shift bits.
inline Packed field(Packed packed, int shift, int mask) { return (packed >> shift) & (uint16_t)(mask * 0x0101); }

// The scales and offsets of a block's groups.
template <int Groups>
struct GroupScales {
    float scale[Groups];
    float offset[Groups];
};

// The weights of a part, of its unpacked quants.
template <int Groups>
inline void scaled(Packed quants, int part, const GroupScales<Groups>& scales, Vec* w) {
    constexpr int kVectors = 32 / kLanes;
    bytes_to_float((Bytes32)quants, w);
    for (int v = 0; v < kVectors; ++v) {
        const int group = part * (Groups / 8) + v * (Groups / 8) / kVectors;
        w[v] = fma(w[v], set(scales.scale[group]), set(scales.offset[group]));
    }
}

// The six-bit scales and minimums of Q4_K and Q5_K of a block, times its d and dmin.
inline void widen_six_bits(const uint8_t* block, GroupScales<8>* scales) {
    uint32_t words[3];
    memcpy(words, block + 4, 12);
    const uint32_t fields[8] = {
        words[0] & 0x3f3f3f3fu,
        (words[2] & 0x0f0f0f0fu) | ((words[0] >> 2) & 0x30303030u),
        words[1] & 0x3f3f3f3fu,
        ((words[2] >> 4) & 0x0f0f0f0fu) | ((words[1] >> 2) & 0x30303030u),
    };
    Bytes32 bytes;
    memcpy(&bytes, fields, sizeof bytes);
    float widened[16];
    Vec w[32 / kLanes];
    bytes_to_float(bytes, w);
    for (int v = 0; v < 16 / kLanes; ++v) store(widened + v * kLanes, w[v]);
    const float d = float16_to_float(block), least = -float16_to_float(block + 2);
    for (int g = 0; g < 8; ++g) {
        scales->scale[g] = d * widened[g];
        scales->offset[g] = least * widened[8 + g];
    }
}

struct BlockQ2_K {
    static constexpr int kBytes = 84;
    using Scales = GroupScales<16>;
    static void widen_scales(const uint8_t* block, Scales* scales) {
        const float d = float16_to_float(block + 80), least = -float16_to_float(block + 82);
        for (int g = 0; g < 16; ++g) {
            scales->scale[g] = d * (float)(block[g] & 15);
            scales->offset[g] = least * (float)(block[g] >> 4);
        }
    }
    static void decode(const uint8_t* block, int part, const Scales& scales, Vec* w) {
        scaled(field(load_packed(block + 16 + part / 4 * 32), part % 4 * 2, 3), part, scales, w);
    }
};
struct BlockQ3_K {
    static constexpr int kBytes = 110;
    using Scales = GroupScales<16>;
    static void widen_scales(const uint8_t* block, Scales* scales) {
        const float d = float16_to_float(block + 108);
        const uint8_t* packed = block + 96;
        for (int g = 0; g < 16; ++g) {
            const int low = packed[g % 8] >> (g / 8 * 4) & 15;
            const int high = packed[8 + g % 4] >> (g / 4 * 2) & 3;
            scales->scale[g] = d * (float)((low | high << 4) - 32);
            scales->offset[g] = -4.0f * scales->scale[g];
        }
    }
    static void decode(const uint8_t* block, int part, const Scales& scales, Vec* w) {
        const Packed low = field(load_packed(block + 32 + part / 4 * 32), part % 4 * 2, 3);
        scaled(low | field(load_packed(block), part, 1) << 2, part, scales, w);
    }
};
struct BlockQ4_K {
    static constexpr int kBytes = 144;
    using Scales = GroupScales<8>;
    static void widen_scales(const uint8_t* block, Scales* scales) { widen_six_bits(block, scales); }
    static void decode(const uint8_t* block, int part, const Scales& scales, Vec* w) {
        scaled_nibbles(block + 16 + part / 2 * 32, part % 2 * 4, scales.scale[part], scales.offset[part], w);
    }
};
struct BlockQ5_K {
    static constexpr int kBytes = 176;
    using Scales = GroupScales<8>;
    static void widen_scales(const uint8_t* block, Scales* scales) { widen_six_bits(block, scales); }
    static void decode(const uint8_t* block, int part, const Scales& scales, Vec* w) {
        const Packed low = field(load_packed(block + 48 + part / 2 * 32), part % 2 * 4, 15);
        scaled(low | field(load_packed(block + 16), part, 1) << 4, part, scales, w);
    }
};
struct BlockQ6_K {
    static constexpr int kBytes = 210;
    using Scales = GroupScales<16>;
    static void widen_scales(const uint8_t* block, Scales* scales) {
        const float d = float16_to_float(block + 208);
        for (int g = 0; g < 16; ++g) {
            scales->scale[g] = d * (float)(int8_t)block[192 + g];
            scales->offset[g] = -32.0f * scales->scale[g];
        }
    }
    static void decode(const uint8_t* block, int part, const Scales& scales, Vec* w) {
        const int half = part / 4, quarter = part % 4;
        const Packed low = field(load_packed(block + half * 64 + quarter % 2 * 32), quarter / 2 * 4, 15);
        scaled(low | field(load_packed(block + 128 + half * 32), quarter * 2, 3) << 4, part, scales, w);
    }
};

// A K block as linear.hpp takes its formats.
template <class Block>
struct GroupQuantised {
    static constexpr int kBytes = Block::kBytes;
    static constexpr int kParts = 8;
    static constexpr bool kHasTail = false;
    static constexpr bool kBroadcasts = true;
    using Scales = typename Block::Scales;
    static void widen_scales(const uint8_t* block, Scales& scales) { Block::widen_scales(block, &scales); }
    static void decode(const uint8_t* block, int part, const Scales& scales, Vec* w) {
        Block::decode(block, part, scales, w);
    }
    static Vec tail(const uint8_t*, int64_t, int64_t) { return zero(); }
};

}  // namespace
}  // namespace tokenspeed::TOKENSPEED_ISA
