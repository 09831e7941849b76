// Panels of 16 rows in AVX-512 (F, BW, DQ, VL): what kernels/linear_int8.hpp is written on, but for the products, which the
// file that includes this one has. C headers only, see avx512.hpp.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace tokenspeed::int8_avx512_lanes {
namespace {

using Floats = __m512;       // a number for each row of a panel
using Integers = __m512i;
using ColumnGroup = __m512i;  // unsigned quants of four columns

constexpr int kTokens = 12;  // of a tile: their sums, the unpacked quants of a block and what they meet fill the registers

inline __mmask16 first(int64_t count) { return (__mmask16)((1u << count) - 1u); }
inline Floats set(float value) { return _mm512_set1_ps(value); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Integers broadcast(int32_t value) { return _mm512_set1_epi32(value); }
inline Integers plus(Integers a, Integers b) { return _mm512_add_epi32(a, b); }
inline Integers times_128(Integers v) { return _mm512_slli_epi32(v, 7); }
inline Floats to_float(Integers integers) { return _mm512_cvtepi32_ps(integers); }
inline Floats load_first(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(first(count), p); }
inline void store_first(float* p, Floats v, int64_t count) { _mm512_mask_storeu_ps(p, first(count), v); }

inline Floats widen_halves(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Floats widen_unsigned(const uint8_t* p) {
    return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline Floats widen_signed(const uint8_t* p) { return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }

// bits & mask of `more`, moved up by `by` (down where negative), on top of `low`.
inline ColumnGroup with_bits(ColumnGroup low, __m512i more, int by, int mask) {
    const __m512i moved = by < 0 ? _mm512_srli_epi16(more, -by) : _mm512_slli_epi16(more, by);
    return _mm512_ternarylogic_epi32(low, moved, _mm512_set1_epi8((char)mask), 0xf8);  // low | (moved & mask)
}

// The column groups of a block.
template <int kBits>
inline void unpack(const uint8_t* quants, ColumnGroup (&w)[8]) {
    if constexpr (kBits == 8) {
        for (int g = 0; g < 8; ++g) w[g] = _mm512_loadu_si512(quants + 64 * g);
    } else {
        const __m512i low = _mm512_set1_epi8(15);
        for (int g = 0; g < 4; ++g) {
            const __m512i both = _mm512_loadu_si512(quants + 64 * g);
            w[g] = _mm512_and_si512(both, low);
            w[g + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            if constexpr (kBits == 5) w[g] = with_bits(w[g], _mm512_loadu_si512(quants + 256), 4 - g, 16);
            if constexpr (kBits == 6)
                w[g] = with_bits(w[g], _mm512_loadu_si512(quants + 256 + g / 4 * 64), 4 - g % 4 * 2, 48);
        }
    }
}

// The bits of the largest magnitude of 32 floats, as an integer: a NaN's are the largest of all.
inline uint32_t largest_magnitude(const float* x) {
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    const __m512i low = _mm512_and_si512(_mm512_loadu_si512(x), mask);
    const __m512i high = _mm512_and_si512(_mm512_loadu_si512(x + 16), mask);
    return _mm512_reduce_max_epu32(_mm512_max_epu32(low, high));
}
// 32 floats times `factor`, rounded to nearest even; the sums of the first 16 and of the others.
inline void round_quants(const float* x, float factor, int8_t* quants, int32_t (&sums)[2]) {
    for (int half = 0; half < 2; ++half) {
        const __m512i rounded = _mm512_cvtps_epi32(mul(_mm512_loadu_ps(x + 16 * half), set(factor)));
        _mm_storeu_si128((__m128i*)(quants + 16 * half), _mm512_cvtepi32_epi8(rounded));
        sums[half] = _mm512_reduce_add_epi32(rounded);
    }
}

// The same where a quant is 128 * high + low, low from -64 to 63.
inline void round_wide_quants(const float* x, float factor, int8_t* high, int8_t* low, int32_t (&sums)[2]) {
    for (int half = 0; half < 2; ++half) {
        const __m512i rounded = _mm512_cvtps_epi32(mul(_mm512_loadu_ps(x + 16 * half), set(factor)));
        const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(rounded, _mm512_set1_epi32(64)), 7);
        const __m512i lower = _mm512_sub_epi32(rounded, times_128(upper));
        _mm_storeu_si128((__m128i*)(high + 16 * half), _mm512_cvtepi32_epi8(upper));
        _mm_storeu_si128((__m128i*)(low + 16 * half), _mm512_cvtepi32_epi8(lower));
        sums[half] = _mm512_reduce_add_epi32(rounded);
    }
}

}  // namespace
}  // namespace tokenspeed::int8_avx512_lanes
