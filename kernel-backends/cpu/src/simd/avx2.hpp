// The vector type of the AVX2 build (AVX2, FMA, F16C): 8 float lanes. C headers only, see avx512.hpp.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace tokenspeed::avx2 {
namespace {

using Vec = __m256;

constexpr int kLanes = 8;
constexpr int kLinearTokens = 3;
constexpr int kAttentionRows = 2;
constexpr int kDirectTokens = 4;

inline __m256i first(int64_t count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), lane);
}

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec set(float value) { return _mm256_set1_ps(value); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }

inline Vec power_of_two(Vec n) {
    __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
inline Vec select_less(Vec a, Vec b, Vec x, Vec y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline bool any_nan(Vec a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)) != 0; }
inline bool any_at_least(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)) != 0; }

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load_first(const float* p, int64_t count) {
    return count == kLanes ? load(p) : _mm256_maskload_ps(p, first(count));
}
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline void store_first(float* p, Vec v, int64_t count) {
    if (count == kLanes) return store(p, v);  // masked stores are slow on some processors
    _mm256_maskstore_ps(p, first(count), v);
}

inline Vec widen_bfloat16(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline __m128i load_halves(const uint16_t* p, int64_t count) {
    if (count == kLanes) return _mm_loadu_si128((const __m128i*)p);
    alignas(16) uint16_t lanes[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    memcpy(lanes, p, (size_t)count * 2);
    return _mm_load_si128((const __m128i*)lanes);
}
inline void store_halves(uint16_t* p, __m128i halves, int64_t count) {
    if (count == kLanes) return _mm_storeu_si128((__m128i*)p, halves);
    alignas(16) uint16_t lanes[8];
    _mm_store_si128((__m128i*)lanes, halves);
    memcpy(p, lanes, (size_t)count * 2);
}
inline Vec load_bfloat16(const uint16_t* p) { return widen_bfloat16(_mm_loadu_si128((const __m128i*)p)); }
inline Vec load_bfloat16_first(const uint16_t* p, int64_t count) { return widen_bfloat16(load_halves(p, count)); }
inline Vec load_float16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline Vec load_float16_first(const uint16_t* p, int64_t count) { return _mm256_cvtph_ps(load_halves(p, count)); }

inline __m128i narrow_bfloat16(Vec v) {
    __m256i bits = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    __m256i halves = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}
inline void store_bfloat16_first(uint16_t* p, Vec v, int64_t count) { store_halves(p, narrow_bfloat16(v), count); }
inline void store_float16_first(uint16_t* p, Vec v, int64_t count) {
    store_halves(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), count);
}

// As avx512.hpp has it; what is no number gets the exponent of a half that is none.
inline Vec widen_e4m3_halves(__m128i halves) { return mul(_mm256_cvtph_ps(halves), set(256.0f)); }
inline __m128i moved_e4m3(__m128i wide) {
    return _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbfff));
}
inline Vec widen_e4m3_numbers(__m128i bytes) { return widen_e4m3_halves(moved_e4m3(_mm_cvtepi8_epi16(bytes))); }
inline Vec widen_e4m3(__m128i bytes) {
    const __m128i magnitude = _mm_set1_epi16(0x7f), wide = _mm_cvtepi8_epi16(bytes);
    const __m128i none = _mm_cmpeq_epi16(_mm_and_si128(wide, magnitude), magnitude);
    return widen_e4m3_halves(_mm_or_si128(moved_e4m3(wide), _mm_and_si128(none, _mm_set1_epi16(0x7e00))));
}
inline __m128i load_bytes(const uint8_t* p) { return _mm_loadl_epi64((const __m128i*)p); }
inline __m128i load_bytes_first(const uint8_t* p, int64_t count) {
    if (count == kLanes) return load_bytes(p);
    uint64_t lanes = 0;
    memcpy(&lanes, p, (size_t)count);
    return _mm_cvtsi64_si128((long long)lanes);
}
inline bool all_e4m3_numbers(const uint8_t* p, int64_t count) {
    const __m256i sign = _mm256_set1_epi8((char)0x80), ones = _mm256_set1_epi8((char)0xff);
    __m256i none = _mm256_setzero_si256();
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i*)(p + i));
        none = _mm256_or_si256(none, _mm256_cmpeq_epi8(_mm256_or_si256(bytes, sign), ones));
    }
    bool found = _mm256_movemask_epi8(none) != 0;
    for (; i < count; ++i) found |= (p[i] & 0x7f) == 0x7f;
    return !found;
}
// As avx512.hpp has it.
inline void store_e4m3_first(uint8_t* p, Vec v, int64_t count) {
    const __m256i bits = _mm256_castps_si256(v), positive = _mm256_set1_epi32(0x7fffffff);
    const __m256i capped = _mm256_min_epi32(_mm256_and_si256(bits, positive), _mm256_set1_epi32(0x43e00000));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(capped, 20), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(capped, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7ffff)));
    const __m256i normal = _mm256_sub_epi32(_mm256_srli_epi32(rounded, 20), _mm256_set1_epi32(120 << 3));
    const Vec aligned = add(_mm256_castsi256_ps(capped), set(16384.0f));
    const __m256i small = _mm256_sub_epi32(_mm256_castps_si256(aligned), _mm256_set1_epi32(0x46800000));
    const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c800000), capped);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    __m256i codes = _mm256_blendv_epi8(normal, small, is_small);
    codes = _mm256_blendv_epi8(codes, _mm256_set1_epi32(0x7f), is_nan);
    codes = _mm256_or_si256(codes, _mm256_srli_epi32(_mm256_andnot_si256(positive, bits), 24));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
    const long long lanes = _mm_cvtsi128_si64(_mm_packus_epi16(words, words));
    memcpy(p, &lanes, (size_t)count);
}

