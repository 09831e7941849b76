// Products of bfloat16 pairs (AVX-512 BF16), beside the vectors of avx512.hpp. C headers only, see there.
//
// The instruction adds two products to each of 16 float sums: for the even halves after the odd ones, each time rounded to
// nearest even, subnormals taken for zero.
#pragma once

#include "avx512.hpp"

namespace tokenspeed::avx512_bf16 {

using namespace avx512;

namespace {

using Sums = __m512;     // 16 floats
using Halves = __m512i;  // 32 bfloat16

constexpr int kHalves = 32;

inline Sums no_sum() { return _mm512_setzero_ps(); }
inline Sums add_products(Sums sums, Halves a, Halves b) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }

inline Halves load_halves(const uint16_t* p) { return _mm512_loadu_si512(p); }
// The first `count`, zeros behind them.
inline Halves load_halves_first(const uint16_t* p, int64_t count) {
    return _mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), p);
}

// 32 e4m3, exactly: exponent and significand move to where a half has them and get its bias. Numbers below the normal ones,
// which have no exponent to move, come from a table, and what is no number stays none.
inline Halves widen_e4m3_halves(__m256i bytes) {
    alignas(64) static const uint16_t kSmall[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    const __m512i wide = _mm512_cvtepi8_epi16(bytes), moved = _mm512_slli_epi16(wide, 4);
    __m512i size = _mm512_and_si512(moved, _mm512_set1_epi16(0x7f0));
    const __mmask32 none = _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(0x7f0));
    size = _mm512_add_epi16(size, _mm512_set1_epi16(120 << 7));
    const __mmask32 small = _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(0x78));
    size = _mm512_mask_permutexvar_epi16(size, small, wide, _mm512_load_si512(kSmall));
    size = _mm512_mask_mov_epi16(size, none, _mm512_set1_epi16(0x7fc0));
    return _mm512_or_si512(size, _mm512_and_si512(moved, _mm512_set1_epi16((short)0x8000)));
}
inline Halves load_e4m3_halves(const uint8_t* p) { return widen_e4m3_halves(_mm256_loadu_si256((const __m256i*)p)); }
inline Halves load_e4m3_halves_first(const uint8_t* p, int64_t count) {
    return widen_e4m3_halves(_mm256_maskz_loadu_epi8((__mmask32)((1ull << count) - 1), p));
}

// Rounds up to 32 floats to nearest even; zeros behind the first `count`. Subnormals become zero, a NaN stays one.
inline void round_halves_first(const float* from, uint16_t* to, int64_t count) {
    const uint32_t lanes = (uint32_t)((1ull << count) - 1);
    const __m512 low = _mm512_maskz_loadu_ps((__mmask16)lanes, from);
    const __m512 high = _mm512_maskz_loadu_ps((__mmask16)(lanes >> 16), from + 16);
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// One pair, 16 times.
inline Halves set_pair(const uint16_t* pair) {
    int32_t bits;
    memcpy(&bits, pair, 4);
    return _mm512_set1_epi32(bits);
}
inline Halves no_halves() { return _mm512_setzero_si512(); }
inline void store_halves(uint16_t* p, Halves halves) { _mm512_storeu_si512(p, halves); }
// The pairs without their first or their second half.
inline Halves second_halves(Halves pairs) { return _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000u)); }
inline Halves first_halves(Halves pairs) { return _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff)); }

// Two rows of 32 halves become pairs of a half of each, 16 in `low` and 16 in `high`.
inline void pair_halves(Halves first, Halves second, Halves& low, Halves& high) {
    alignas(64) static const uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                  8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i lanes = _mm512_load_si512(kLow);
    low = _mm512_permutex2var_epi16(first, lanes, second);
    high = _mm512_permutex2var_epi16(first, _mm512_add_epi16(lanes, _mm512_set1_epi16(16)), second);
}

// 16 rows of 16 pairs become 16 columns of them.
inline void transpose_pairs(Halves (&rows)[16]) {
    Halves t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
        rows[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        rows[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        rows[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        rows[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {  // now each quarter of rows[4 * r + i] is column 4 * quarter + i of four rows
        const Halves even = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0x88);
        const Halves odd = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0xdd);
        const Halves even_high = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0x88);
        const Halves odd_high = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0xdd);
        t[i] = _mm512_shuffle_i32x4(even, even_high, 0x88);
        t[8 + i] = _mm512_shuffle_i32x4(even, even_high, 0xdd);
        t[4 + i] = _mm512_shuffle_i32x4(odd, odd_high, 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(odd, odd_high, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = t[i];
}

}  // namespace
}  // namespace tokenspeed::avx512_bf16
