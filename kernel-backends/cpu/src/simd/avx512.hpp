// The vector type of the AVX-512 build (F, BW, DQ, VL): 16 float lanes.
//
// Only C headers here: a template or inline function of the C++ library instantiated in this translation unit could be
// the copy the linker keeps for the whole module, and would then run AVX-512 code on machines that lack it.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace tokenspeed::avx512 {
namespace {

using Vec = __m512;
using Mask = __mmask16;

constexpr int kLanes = 16;
constexpr int kLinearTokens = 6;     // tokens of one register tile of the blocked product (4 rows each)
constexpr int kAttentionRows = 6;    // query rows of one register tile
constexpr int kDirectTokens = 8;     // largest batch that multiplies straight from the packed weights

inline Mask first(int64_t count) { return static_cast<Mask>((1u << count) - 1u); }

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec set(float value) { return _mm512_set1_ps(value); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// The second operand is returned where either is NaN.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }

// 2^n for n that holds an integer in [-126, 127].
inline Vec power_of_two(Vec n) {
    __m512i bits = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}
// a < b ? x : y, lane by lane; y where a comparison has a NaN.
inline Vec select_less(Vec a, Vec b, Vec x, Vec y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
inline bool any_nan(Vec a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }
// Whether a lane of a is at least the same lane of b.
inline bool any_at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ) != 0; }

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load_first(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(first(count), p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline void store_first(float* p, Vec v, int64_t count) { _mm512_mask_storeu_ps(p, first(count), v); }

inline Vec widen_bfloat16(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Vec load_bfloat16(const uint16_t* p) { return widen_bfloat16(_mm256_loadu_si256((const __m256i*)p)); }
inline Vec load_bfloat16_first(const uint16_t* p, int64_t count) {
    return widen_bfloat16(_mm256_maskz_loadu_epi16(first(count), p));
}
inline Vec load_float16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Vec load_float16_first(const uint16_t* p, int64_t count) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), p));
}

// Rounds to nearest even; a NaN stays a NaN (its quiet bit is set).
inline __m256i narrow_bfloat16(Vec v) {
    __m512i bits = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    rounded = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), rounded, quiet);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
inline void store_bfloat16_first(uint16_t* p, Vec v, int64_t count) {
    _mm256_mask_storeu_epi16(p, first(count), narrow_bfloat16(v));
}
inline void store_float16_first(uint16_t* p, Vec v, int64_t count) {
    _mm256_mask_storeu_epi16(p, first(count), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Sign, exponent and significand of an e4m3 move to where a half has them, which divides the value by 2^8. For numbers only.
inline Vec widen_e4m3_numbers(__m128i bytes) {
    const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    return mul(_mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16((short)0xbfff))), set(256.0f));
}
inline Vec widen_e4m3(__m128i bytes) {
    const __m128i ones = _mm_set1_epi8((char)0xff);
    const __mmask16 none = _mm_cmpeq_epi8_mask(_mm_or_si128(bytes, _mm_set1_epi8((char)0x80)), ones);
    return _mm512_mask_mov_ps(widen_e4m3_numbers(bytes), none, set(__builtin_nanf("")));
}
inline __m128i load_bytes_first(const uint8_t* p, int64_t count) { return _mm_maskz_loadu_epi8(first(count), p); }
inline __m128i load_bytes(const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); }
// Whether none of `count` e4m3 is NaN.
inline bool all_e4m3_numbers(const uint8_t* p, int64_t count) {
    const __m512i sign = _mm512_set1_epi8((char)0x80), ones = _mm512_set1_epi8((char)0xff);
    __mmask64 none = 0;
    for (int64_t i = 0; i < count; i += 64) {
        const __mmask64 lanes = count - i < 64 ? (1ull << (count - i)) - 1 : ~0ull;
        none |= _mm512_cmpeq_epi8_mask(_mm512_or_si512(_mm512_maskz_loadu_epi8(lanes, p + i), sign), ones);
    }
    return none == 0;
}

// To nearest even; ±448 for what lies beyond it, a NaN stays one.
inline void store_e4m3_first(uint8_t* p, Vec v, int64_t count) {
    const __m512i bits = _mm512_castps_si512(v), size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __m512i capped = _mm512_min_epi32(size, _mm512_set1_epi32(0x43e00000));  // 448
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(capped, 20), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(capped, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff)));
    const __m512i normal = _mm512_sub_epi32(_mm512_srli_epi32(rounded, 20), _mm512_set1_epi32(120 << 3));
    // Below 2^-6 the step is 2^-9, which is that of floats from 2^14 on.
    const Vec aligned = add(_mm512_castsi512_ps(capped), set(16384.0f));
    const __m512i small = _mm512_sub_epi32(_mm512_castps_si512(aligned), _mm512_set1_epi32(0x46800000));
    const __mmask16 is_small = _mm512_cmplt_epi32_mask(capped, _mm512_set1_epi32(0x3c800000));
    __m512i codes = _mm512_mask_mov_epi32(normal, is_small, small);
    codes = _mm512_mask_mov_epi32(codes, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7f));
    codes = _mm512_or_si512(codes, _mm512_srli_epi32(_mm512_andnot_si512(_mm512_set1_epi32(0x7fffffff), bits), 24));
    _mm_mask_storeu_epi8(p, first(count), _mm512_cvtepi32_epi8(codes));
}

inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }
inline float maximum(Vec v) { return _mm512_reduce_max_ps(v); }

// The lane sums of four vectors, each by the same tree.
inline void sum_four(Vec a, Vec b, Vec c, Vec d, float* out) {
    Vec ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    Vec cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    Vec quads = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps(quads, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

inline float float16_to_float(const uint8_t* p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
    return _cvtsh_ss(bits);
}

// 32 unsigned bytes into two vectors.
typedef uint8_t Bytes32 __attribute__((vector_size(32)));
inline void bytes_to_float(Bytes32 bytes, Vec* w) {
    w[0] = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm256_castsi256_si128((__m256i)bytes)));
    w[1] = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm256_extracti128_si256((__m256i)bytes, 1)));
}

// nibble * scale + offset of 32 nibbles, each `shift` bits up in its byte. The permutation reads the low four bits of a lane
// only: no mask is needed.
inline void scaled_nibbles(const uint8_t* bytes, int shift, float scale, float offset, Vec* w) {
    const __m512 quants = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 table = fma(quants, set(scale), set(offset));
    for (int v = 0; v < 2; ++v) {
        __m512i lanes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(bytes + 16 * v)));
        w[v] = _mm512_permutexvar_ps(_mm512_srl_epi32(lanes, _mm_cvtsi32_si128(shift)), table);
    }
}

// Twice the value of 32 e2m1 times a scale, scales[0] of the first 16 and scales[1] of the others.
inline void scaled_e2m1(const uint8_t* nibbles, const float* scales, Vec* w) {
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)nibbles));
    w[0] = _mm512_permutexvar_ps(bytes, mul(table, set(scales[0])));
    w[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), mul(table, set(scales[1])));
}

// 32 e4m3, numbers all, times a scale. Sign, exponent and significand move to where a half has them, which divides the value
// by 2^8.
inline void scaled_e4m3(const uint8_t* bytes, float scale, Vec* w) {
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)bytes));
    const __m512i halves = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16((short)0xbfff));
    const Vec factor = set(scale * 256.0f);
    w[0] = mul(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), factor);
    w[1] = mul(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), factor);
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

// GGUF blocks: 32 weights into two vectors, in order. Every weight is rounded once: fma(quant, scale, minimum).
struct BlockQ4_0 {
    static constexpr int kBytes = 18;
    static constexpr int kScales = 1;
    static void widen_scales(const uint8_t* block, float* scales) { scales[0] = float16_to_float(block); }
    static void decode(const uint8_t* block, const float* scales, Vec* w) {
        const __m512 quants = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        lookup(block + 2, mul(quants, set(scales[0])), w);
    }
    // The permutation reads the low four bits of a lane only: no mask is needed.
    static void lookup(const uint8_t* nibbles, __m512 table, Vec* w) {
        __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)nibbles));
        w[0] = _mm512_permutexvar_ps(bytes, table);
        w[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
    }
};
struct BlockQ4_1 {
    static constexpr int kBytes = 20;
    static constexpr int kScales = 2;
    static void widen_scales(const uint8_t* block, float* scales) {
        int pair;
        memcpy(&pair, block, 4);
        __m128 widened = _mm_cvtph_ps(_mm_cvtsi32_si128(pair));
        memcpy(scales, &widened, 8);
    }
    static void decode(const uint8_t* block, const float* scales, Vec* w) {
        const __m512 quants = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        BlockQ4_0::lookup(block + 4, fma(quants, set(scales[0]), set(scales[1])), w);
    }
};
struct BlockQ8_0 {
    static constexpr int kBytes = 34;
    static constexpr int kScales = 1;
    static void widen_scales(const uint8_t* block, float* scales) { BlockQ4_0::widen_scales(block, scales); }
    static void decode(const uint8_t* block, const float* scales, Vec* w) {
        const Vec scale = set(scales[0]);
        __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(block + 2)));
        __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(block + 18)));
        w[0] = mul(_mm512_cvtepi32_ps(low), scale);
        w[1] = mul(_mm512_cvtepi32_ps(high), scale);
    }
};

}  // namespace
}  // namespace tokenspeed::avx512