inline float sum(Vec v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float maximum(Vec v) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline void sum_four(Vec a, Vec b, Vec c, Vec d, float* out) {
    Vec ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    Vec cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    Vec quads = add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1)));
}

inline float float16_to_float(const uint8_t* p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}

// 32 unsigned bytes into four vectors.
typedef uint8_t Bytes32 __attribute__((vector_size(32)));
inline void bytes_to_float(Bytes32 bytes, Vec* w) {
    const __m128i halves[2] = {_mm256_castsi256_si128((__m256i)bytes), _mm256_extracti128_si256((__m256i)bytes, 1)};
    for (int v = 0; v < 4; ++v) {
        const __m128i eight = v % 2 ? _mm_srli_si128(halves[v / 2], 8) : halves[v / 2];
        w[v] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight));
    }
}

// nibble * scale + offset of 32 nibbles, each `shift` bits up in its byte.
inline void scaled_nibbles(const uint8_t* bytes, int shift, float scale, float offset, Vec* w) {
    const __m256i shifted = _mm256_srl_epi16(_mm256_loadu_si256((const __m256i*)bytes), _mm_cvtsi32_si128(shift));
    bytes_to_float((Bytes32)_mm256_and_si256(shifted, _mm256_set1_epi8(15)), w);
    for (int v = 0; v < 4; ++v) w[v] = fma(w[v], set(scale), set(offset));
}

// GGUF blocks: 32 weights into four vectors, in order.
inline void quants_to_float(__m128i bytes, Vec* w) {
    w[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    w[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)));
}
inline void nibbles_to_float(const uint8_t* p, int offset, Vec* w) {
    const __m128i mask = _mm_set1_epi8(15);
    const __m128i shift = _mm_set1_epi8((char)offset);
    __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    quants_to_float(_mm_sub_epi8(_mm_and_si128(bytes, mask), shift), w);
    quants_to_float(_mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(bytes, 4), mask), shift), w + 2);
}
// Twice the value of 32 e2m1 times a scale, scales[0] of the first 16 and scales[1] of the others.
inline void scaled_e2m1(const uint8_t* nibbles, const float* scales, Vec* w) {
    const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i mask = _mm_set1_epi8(15);
    const __m128i bytes = _mm_loadu_si128((const __m128i*)nibbles);
    quants_to_float(_mm_shuffle_epi8(table, _mm_and_si128(bytes, mask)), w);
    quants_to_float(_mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(bytes, 4), mask)), w + 2);
    for (int v = 0; v < 4; ++v) w[v] = mul(w[v], set(scales[v / 2]));
}
// 32 e4m3 times a scale, as avx512.hpp has it.
inline void scaled_e4m3(const uint8_t* bytes, float scale, Vec* w) {
    const Vec factor = set(scale * 256.0f);
    for (int half = 0; half < 2; ++half) {
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(bytes + 16 * half)));
        const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbfff));
        w[2 * half] = mul(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), factor);
        w[2 * half + 1] = mul(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), factor);
    }
}
// Four e4m3 times `factor`, as scaled_e4m3 has them; what is no number gets the exponent of one that is none.
inline void four_e4m3(const uint8_t* bytes, float factor, float* out) {
    int four;
    memcpy(&four, bytes, 4);
    const __m128i magnitude = _mm_set1_epi16(0x7f);
    const __m128i wide = _mm_cvtepi8_epi16(_mm_cvtsi32_si128(four));
    const __m128i none = _mm_cmpeq_epi16(_mm_and_si128(wide, magnitude), magnitude);
    const __m128i moved = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbfff));
    const __m128i halves = _mm_or_si128(moved, _mm_and_si128(none, _mm_set1_epi16(0x7e00)));
    _mm_storeu_ps(out, _mm_mul_ps(_mm_cvtph_ps(halves), _mm_set1_ps(factor * 256.0f)));
}
struct BlockQ4_0 {
    static constexpr int kBytes = 18;
    static constexpr int kScales = 1;
    static void widen_scales(const uint8_t* block, float* scales) {
        scales[0] = float16_to_float(block);
    }
    static void decode(const uint8_t* block, const float* scales, Vec* w) {
        Vec scale = set(scales[0]);
        nibbles_to_float(block + 2, 8, w);
        for (int v = 0; v < 4; ++v) w[v] = mul(w[v], scale);
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
        nibbles_to_float(block + 4, 0, w);
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
        quants_to_float(_mm_loadu_si128((const __m128i*)(block + 2)), w);
        quants_to_float(_mm_loadu_si128((const __m128i*)(block + 18)), w + 2);
        for (int v = 0; v < 4; ++v) w[v] = mul(w[v], scale);
    }
};

}  // namespace
}  // namespace tokenspeed::avx2
