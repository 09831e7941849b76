// Weights packed for products with activations in 8 or 15 bits: one layout for every instruction set. panels.cpp packs.
//
// A panel is 16 rows, the lanes of a vector of sums; the last one is filled up with rows of zeros. A block is 32 columns of
// a panel. The blocks' quants lie one after the other, panel by panel and in the order of the columns, and so do their
// scales, apart: whoever walks some panels reads two streams from end to end.
//
// Quants are unsigned. A weight is (quant - zero) * scale or quant * scale + minimum, exactly what the GGUF block says.
// Four columns of a block are a column group: 64 bytes, of which byte 4 * r + c is column c of row r. By bits of a quant:
//   8  the 8 column groups, 512 bytes
//   4  256 bytes: column group g in the low halves of the bytes from 64 * g on, column group g + 4 in the high halves
//   5  the low four bits as above; 64 bytes whose bits g are the fifth bits of column group g
//   6  the low four bits as above; 2 * 64 bytes, of which part h has the upper two bits of column group 4 * h + i at bit 2 * i
// Scales are 16 numbers, one a row; a superblock is 8 blocks:
//   kHalf             of a block: float16 scales                                                        (Q4_0, Q5_0, Q8_0)
//   kHalfAndMinimum   of a block: float16 scales, float16 minimums                                      (Q4_1, Q5_1)
//   kBytesAndMinimum  of a superblock: float16 d, float16 e; of each of its blocks: uint8 s, uint8 m;
//                     scale d * s, minimum e * m                                                        (Q4_K, Q5_K)
//   kBytesOfHalves    of a superblock: float16 d; of each of its blocks: int8 s of the first 16 columns, int8 s of the
//                     others; scale d * s                                                               (Q6_K)
// Both take the bytes of the GGUF blocks; Q4_K and Q5_K a fortieth more, for their six-bit scales are bytes here.
#pragma once

#include "table.hpp"

// Functions are static: a copy that the linker shared between translation units could hold another set's instructions.
namespace tokenspeed {

constexpr int64_t kPanelRows = 16;
constexpr int64_t kPanelColumns = 32;
constexpr int64_t kSuperBlocks = 8;

enum class PanelScales : int32_t { kHalf, kHalfAndMinimum, kBytesAndMinimum, kBytesOfHalves };

struct PanelLayout {
    int32_t bits;  // of a quant; 0: this format is not packed
    int32_t zero;
    PanelScales scales;
};

static inline constexpr PanelLayout panel_layout(WeightFormat format) {
    switch (format) {
        case WeightFormat::kQ4_0: return {4, 8, PanelScales::kHalf};
        case WeightFormat::kQ5_0: return {5, 16, PanelScales::kHalf};
        case WeightFormat::kQ8_0: return {8, 128, PanelScales::kHalf};
        case WeightFormat::kQ4_1: return {4, 0, PanelScales::kHalfAndMinimum};
        case WeightFormat::kQ5_1: return {5, 0, PanelScales::kHalfAndMinimum};
        case WeightFormat::kQ4_K: return {4, 0, PanelScales::kBytesAndMinimum};
        case WeightFormat::kQ5_K: return {5, 0, PanelScales::kBytesAndMinimum};
        case WeightFormat::kQ6_K: return {6, 32, PanelScales::kBytesOfHalves};
        default: return {0, 0, PanelScales::kHalf};
    }
}

// Bytes of the quants of a block, and of the scales of a superblock of it.
static inline constexpr int64_t quant_bytes(int32_t bits) { return 64 * bits; }
static inline constexpr int64_t scale_bytes(PanelScales scales) {
    switch (scales) {
        case PanelScales::kHalf: return kSuperBlocks * 32;
        case PanelScales::kHalfAndMinimum: return kSuperBlocks * 64;
        case PanelScales::kBytesAndMinimum: return 64 + kSuperBlocks * 32;
        case PanelScales::kBytesOfHalves: return 32 + kSuperBlocks * 32;
    }
    return 0;
}

// A packed weight [rows, columns]. Nothing is owned.
struct Panels {
    WeightFormat format;
    int64_t rows;
    int64_t columns;
    const uint8_t* quants;
    const uint8_t* scales;
};

static inline int64_t panels_of(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

// Bytes of all quants and of all scales of a weight of a format that is packed.
static inline int64_t all_quant_bytes(WeightFormat format, int64_t rows, int64_t columns) {
    return panels_of(rows) * (columns / kPanelColumns) * quant_bytes(panel_layout(format).bits);
}
static inline int64_t all_scale_bytes(WeightFormat format, int64_t rows, int64_t columns) {
    return panels_of(rows) * (columns / kPanelColumns) * scale_bytes(panel_layout(format).scales) / kSuperBlocks;
}

// 32 columns of one token, quantised: x is about quants * scale.
struct ActivationBlock {
    int8_t quants[kPanelColumns];
    float scale;       // NaN where an x is NaN or infinite
    int32_t start[2];  // what sums of products with unsigned quants begin with: -zero times the sum of the quants; of the
                       // first and of the other 16 columns where the weight's scales are of halves, else of all and 0
    float sum;         // scale * the sum of the quants
};

// The same in 15 bits: a quant is 128 * high + low, both in signed bytes.
struct WideActivationBlock {
    int8_t high[kPanelColumns];
    int8_t low[kPanelColumns];
    float scale;
    int32_t start[2];
    float sum;
};

// Products of packed weights with quantised activations, `Block` by block; see kernels/linear_int8.hpp.
template <class Block>
struct PanelProducts {
    // Quantises tokens [begin, end) of x [tokens, columns] to their places in `out`, which has tokens * columns / 32 blocks.
    void (*quantise)(const Panels& weight, const float* x, int64_t tokens, Block* out, int64_t begin, int64_t end);
    // out[t, row] = x[t, :] . weight[row, :] (+ bias[row], where there is one) for the rows of panels [begin, end); x as
    // `quantise` leaves it, out [tokens, rows].
    void (*linear)(const Panels& weight, const float* bias, const Block* x, int64_t tokens, float* out, int64_t begin,
                   int64_t end);
};

struct Int8Products {
    PanelProducts<ActivationBlock> narrow;
    PanelProducts<WideActivationBlock> wide;
};

}  // namespace tokenspeed
