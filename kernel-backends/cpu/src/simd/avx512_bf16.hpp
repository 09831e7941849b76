// Products of bfloat16 pairs (AVX-512 BF16), beside the vectors of avx512.hpp. C headers only, see there.
//
// The instruction adds two products to each of 16 float sums: for the even halves after the odd ones, each time rounded to
// nearest even, subnormals taken for zero.
#pragma once

#include "avx512.hpp"

namespace tokenspeed::avx512_bf16 {
namespace {

using avx512::sum_four;
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

// Rounds up to 32 floats to nearest even; zeros behind the first `count`. Subnormals become zero, a NaN stays one.
inline void round_halves_first(const float* from, uint16_t* to, int64_t count) {
    const uint32_t lanes = (uint32_t)((1ull << count) - 1);
    const __m512 low = _mm512_maskz_loadu_ps((__mmask16)lanes, from);
    const __m512 high = _mm512_maskz_loadu_ps((__mmask16)(lanes >> 16), from + 16);
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

}  // namespace
}  // namespace tokenspeed::avx512_bf16
