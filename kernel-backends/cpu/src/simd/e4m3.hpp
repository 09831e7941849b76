// An e4m3 as a float. C headers only, see avx512.hpp.
#pragma once

#include <stdint.h>
#include <string.h>

namespace tokenspeed {
namespace {

// Exponent and significand move to where a float has them, which divides the value by 2^120.
inline float e4m3_to_float(uint8_t e4m3) {
    uint32_t bits = (uint32_t)(e4m3 & 0x7f) << 20 | (uint32_t)(e4m3 & 0x80) << 24;
    float value;
    memcpy(&value, &bits, 4);
    return (e4m3 & 0x7f) == 0x7f ? __builtin_nanf("") : value * 0x1p120f;
}

}  // namespace
}  // namespace tokenspeed
