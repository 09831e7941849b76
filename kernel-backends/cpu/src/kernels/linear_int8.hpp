// out = x . weight^T with weights in panels (../panels.hpp) and x in 8 or 15 bits.
//
// A tile is one panel against up to kTokens tokens. Of each block the products are summed in integers, exactly; then each
// row's integer is one float, times the weight's scale times the token's, added to the row's sum by fused multiply-add,
// a minimum before it. The blocks come in order, whatever the batch, and no sum crosses lanes: a row's result has the same
// bits in any batch, in any panel, and on every instruction set.

#include "../panels.hpp"

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

constexpr int64_t kFewTokens = 32;               // up to here a panel meets all tokens before the next one is read;
constexpr int64_t kCachedBytes = 384 * 1024;     // beyond, panels of this size stay in the second-level cache while they do
constexpr int64_t kPrefetchBytes = 8 * 1024;     // how far ahead quants are asked for, into that cache

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Tokens are cut into groups of nearly equal size; group g begins with the token first_token(g). A group's activations lie
// together, block by block: x[block][token of the group].
inline int64_t groups_of(int64_t tokens) { return (tokens + kTokens - 1) / kTokens; }
inline int64_t first_token(int64_t group, int64_t tokens) { return tokens * group / groups_of(tokens); }

// Quants at most, and the products of a block.
constexpr float kNarrowLevels = 127.0f;
constexpr float kWideLevels = 127.0f * 128.0f;

inline void round_block(const float* x, float factor, ActivationBlock* out, int32_t (&sums)[2]) {
    round_quants(x, factor, out->quants, sums);
}
inline void round_block(const float* x, float factor, WideActivationBlock* out, int32_t (&sums)[2]) {
    round_wide_quants(x, factor, out->high, out->low, sums);
}

template <int kBits, int kBegin, int kEnd>
inline Integers products(int32_t start, const ColumnGroup (&w)[8], const ActivationBlock& x) {
    return dot<kBits, kBegin, kEnd>(broadcast(start), w, x.quants);
}
template <int kBits, int kBegin, int kEnd>
inline Integers products(int32_t start, const ColumnGroup (&w)[8], const WideActivationBlock& x) {
    const Integers high = dot<kBits, kBegin, kEnd>(broadcast(0), w, x.high);
    return dot<kBits, kBegin, kEnd>(plus(times_128(high), broadcast(start)), w, x.low);
}

// Quantises 32 columns of a token. Where one is NaN or infinite the scale is NaN, and with it every result of the token; where
// all are below 2^-100 they are taken for zero.
template <class Block>
inline void quantise_block(const float* x, int32_t zero, bool halves, Block* out) {
    constexpr float kLevels = sizeof(Block) == sizeof(ActivationBlock) ? kNarrowLevels : kWideLevels;
    const uint32_t bits = largest_magnitude(x);
    float largest;
    memcpy(&largest, &bits, 4);
    int32_t sums[2] = {0, 0};
    if (largest >= 0x1p-100f && bits < 0x7f800000u) {
        round_block(x, kLevels / largest, out, sums);
        out->scale = largest / kLevels;
    } else {
        memset(out, 0, sizeof *out);
        out->scale = bits < 0x7f800000u ? 0.0f : __builtin_nanf("");
    }
    out->start[0] = -zero * (halves ? sums[0] : sums[0] + sums[1]);
    out->start[1] = halves ? -zero * sums[1] : 0;
    out->sum = out->scale * (float)(sums[0] + sums[1]);
}

template <class Block>
void quantise(const Panels& weight, const float* x, int64_t tokens, Block* out, int64_t begin, int64_t end) {
    const PanelLayout layout = panel_layout(weight.format);
    const int32_t zero = layout.bits == 8 ? kEightBitZero : layout.zero;
    const bool halves = layout.scales == PanelScales::kBytesOfHalves;
    const int64_t blocks = weight.columns / kPanelColumns;
    for (int64_t group = 0; group < groups_of(tokens); ++group) {
        const int64_t first = first_token(group, tokens), behind = first_token(group + 1, tokens);
        for (int64_t t = begin > first ? begin : first; t < smaller(end, behind); ++t) {
            const float* from = x + t * weight.columns;
            Block* to = out + first * blocks + (t - first);
            for (int64_t block = 0; block < blocks; ++block)
                quantise_block(from + block * kPanelColumns, zero, halves, to + block * (behind - first));
        }
    }
}

// The scales of one block: `scale`, and `second`, the minimum or the scale of the other 16 columns.
struct BlockScales {
    Floats scale;
    Floats second;
};

// The scales of block `block` of a panel whose scales begin at `p`.
template <PanelScales kScales>
inline BlockScales load_scales(const uint8_t* p, int64_t block) {
    if constexpr (kScales == PanelScales::kHalf) {
        const Floats scale = widen_halves(p + block * 32);
        return {scale, scale};
    } else if constexpr (kScales == PanelScales::kHalfAndMinimum) {
        return {widen_halves(p + block * 64), widen_halves(p + block * 64 + 32)};
    } else {
        p += block / kSuperBlocks * scale_bytes(kScales);
        const int64_t at = block % kSuperBlocks * 32;
        if constexpr (kScales == PanelScales::kBytesAndMinimum)
            return {mul(widen_halves(p), widen_unsigned(p + 64 + at)), mul(widen_halves(p + 32), widen_unsigned(p + 80 + at))};
        else
            return {mul(widen_halves(p), widen_signed(p + 32 + at)), mul(widen_halves(p), widen_signed(p + 48 + at))};
    }
}

