// The vector type of the portable build: 8 float lanes in the compiler's generic vectors, for any architecture (SSE2 on a
// plain x86-64, NEON on arm64). C headers only, see avx512.hpp.
#pragma once

#include <stdint.h>
#include <string.h>

namespace tokenspeed::portable {
namespace {

typedef float Vec __attribute__((vector_size(32)));
typedef int32_t IntVec __attribute__((vector_size(32)));
typedef uint32_t UintVec __attribute__((vector_size(32)));

constexpr int kLanes = 8;
constexpr int kLinearTokens = 2;
constexpr int kAttentionRows = 2;
constexpr int kDirectTokens = 2;

inline Vec zero() { return Vec{}; }
inline Vec set(float value) { return Vec{} + value; }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec fma(Vec a, Vec b, Vec c) {
#ifdef __FP_FAST_FMAF
    Vec r;
    for (int i = 0; i < kLanes; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#else
    return a * b + c;  // two roundings: -ffp-contract=off keeps them two in every instantiation
#endif
}
inline Vec select(IntVec condition, Vec x, Vec y) {
    return (Vec)((condition & (IntVec)x) | (~condition & (IntVec)y));
}
inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }
inline Vec min(Vec a, Vec b) { return select(a < b, a, b); }

inline Vec power_of_two(Vec n) { return (Vec)((__builtin_convertvector(n, IntVec) + 127) << 23); }
inline Vec select_less(Vec a, Vec b, Vec x, Vec y) { return select(a < b, x, y); }
inline bool any(IntVec condition) {
    int32_t found = 0;
    for (int i = 0; i < kLanes; ++i) found |= condition[i];
    return found != 0;
}
inline bool any_nan(Vec a) { return any(a != a); }
inline bool any_at_least(Vec a, Vec b) { return any(a >= b); }

inline Vec load(const float* p) {
    Vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline Vec load_first(const float* p, int64_t count) {
    if (count == kLanes) return load(p);
    Vec v{};
    for (int64_t i = 0; i < count; ++i) v[i] = p[i];
    return v;
}
inline void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }
inline void store_first(float* p, Vec v, int64_t count) {
    if (count == kLanes) return store(p, v);
    for (int64_t i = 0; i < count; ++i) p[i] = v[i];
}

inline UintVec load_halves(const uint16_t* p, int64_t count) {
    UintVec bits{};
    for (int64_t i = 0; i < count; ++i) {
        uint16_t half;
        memcpy(&half, p + i, 2);
        bits[i] = half;
    }
    return bits;
}
inline Vec load_bfloat16_first(const uint16_t* p, int64_t count) { return (Vec)(load_halves(p, count) << 16); }
inline Vec load_bfloat16(const uint16_t* p) { return load_bfloat16_first(p, kLanes); }

// Half to float by moving the exponent and multiplying by 2^112: exact, subnormals included; infinities and NaN apart.
inline Vec widen_float16(UintVec half) {
    const UintVec sign = (half & 0x8000u) << 16;
    const UintVec magnitude = (half & 0x7fffu) << 13;
    UintVec finite = (UintVec)((Vec)magnitude * 0x1p112f);
    UintVec special = magnitude | 0x7f800000u;
    UintVec is_special = (UintVec)((half & 0x7c00u) == 0x7c00u);
    return (Vec)(((is_special & special) | (~is_special & finite)) | sign);
}
inline Vec load_float16_first(const uint16_t* p, int64_t count) { return widen_float16(load_halves(p, count)); }
inline Vec load_float16(const uint16_t* p) { return load_float16_first(p, kLanes); }

inline float float16_to_float(const uint8_t* p) {
    uint16_t half;
    memcpy(&half, p, 2);
    return widen_float16(UintVec{} + half)[0];
}

inline uint16_t narrow_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return (uint16_t)((bits | 0x400000u) >> 16);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
// Rounds to nearest even; overflow becomes infinity.
inline uint16_t narrow_float16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 aligns the bits, and rounds them, at the end of the word
        float aligned;
        memcpy(&aligned, &magnitude, 4);
        aligned += 0.5f;
        memcpy(&magnitude, &aligned, 4);
        return (uint16_t)(sign | (magnitude - 0x3f000000u));
    }
    magnitude += 0xc8000fffu + ((magnitude >> 13) & 1u);
    return (uint16_t)(sign | (magnitude >> 13));
}
inline void store_bfloat16_first(uint16_t* p, Vec v, int64_t count) {
    for (int64_t i = 0; i < count; ++i) p[i] = narrow_bfloat16(v[i]);
}
inline void store_float16_first(uint16_t* p, Vec v, int64_t count) {
    for (int64_t i = 0; i < count; ++i) p[i] = narrow_float16(v[i]);
}

