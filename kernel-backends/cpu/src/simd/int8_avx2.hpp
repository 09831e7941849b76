// Panels of 16 rows in AVX2 (with FMA and F16C), eight rows to a vector: what kernels/linear_int8.hpp is written on.
// C headers only, see avx512.hpp.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace tokenspeed::int8_avx2 {
namespace {

// A number for each row of a panel.
struct Floats {
    __m256 half[2];
};
struct Integers {
    __m256i half[2];
};
// Unsigned quants of four columns.
struct ColumnGroup {
    __m256i half[2];
};

constexpr int kTokens = 4;
constexpr int32_t kEightBitZero = 0;  // of 8-bit quants, which are made signed before they are multiplied

inline __m256i first(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Floats set(float value) { return {{_mm256_set1_ps(value), _mm256_set1_ps(value)}}; }
inline Floats add(Floats a, Floats b) {
    return {{_mm256_add_ps(a.half[0], b.half[0]), _mm256_add_ps(a.half[1], b.half[1])}};
}
inline Floats mul(Floats a, Floats b) {
    return {{_mm256_mul_ps(a.half[0], b.half[0]), _mm256_mul_ps(a.half[1], b.half[1])}};
}
inline Floats fma(Floats a, Floats b, Floats c) {
    return {{_mm256_fmadd_ps(a.half[0], b.half[0], c.half[0]), _mm256_fmadd_ps(a.half[1], b.half[1], c.half[1])}};
}
inline Integers broadcast(int32_t value) { return {{_mm256_set1_epi32(value), _mm256_set1_epi32(value)}}; }
inline Integers plus(Integers a, Integers b) {
    return {{_mm256_add_epi32(a.half[0], b.half[0]), _mm256_add_epi32(a.half[1], b.half[1])}};
}
inline Integers times_128(Integers v) { return {{_mm256_slli_epi32(v.half[0], 7), _mm256_slli_epi32(v.half[1], 7)}}; }
inline Floats to_float(Integers integers) {
    return {{_mm256_cvtepi32_ps(integers.half[0]), _mm256_cvtepi32_ps(integers.half[1])}};
}
inline Floats load_first(const float* p, int64_t count) {
    return {{_mm256_maskload_ps(p, first(count)), _mm256_maskload_ps(p + 8, first(count - 8))}};
}
inline void store_first(float* p, Floats v, int64_t count) {
    if (count == 16) {  // masked stores are slow on some processors
        _mm256_storeu_ps(p, v.half[0]);
        _mm256_storeu_ps(p + 8, v.half[1]);
        return;
    }
    _mm256_maskstore_ps(p, first(count), v.half[0]);
    _mm256_maskstore_ps(p + 8, first(count - 8), v.half[1]);
}

inline Floats widen_halves(const uint8_t* p) {
    return {{_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))}};
}
inline Floats widen_unsigned(const uint8_t* p) {
    return to_float({{_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
                      _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))}});
}
inline Floats widen_signed(const uint8_t* p) {
    return to_float({{_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
                      _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))}});
}

inline __m256i load_half(const uint8_t* p, int half) { return _mm256_loadu_si256((const __m256i*)p + half); }

// bits & mask of `more`, moved up by `by` (down where negative), on top of `low`.
inline __m256i with_bits(__m256i low, __m256i more, int by, int mask) {
    const __m256i moved = by < 0 ? _mm256_srli_epi16(more, -by) : _mm256_slli_epi16(more, by);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8((char)mask)));
}

// The column groups of a block; 8-bit quants as signed ones.
template <int kBits>
inline void unpack(const uint8_t* quants, ColumnGroup (&w)[8]) {
    for (int half = 0; half < 2; ++half) {
        if constexpr (kBits == 8) {
            for (int g = 0; g < 8; ++g)
                w[g].half[half] = _mm256_xor_si256(load_half(quants + 64 * g, half), _mm256_set1_epi8((char)0x80));
        } else {
            const __m256i low = _mm256_set1_epi8(15);
            for (int g = 0; g < 4; ++g) {
                const __m256i both = load_half(quants + 64 * g, half);
                w[g].half[half] = _mm256_and_si256(both, low);
                w[g + 4].half[half] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
            }
#pragma GCC unroll 8
            for (int g = 0; g < 8; ++g) {
                __m256i& group = w[g].half[half];
                if constexpr (kBits == 5) group = with_bits(group, load_half(quants + 256, half), 4 - g, 16);
                if constexpr (kBits == 6)
                    group = with_bits(group, load_half(quants + 256 + g / 4 * 64, half), 4 - g % 4 * 2, 48);
            }
        }
    }
}