// `sums` plus the products of one block.
template <int kBits, PanelScales kScales, class Block>
inline Floats add_block(Floats sums, const ColumnGroup (&w)[8], const BlockScales& scales, const Block& x) {
    if constexpr (kScales == PanelScales::kBytesOfHalves) {
        const Floats first = to_float(products<kBits, 0, 4>(x.start[0], w, x));
        const Floats other = to_float(products<kBits, 4, 8>(x.start[1], w, x));
        return fma(fma(other, scales.second, mul(first, scales.scale)), set(x.scale), sums);
    } else {
        if constexpr (kScales != PanelScales::kHalf) sums = fma(scales.second, set(x.sum), sums);
        const Floats whole = to_float(products<kBits, 0, 8>(x.start[0], w, x));
        return fma(whole, mul(scales.scale, set(x.scale)), sums);
    }
}

// One call's arguments.
struct Call {
    const Panels& weight;
    const float* bias;
    float* out;
};

// A panel against the Tokens tokens from `token` on, whose activations begin at `x`.
template <int kBits, PanelScales kScales, int kCount, class Block>
void multiply_tile(const Call& call, int64_t panel, const Block* x, int64_t token) {
    const int64_t blocks = call.weight.columns / kPanelColumns;
    const uint8_t* quants = call.weight.quants + panel * blocks * quant_bytes(kBits);
    const uint8_t* scales = call.weight.scales + panel * blocks * scale_bytes(kScales) / kSuperBlocks;
    Floats sums[kCount];
    for (int t = 0; t < kCount; ++t) sums[t] = set(0.0f);
    for (int64_t block = 0; block < blocks; ++block) {
        const uint8_t* here = quants + block * quant_bytes(kBits);
        for (int line = 0; line < kBits; ++line) __builtin_prefetch(here + kPrefetchBytes + 64 * line, 0, 2);
        ColumnGroup w[8];
        unpack<kBits>(here, w);
        const BlockScales of_block = load_scales<kScales>(scales, block);
        for (int t = 0; t < kCount; ++t) sums[t] = add_block<kBits, kScales>(sums[t], w, of_block, x[block * kCount + t]);
    }
    const int64_t row = panel * kPanelRows;
    const int64_t rows = smaller(kPanelRows, call.weight.rows - row);
    for (int t = 0; t < kCount; ++t) {
        const Floats sum = call.bias ? add(sums[t], load_first(call.bias + row, rows)) : sums[t];
        store_first(call.out + (token + t) * call.weight.rows + row, sum, rows);
    }
}

// multiply_tile for a number of tokens that is known at run time.
template <int kBits, PanelScales kScales, int kCount, class Block>
void multiply(int64_t count, const Call& call, int64_t panel, const Block* x, int64_t token) {
    if constexpr (kCount > 0) {
        if (count == kCount) return multiply_tile<kBits, kScales, kCount>(call, panel, x, token);
        multiply<kBits, kScales, kCount - 1>(count, call, panel, x, token);
    }
}

template <int kBits, PanelScales kScales, class Block>
void multiply_panels(const Call& call, const Block* x, int64_t tokens, int64_t begin, int64_t end) {
    const int64_t blocks = call.weight.columns / kPanelColumns;
    const int64_t cached = kCachedBytes / (blocks * quant_bytes(kBits));
    const int64_t step = tokens <= kFewTokens || cached < 1 ? 1 : cached;
    const uint8_t* first_quants = call.weight.quants + begin * blocks * quant_bytes(kBits);
    for (int64_t at = 0; at < kPrefetchBytes; at += 64) __builtin_prefetch(first_quants + at, 0, 2);
    for (int64_t panel = begin; panel < end; panel += step) {
        for (int64_t group = 0; group < groups_of(tokens); ++group) {
            const int64_t first = first_token(group, tokens), count = first_token(group + 1, tokens) - first;
            for (int64_t p = panel; p < smaller(panel + step, end); ++p)
                multiply<kBits, kScales, kTokens>(count, call, p, x + first * blocks, first);
        }
    }
}

template <class Block>
void linear_panels(const Panels& weight, const float* bias, const Block* x, int64_t tokens, float* out, int64_t begin,
                   int64_t end) {
    const Call call{weight, bias, out};
    switch (weight.format) {
        case WeightFormat::kQ4_0: return multiply_panels<4, PanelScales::kHalf>(call, x, tokens, begin, end);
        case WeightFormat::kQ5_0: return multiply_panels<5, PanelScales::kHalf>(call, x, tokens, begin, end);
        case WeightFormat::kQ8_0: return multiply_panels<8, PanelScales::kHalf>(call, x, tokens, begin, end);
        case WeightFormat::kQ4_1: return multiply_panels<4, PanelScales::kHalfAndMinimum>(call, x, tokens, begin, end);
        case WeightFormat::kQ5_1: return multiply_panels<5, PanelScales::kHalfAndMinimum>(call, x, tokens, begin, end);
        case WeightFormat::kQ4_K: return multiply_panels<4, PanelScales::kBytesAndMinimum>(call, x, tokens, begin, end);
        case WeightFormat::kQ5_K: return multiply_panels<5, PanelScales::kBytesAndMinimum>(call, x, tokens, begin, end);
        case WeightFormat::kQ6_K: return multiply_panels<6, PanelScales::kBytesOfHalves>(call, x, tokens, begin, end);
        default: return;  // not packed
    }
}

}  // namespace

extern const Int8Products kProducts;
const Int8Products kProducts = {{quantise, linear_panels}, {quantise, linear_panels}};

}  // namespace tokenspeed::TOKENSPEED_ISA