// Exponent and significand move to where a float has them, which divides the value by 2^120.
inline float e4m3_to_float(uint8_t e4m3) {
    uint32_t bits = (uint32_t)(e4m3 & 0x7f) << 20 | (uint32_t)(e4m3 & 0x80) << 24;
    float value;
    memcpy(&value, &bits, 4);
    return (e4m3 & 0x7f) == 0x7f ? __builtin_nanf("") : value * 0x1p120f;
}
// Bytes of one vector, as the other sets have them.
struct LaneBytes {
    uint8_t bytes[kLanes];
};
inline LaneBytes load_bytes_first(const uint8_t* p, int64_t count) {
    LaneBytes lanes{};
    memcpy(lanes.bytes, p, (size_t)count);
    return lanes;
}
inline LaneBytes load_bytes(const uint8_t* p) { return load_bytes_first(p, kLanes); }
inline Vec widen_e4m3(LaneBytes lanes) {
    Vec v{};
    for (int i = 0; i < kLanes; ++i) v[i] = e4m3_to_float(lanes.bytes[i]);
    return v;
}
inline Vec widen_e4m3_numbers(LaneBytes lanes) {
    UintVec bits{};
    for (int i = 0; i < kLanes; ++i) bits[i] = lanes.bytes[i];
    return (Vec)((bits & 0x7fu) << 20 | (bits & 0x80u) << 24) * 0x1p120f;
}
inline bool all_e4m3_numbers(const uint8_t* p, int64_t count) {
    bool found = false;
    for (int64_t i = 0; i < count; ++i) found |= (p[i] & 0x7f) == 0x7f;
    return !found;
}
// To nearest even; ±448 for what lies beyond it, a NaN stays one.
inline uint8_t narrow_e4m3(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t sign = (bits >> 24) & 0x80u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint8_t)(sign | 0x7fu);
    if (magnitude > 0x43e00000u) magnitude = 0x43e00000u;
    if (magnitude < 0x3c800000u) {  // subnormal: the step is that of floats from 2^14 on
        float aligned;
        memcpy(&aligned, &magnitude, 4);
        aligned += 16384.0f;
        memcpy(&magnitude, &aligned, 4);
        return (uint8_t)(sign | (magnitude - 0x46800000u));
    }
    magnitude += 0x7ffffu + ((magnitude >> 20) & 1u);
    return (uint8_t)(sign | ((magnitude >> 20) - (120u << 3)));
}
inline void store_e4m3_first(uint8_t* p, Vec v, int64_t count) {
    for (int64_t i = 0; i < count; ++i) p[i] = narrow_e4m3(v[i]);
}

