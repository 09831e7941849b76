// Panels of 16 rows in the compiler's generic vectors, for any architecture: what kernels/linear_int8.hpp is written on.
// C headers only, see avx512.hpp.
#pragma once

#include "portable.hpp"

namespace tokenspeed::int8_portable {
namespace {

typedef float Floats __attribute__((vector_size(64)));  // a number for each row of a panel
typedef int32_t Integers __attribute__((vector_size(64)));
typedef uint8_t ColumnGroup __attribute__((vector_size(64)));  // unsigned quants of four columns
typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef int8_t Signed16 __attribute__((vector_size(16)));

constexpr int kTokens = 2;
constexpr int32_t kEightBitZero = 128;  // of 8-bit quants, which are multiplied as they are

inline Floats set(float value) { return Floats{} + value; }
inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats mul(Floats a, Floats b) { return a * b; }
// Rounded once, also where the processor cannot: the other sets' bits are promised.
inline Floats fma(Floats a, Floats b, Floats c) {
    Floats r;
    for (int i = 0; i < 16; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
}
inline Integers broadcast(int32_t value) { return Integers{} + value; }
inline Integers plus(Integers a, Integers b) { return a + b; }
inline Integers times_128(Integers v) { return v * 128; }
inline Floats to_float(Integers integers) { return __builtin_convertvector(integers, Floats); }
inline Floats load_first(const float* p, int64_t count) {
    Floats v{};
    memcpy(&v, p, (size_t)count * sizeof(float));
    return v;
}
inline void store_first(float* p, Floats v, int64_t count) { memcpy(p, &v, (size_t)count * sizeof(float)); }

inline Floats widen_halves(const uint8_t* p) {
    Floats v;
    for (int i = 0; i < 16; ++i) v[i] = portable::float16_to_float(p + 2 * i);
    return v;
}
template <class Bytes>
inline Floats widen(const uint8_t* p) {
    Bytes bytes;
    memcpy(&bytes, p, 16);
    return __builtin_convertvector(bytes, Floats);
}
inline Floats widen_unsigned(const uint8_t* p) { return widen<Bytes16>(p); }
inline Floats widen_signed(const uint8_t* p) { return widen<Signed16>(p); }

inline ColumnGroup load_group(const uint8_t* p) {
    ColumnGroup group;
    memcpy(&group, p, sizeof group);
    return group;
}

// The column groups of a block.
template <int kBits>
inline void unpack(const uint8_t* quants, ColumnGroup (&w)[8]) {
    for (int g = 0; g < 8; ++g) {
        if constexpr (kBits == 8)
            w[g] = load_group(quants + 64 * g);
        else
            w[g] = (load_group(quants + g % 4 * 64) >> (uint8_t)(g / 4 * 4)) & 15;
        if constexpr (kBits == 5) w[g] |= ((load_group(quants + 256) >> (uint8_t)g) & 1) << 4;
        if constexpr (kBits == 6) w[g] |= ((load_group(quants + 256 + g / 4 * 64) >> (uint8_t)(g % 4 * 2)) & 3) << 4;
    }
}

// `sums` plus the products of column groups [kBegin, kEnd) with their columns in `x`, of each row.
template <int kBits, int kBegin, int kEnd>
inline Integers dot(Integers sums, const ColumnGroup (&w)[8], const int8_t* x) {
    for (int g = kBegin; g < kEnd; ++g)
        for (int row = 0; row < 16; ++row)
            for (int c = 0; c < 4; ++c) sums[row] += (int32_t)w[g][4 * row + c] * x[4 * g + c];
    return sums;
}

// The bits of the largest magnitude of 32 floats, as an integer: a NaN's are the largest of all.
inline uint32_t largest_magnitude(const float* x) {
    uint32_t largest = 0;
    for (int i = 0; i < 32; ++i) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}
// To the nearest integer, of two the even one, for magnitudes below 2^22.
inline int32_t rounded(float value) {
    const float magic = 12582912.0f;  // pushes the fraction out of the significand
    return (int32_t)((value + magic) - magic);
}
// 32 floats times `factor`, rounded to nearest even; the sums of the first 16 and of the others.
inline void round_quants(const float* x, float factor, int8_t* quants, int32_t (&sums)[2]) {
    for (int i = 0; i < 32; ++i) {
        const int32_t whole = rounded(x[i] * factor);
        quants[i] = (int8_t)whole;
        sums[i / 16] += whole;
    }
}
// The same where a quant is 128 * high + low, low from -64 to 63.
inline void round_wide_quants(const float* x, float factor, int8_t* high, int8_t* low, int32_t (&sums)[2]) {
    for (int i = 0; i < 32; ++i) {
        const int32_t whole = rounded(x[i] * factor);
        high[i] = (int8_t)((whole + 64) >> 7);
        low[i] = (int8_t)(whole - high[i] * 128);
        sums[i / 16] += whole;
    }
}

}  // namespace
}  // namespace tokenspeed::int8_portable
