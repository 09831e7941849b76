// Products in 8 bits with AVX-512 VNNI, whose instruction takes unsigned times signed bytes. C headers only, see avx512.hpp.
#pragma once

#include "int8_avx512.hpp"

namespace tokenspeed::int8_avx512_vnni {
namespace {

using namespace int8_avx512_lanes;

constexpr int32_t kEightBitZero = 128;  // of 8-bit quants, which are multiplied as they are

// `sums` plus the products of column groups [kBegin, kEnd) with their columns in `x`, of each row.
template <int kBits, int kBegin, int kEnd>
inline Integers dot(Integers sums, const ColumnGroup (&w)[8], const int8_t* x) {
    for (int g = kBegin; g < kEnd; ++g) {
        int32_t four;
        memcpy(&four, x + 4 * g, 4);
        sums = _mm512_dpbusd_epi32(sums, w[g], _mm512_set1_epi32(four));
    }
    return sums;
}

}  // namespace
}  // namespace tokenspeed::int8_avx512_vnni
