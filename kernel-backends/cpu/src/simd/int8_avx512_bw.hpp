// Products in 8 bits with AVX-512 BW, whose instruction adds two products of unsigned and signed bytes in 16 bits.
// C headers only, see avx512.hpp.
#pragma once

#include "int8_avx512.hpp"

namespace tokenspeed::int8_avx512 {
namespace {

using namespace int8_avx512_lanes;

constexpr int32_t kEightBitZero = 0;  // of 8-bit quants, which are made signed before they are multiplied

// Pairs of products of one column group, in 16 bits: at most 2 * 127 * 128, so none saturates.
template <int kBits>
inline __m512i pairs(ColumnGroup w, __m512i x) {
    if constexpr (kBits == 8) {
        const __m512i quants = _mm512_xor_si512(w, _mm512_set1_epi8((char)0x80));
        const __m512i signed_x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(quants), _mm512_setzero_si512(), x);
        return _mm512_maddubs_epi16(_mm512_abs_epi8(quants), signed_x);
    }
    return _mm512_maddubs_epi16(w, x);
}

// `sums` plus the products of column groups [kBegin, kEnd) with their columns in `x`, of each row.
template <int kBits, int kBegin, int kEnd>
inline Integers dot(Integers sums, const ColumnGroup (&w)[8], const int8_t* x) {
    // Groups whose pairs fit 16 bits together: 2 * 127 * (2^bits - 1) times their number is below 2^15.
    constexpr int kRun = kBits == 8 ? 1 : 1 << (7 - kBits);
    for (int begin = kBegin; begin < kEnd; begin += kRun) {
        __m512i run = _mm512_setzero_si512();
        for (int g = begin; g < begin + kRun && g < kEnd; ++g) {
            int32_t four;
            memcpy(&four, x + 4 * g, 4);
            run = _mm512_add_epi16(run, pairs<kBits>(w[g], _mm512_set1_epi32(four)));
        }
        sums = _mm512_add_epi32(sums, _mm512_madd_epi16(run, _mm512_set1_epi16(1)));
    }
    return sums;
}

}  // namespace
}  // namespace tokenspeed::int8_avx512