inline float sum(Vec v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
inline float maximum(Vec v) {
    float best = v[0];
    for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
    return best;
}
inline void sum_four(Vec a, Vec b, Vec c, Vec d, float* out) {
    out[0] = sum(a);
    out[1] = sum(b);
    out[2] = sum(c);
    out[3] = sum(d);
}

typedef int8_t Int8x8 __attribute__((vector_size(8)));
typedef uint8_t Uint8x8 __attribute__((vector_size(8)));

template <class Bytes>
inline Bytes load_bytes(const uint8_t* p) {
    Bytes bytes;
    memcpy(&bytes, p, 8);
    return bytes;
}
// 32 unsigned bytes into four vectors.
typedef uint8_t Bytes32 __attribute__((vector_size(32)));
inline void bytes_to_float(Bytes32 bytes, Vec* w) {
    for (int v = 0; v < 4; ++v) {
        Uint8x8 eight;
        memcpy(&eight, (const char*)&bytes + 8 * v, 8);
        w[v] = __builtin_convertvector(eight, Vec);
    }
}
// nibble * scale + offset of 32 nibbles, each `shift` bits up in its byte.
inline void scaled_nibbles(const uint8_t* bytes, int shift, float scale, float offset, Vec* w) {
    for (int v = 0; v < 4; ++v) {
        Uint8x8 eight;
        memcpy(&eight, bytes + 8 * v, 8);
        w[v] = fma(__builtin_convertvector((eight >> shift) & 15, Vec), set(scale), set(offset));
    }
}
// GGUF blocks: 32 weights into four vectors, in order.
inline void nibbles_to_float(const uint8_t* p, Vec* w) {
    for (int v = 0; v < 2; ++v) {
        Uint8x8 bytes = load_bytes<Uint8x8>(p + 8 * v);
        w[v] = __builtin_convertvector(bytes & 15, Vec);
        w[v + 2] = __builtin_convertvector(bytes >> 4, Vec);
    }
}
// Twice the value of 32 e2m1 times a scale, scales[0] of the first 16 and scales[1] of the others.
inline void scaled_e2m1(const uint8_t* nibbles, const float* scales, Vec* w) {
    static const float table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    for (int i = 0; i < 16; ++i) {
        w[i / 8][i % 8] = table[nibbles[i] & 15] * scales[0];
        w[2 + i / 8][i % 8] = table[nibbles[i] >> 4] * scales[1];
    }
}
// 32 e4m3 times a scale.
inline void scaled_e4m3(const uint8_t* bytes, float scale, Vec* w) {
    for (int i = 0; i < 32; ++i) w[i / 8][i % 8] = e4m3_to_float(bytes[i]) * scale;
}
inline void four_e4m3(const uint8_t* bytes, float factor, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = e4m3_to_float(bytes[i]) * factor;
}
struct BlockQ4_0 {
    static constexpr int kBytes = 18;
    static constexpr int kScales = 1;
    static void widen_scales(const uint8_t* block, float* scales) {
        scales[0] = float16_to_float(block);
    }
    static void decode(const uint8_t* block, const float* scales, Vec* w) {
        Vec scale = set(scales[0]);
        nibbles_to_float(block + 2, w);
        for (int v = 0; v < 4; ++v) w[v] = (w[v] - 8.0f) * scale;
    }
};
struct BlockQ4_1 {
    static constexpr int kBytes = 20;
    static constexpr int kScales = 2;
    static void widen_scales(const uint8_t* block, float* scales) {
        scales[0] = float16_to_float(block);
        scales[1] = float16_to_float(block + 2);
    }
    static void decode(const uint8_t* block, const float* scales, Vec* w) {
        Vec scale = set(scales[0]);
        Vec minimum = set(scales[1]);
        nibbles_to_float(block + 4, w);
        for (int v = 0; v < 4; ++v) w[v] = fma(w[v], scale, minimum);
    }
};
struct BlockQ8_0 {
    static constexpr int kBytes = 34;
    static constexpr int kScales = 1;
    static void widen_scales(const uint8_t* block, float* scales) {
        scales[0] = float16_to_float(block);
    }
    static void decode(const uint8_t* block, const float* scales, Vec* w) {
        Vec scale = set(scales[0]);
        for (int v = 0; v < 4; ++v) w[v] = __builtin_convertvector(load_bytes<Int8x8>(block + 2 + 8 * v), Vec) * scale;
    }
};

}  // namespace
}  // namespace tokenspeed::portable
