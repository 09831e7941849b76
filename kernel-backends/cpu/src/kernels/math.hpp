// Functions built on the vector type of the instruction set that includes this file (TOKENSPEED_ISA names its namespace).

#include "../table.hpp"

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

// e^x to about 1e-7 relative; 0 below -86.6 (no subnormals), infinity above 88.7, NaN for NaN.
inline Vec exponential(Vec x) {
    // The second operand of min and max survives a NaN.
    Vec clamped = max(set(-86.6f), min(set(88.8f), x));
    // Rounds to an integer by pushing the fraction out of the significand.
    const Vec magic = set(12582912.0f);
    Vec n = sub(add(mul(clamped, set(1.44269504088896341f)), magic), magic);
    Vec r = fma(n, set(-0.693359375f), clamped);
    r = fma(n, set(2.12194440e-4f), r);
    Vec p = set(1.9875691500e-4f);
    p = fma(p, r, set(1.3981999507e-3f));
    p = fma(p, r, set(8.3334519073e-3f));
    p = fma(p, r, set(4.1665795894e-2f));
    p = fma(p, r, set(1.6666665459e-1f));
    p = fma(p, r, set(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), set(1.0f));
    // 2^128 is no float: one factor of two is applied apart.
    Vec result = mul(mul(p, set(2.0f)), power_of_two(sub(n, set(1.0f))));
    return select_less(x, set(-86.6f), zero(), result);
}

// tanh(x) to about 2e-7 relative, NaN for NaN: near zero by its series, else by the exponential, where nothing cancels.
inline Vec hyperbolic_tangent(Vec x) {
    const Vec size = max(sub(zero(), x), x);
    const Vec square = mul(x, x);
    Vec p = set(-5.70498872745e-3f);
    p = fma(p, square, set(2.06390887954e-2f));
    p = fma(p, square, set(-5.37397155531e-2f));
    p = fma(p, square, set(1.33314422036e-1f));
    p = fma(p, square, set(-3.33332819422e-1f));
    const Vec near = fma(mul(p, square), x, x);
    const Vec far = sub(set(1.0f), div(set(2.0f), add(exponential(add(size, size)), set(1.0f))));
    return select_less(size, set(0.625f), near, select_less(x, zero(), sub(zero(), far), far));
}

inline float exponential(float x) {
    float lanes[kLanes];
    store(lanes, exponential(set(x)));
    return lanes[0];
}

inline float square_root(float x) { return __builtin_sqrtf(x); }

// Loaders of one element type, whole vectors and the first `count` lanes (zeros behind them).
struct Float32 {
    using Element = float;
    static Vec load(const Element* p) { return TOKENSPEED_ISA::load(p); }
    static Vec load_first(const Element* p, int64_t count) { return TOKENSPEED_ISA::load_first(p, count); }
    static void store_first(Element* p, Vec v, int64_t count) { TOKENSPEED_ISA::store_first(p, v, count); }
};
struct BFloat16 {
    using Element = uint16_t;
    static Vec load(const Element* p) { return load_bfloat16(p); }
    static Vec load_first(const Element* p, int64_t count) { return load_bfloat16_first(p, count); }
    static void store_first(Element* p, Vec v, int64_t count) { store_bfloat16_first(p, v, count); }
};
struct Float16 {
    using Element = uint16_t;
    static Vec load(const Element* p) { return load_float16(p); }
    static Vec load_first(const Element* p, int64_t count) { return load_float16_first(p, count); }
    static void store_first(Element* p, Vec v, int64_t count) { store_float16_first(p, v, count); }
};
struct E4M3 {
    using Element = uint8_t;
    static Vec load(const Element* p) { return widen_e4m3(load_bytes(p)); }
    static Vec load_first(const Element* p, int64_t count) { return widen_e4m3(load_bytes_first(p, count)); }
    static void store_first(Element* p, Vec v, int64_t count) { store_e4m3_first(p, v, count); }
};
// Those that are known to be numbers: where many are read, one look at all of them costs less than one at each.
struct E4M3Numbers {
    using Element = uint8_t;
    static Vec load(const Element* p) { return widen_e4m3_numbers(load_bytes(p)); }
    static Vec load_first(const Element* p, int64_t count) { return widen_e4m3_numbers(load_bytes_first(p, count)); }
};

}  // namespace
}  // namespace tokenspeed::TOKENSPEED_ISA
