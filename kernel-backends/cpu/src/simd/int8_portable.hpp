// Panels of 16 rows in the compiler's generic vectors, for any little-endian architecture: what kernels/linear_int8.hpp is written on.
// C headers only, see avx512.hpp.
#pragma once

#include "portable.hpp"

namespace tokenspeed::int8_portable {
namespace {

// Four rows to a vector, for 16 bytes are what the least of processors has.
typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef uint32_t Word4 __attribute__((vector_size(16)));
typedef int16_t Short8 __attribute__((vector_size(16)));

// A number for each row of a panel.
struct Floats {
    Float4 part[4];
};
struct Integers {
    Int4 part[4];
};
// Unsigned quants of four columns.
struct ColumnGroup {
    Word4 part[4];
};

constexpr int kTokens = 2;
constexpr int32_t kEightBitZero = 128;  // of 8-bit quants, which are multiplied as they are

inline Floats set(float value) {
    const Float4 v = Float4{} + value;
    return {{v, v, v, v}};
}
inline Floats add(Floats a, Floats b) {
    for (int i = 0; i < 4; ++i) a.part[i] += b.part[i];
    return a;
}
inline Floats mul(Floats a, Floats b) {
    for (int i = 0; i < 4; ++i) a.part[i] *= b.part[i];
    return a;
}
// Rounded once, also where the processor cannot: the other sets' bits are promised.
inline Floats fma(Floats a, Floats b, Floats c) {
    for (int i = 0; i < 4; ++i)
        for (int lane = 0; lane < 4; ++lane)
            c.part[i][lane] = __builtin_fmaf(a.part[i][lane], b.part[i][lane], c.part[i][lane]);
    return c;
}
inline Integers broadcast(int32_t value) {
    const Int4 v = Int4{} + value;
    return {{v, v, v, v}};
}
inline Integers plus(Integers a, Integers b) {
    for (int i = 0; i < 4; ++i) a.part[i] += b.part[i];
    return a;
}
inline Integers times_128(Integers v) {
    for (int i = 0; i < 4; ++i) v.part[i] *= 128;
    return v;
}
inline Floats to_float(Integers integers) {
    Floats v;
    for (int i = 0; i < 4; ++i) v.part[i] = __builtin_convertvector(integers.part[i], Float4);
    return v;
}
inline Floats load_first(const float* p, int64_t count) {
    Floats v{};
    memcpy(&v, p, (size_t)count * sizeof(float));
    return v;
}
inline void store_first(float* p, Floats v, int64_t count) { memcpy(p, &v, (size_t)count * sizeof(float)); }

inline Floats widen_halves(const uint8_t* p) {
    Floats v;
    for (int i = 0; i < 16; ++i) v.part[i / 4][i % 4] = portable::float16_to_float(p + 2 * i);
    return v;
}
template <class Byte>
inline Floats widen(const uint8_t* p) {
    Floats v;
    for (int i = 0; i < 16; ++i) v.part[i / 4][i % 4] = (float)(Byte)p[i];
    return v;
}
inline Floats widen_unsigned(const uint8_t* p) { return widen<uint8_t>(p); }
inline Floats widen_signed(const uint8_t* p) { return widen<int8_t>(p); }

inline Word4 load_words(const uint8_t* p, int part) {
    Word4 words;
    memcpy(&words, p + 16 * part, sizeof words);
    return words;
}

// The column groups of a block.
template <int kBits>
inline void unpack(const uint8_t* quants, ColumnGroup (&w)[8]) {
    for (int g = 0; g < 8; ++g) {
        for (int i = 0; i < 4; ++i) {
            Word4& words = w[g].part[i];
            if constexpr (kBits == 8)
                words = load_words(quants + 64 * g, i);
            else
                words = load_words(quants + g % 4 * 64, i) >> (g / 4 * 4) & 0x0f0f0f0fu;
            if constexpr (kBits == 5) words |= (load_words(quants + 256, i) >> g & 0x01010101u) << 4;
            if constexpr (kBits == 6)
                words |= (load_words(quants + 256 + g / 4 * 64, i) >> (g % 4 * 2) & 0x03030303u) << 4;
        }
    }
}

// Two signed bytes, 16 bits apart in each row's word.
inline Short8 pair(int8_t low, int8_t high) {
    return (Short8)(Word4{} + ((uint32_t)(uint16_t)low | (uint32_t)(uint16_t)high << 16));
}
// The sums of both halves of each row's word.
inline Int4 halves_sum(Short8 products) { return ((Int4)((Word4)products << 16) >> 16) + ((Int4)products >> 16); }

// `sums` plus the products of column groups [kBegin, kEnd) with their columns in `x`, of each row. A product fits 16 bits.
template <int kBits, int kBegin, int kEnd>
inline Integers dot(Integers sums, const ColumnGroup (&w)[8], const int8_t* x) {
    for (int g = kBegin; g < kEnd; ++g) {
        const int8_t* columns = x + 4 * g;
        const Short8 even = pair(columns[0], columns[2]), odd = pair(columns[1], columns[3]);
        for (int i = 0; i < 4; ++i) {
            const Word4 words = w[g].part[i];
            sums.part[i] += halves_sum((Short8)(words & 0x00ff00ffu) * even);
            sums.part[i] += halves_sum((Short8)(words >> 8 & 0x00ff00ffu) * odd);
        }
    }
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