// Pairs of products of one column group, in 16 bits: at most 2 * 127 * 128, so none saturates.
template <int kBits>
inline __m256i pairs(__m256i w, __m256i x) {
    if constexpr (kBits == 8) return _mm256_maddubs_epi16(_mm256_sign_epi8(w, w), _mm256_sign_epi8(x, w));
    return _mm256_maddubs_epi16(w, x);
}

// `sums` plus the products of column groups [kBegin, kEnd) with their columns in `x`, of each row.
template <int kBits, int kBegin, int kEnd>
inline Integers dot(Integers sums, const ColumnGroup (&w)[8], const int8_t* x) {
    // Groups whose pairs fit 16 bits together: 2 * 127 * (2^bits - 1) times their number is below 2^15.
    constexpr int kRun = kBits == 8 ? 1 : 1 << (7 - kBits);
    for (int begin = kBegin; begin < kEnd; begin += kRun) {
        __m256i run[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        for (int g = begin; g < begin + kRun && g < kEnd; ++g) {
            int32_t four;
            memcpy(&four, x + 4 * g, 4);
            for (int half = 0; half < 2; ++half)
                run[half] = _mm256_add_epi16(run[half], pairs<kBits>(w[g].half[half], _mm256_set1_epi32(four)));
        }
        for (int half = 0; half < 2; ++half)
            sums.half[half] = _mm256_add_epi32(sums.half[half], _mm256_madd_epi16(run[half], _mm256_set1_epi16(1)));
    }
    return sums;
}

// The bits of the largest magnitude of 32 floats, as an integer: a NaN's are the largest of all.
inline uint32_t largest_magnitude(const float* x) {
    __m256i largest = _mm256_setzero_si256();
    for (int v = 0; v < 4; ++v) {
        const __m256i bits = _mm256_loadu_si256((const __m256i*)(x + 8 * v));
        largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    }
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline int32_t sum_of(__m256i v) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
// Sixteen integers that fit eight bits, as bytes.
inline void store_bytes(int8_t* p, __m256i low, __m256i high) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
inline __m256i rounded(const float* x, float factor) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(factor)));
}
// 32 floats times `factor`, rounded to nearest even; the sums of the first 16 and of the others.
inline void round_quants(const float* x, float factor, int8_t* quants, int32_t (&sums)[2]) {
    for (int half = 0; half < 2; ++half) {
        const __m256i first = rounded(x + 16 * half, factor), other = rounded(x + 16 * half + 8, factor);
        store_bytes(quants + 16 * half, first, other);
        sums[half] = sum_of(_mm256_add_epi32(first, other));
    }
}
// The same where a quant is 128 * high + low, low from -64 to 63.
inline void round_wide_quants(const float* x, float factor, int8_t* high, int8_t* low, int32_t (&sums)[2]) {
    for (int half = 0; half < 2; ++half) {
        __m256i whole[2], upper[2], lower[2];
        for (int i = 0; i < 2; ++i) {
            whole[i] = rounded(x + 16 * half + 8 * i, factor);
            upper[i] = _mm256_srai_epi32(_mm256_add_epi32(whole[i], _mm256_set1_epi32(64)), 7);
            lower[i] = _mm256_sub_epi32(whole[i], _mm256_slli_epi32(upper[i], 7));
        }
        store_bytes(high + 16 * half, upper[0], upper[1]);
        store_bytes(low + 16 * half, lower[0], lower[1]);
        sums[half] = sum_of(_mm256_add_epi32(whole[0], whole[1]));
    }
}

}  // namespace
}  // namespace tokenspeed::int8_avx2
