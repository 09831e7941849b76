// out = x . weight^T with weights read where they lie.
//
// Whatever the batch, an output is one vector accumulator that takes the columns in order, kLanes at a time, by fused
// multiply-add, and is then summed over its lanes by one fixed tree. Both paths below keep to that, so a row's result has the
// same bits alone, in a batch of four or of four hundred. Weights are widened to float32 exactly the same way in both.

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

constexpr int64_t kBlock = 32;                       // columns handled at a time
constexpr int kVectors = (int)(kBlock / kLanes);
constexpr int kRows = 4;                             // weight rows of one register tile
constexpr int64_t kDecodedBytes = 192 * 1024;        // of widened weights kept in the second-level cache

// A format is a sequence of blocks of kParts * kBlock columns. `widen_scales` widens the scales of a block, `decode` one of its
// parts, kBlock columns, with them.

struct NoScales {};

// Dense elements seen as blocks of 32.
template <class Type>
struct Dense {
    static constexpr int kBytes = (int)(kBlock * sizeof(typename Type::Element));
    static constexpr int kParts = 1;
    static constexpr bool kHasTail = true;
    static constexpr bool kBroadcasts = false;
    using Scales = NoScales;
    static void widen_scales(const uint8_t*, Scales&) {}
    static const typename Type::Element* elements(const uint8_t* p) { return (const typename Type::Element*)p; }
    static void decode(const uint8_t* block, int, const Scales&, Vec* w) {
        for (int v = 0; v < kVectors; ++v) w[v] = Type::load(elements(block) + v * kLanes);
    }
    static Vec tail(const uint8_t* block, int64_t offset, int64_t count) {
        return Type::load_first(elements(block) + offset, count);
    }
};
template <class Block>
struct Quantised {
    static constexpr int kBytes = Block::kBytes;
    static constexpr int kParts = 1;
    static constexpr bool kHasTail = false;
    static constexpr bool kBroadcasts = true;
    struct Scales {
        float values[2];
    };
    static void widen_scales(const uint8_t* block, Scales& scales) { Block::widen_scales(block, scales.values); }
    static void decode(const uint8_t* block, int, const Scales& scales, Vec* w) {
        Block::decode(block, scales.values, w);
    }
    static Vec tail(const uint8_t*, int64_t, int64_t) { return zero(); }
};

// Makes the compiler store the scales and load them again: a broadcast from memory is free, where one from a register
// takes the shuffle unit that the unpacking waits for.
template <class Array>
inline void keep_in_memory(Array& array) {
    asm volatile("" : "+m"(array));
}

// A tile's rows are short streams side by side, which the processor's own prefetcher loses at every row's end. The rows
// of all tiles are one stream, though: while a tile is worked on, the one after it is asked for, line by line; into the
// first-level cache where two tiles fit it.
constexpr int64_t kPrefetchBeyond = 4096;
constexpr int64_t kNearTileBytes = 8192;

template <int Bytes>
inline void prefetch(const uint8_t* p, bool near) {
    for (int offset = 0; offset < Bytes; offset += 64) {
        if (near)
            __builtin_prefetch(p + offset, 0, 3);
        else
            __builtin_prefetch(p + offset, 0, 2);
    }
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

inline void write_rows(const Weight& weight, const float* sums, float* out, int64_t row, int64_t count) {
    for (int64_t r = 0; r < count; ++r) out[row + r] = weight.bias ? sums[r] + weight.bias[row + r] : sums[r];
}

// Adds the products of one part of a block to the sums of a tile.
template <class Format, int TileRows, int Tokens>
inline void add_part(const uint8_t* const (&base)[TileRows], int64_t block, int part,
                     const typename Format::Scales (&scales)[TileRows], const float* inputs, int64_t columns,
                     Vec (&sums)[TileRows][Tokens]) {
    for (int r = 0; r < TileRows; ++r) {
        Vec w[kVectors];
        Format::decode(base[r] + block * Format::kBytes, part, scales[r], w);
        for (int v = 0; v < kVectors; ++v)
            for (int t = 0; t < Tokens; ++t)
                sums[r][t] = fma(w[v], load(inputs + t * columns + v * kLanes), sums[r][t]);
    }
}

// Few tokens: each weight goes from its packed form through registers once.
template <class Format, int Tokens>
void linear_direct(const Weight& weight, const float* x, float* out, int64_t begin, int64_t end) {
    constexpr int kTileRows = Tokens <= kLinearTokens ? kRows : kRows / 2;  // what the registers hold
    const int64_t columns = weight.columns;
    const int64_t blocks = columns / (kBlock * Format::kParts);
    for (int64_t row = begin; row < end; row += kTileRows) {
        const uint8_t* base[kTileRows];
        // Past the last row the tile reads that row again; the sums are not written.
        for (int r = 0; r < kTileRows; ++r) base[r] = weight.data + smaller(row + r, end - 1) * weight.row_bytes;
        const uint8_t* ahead = base[0] + kTileRows * weight.row_bytes + kPrefetchBeyond;
        const bool near = kTileRows * weight.row_bytes <= kNearTileBytes;
        Vec sums[kTileRows][Tokens];
        for (int r = 0; r < kTileRows; ++r)
            for (int t = 0; t < Tokens; ++t) sums[r][t] = zero();
        for (int64_t block = 0; block < blocks; ++block) {
            prefetch<kTileRows * Format::kBytes>(ahead + block * kTileRows * Format::kBytes, near);
            typename Format::Scales scales[kTileRows];
            for (int r = 0; r < kTileRows; ++r) Format::widen_scales(base[r] + block * Format::kBytes, scales[r]);
            if constexpr (Tokens == 1 && Format::kBroadcasts) keep_in_memory(scales);
            const float* inputs = x + block * Format::kParts * kBlock;
            if constexpr (Tokens == 1) {  // unrolled, a part's shifts are constants, and parts that share bytes load them once
#pragma GCC unroll 8
                for (int part = 0; part < Format::kParts; ++part)
                    add_part<Format>(base, block, part, scales, inputs + part * kBlock, columns, sums);
            } else {
                for (int part = 0; part < Format::kParts; ++part)
                    add_part<Format>(base, block, part, scales, inputs + part * kBlock, columns, sums);
            }
        }
        if constexpr (Format::kHasTail) {
            for (int64_t column = blocks * kBlock; column < columns; column += kLanes) {
                const int64_t count = smaller(kLanes, columns - column);
                for (int r = 0; r < kTileRows; ++r) {
                    Vec w = Format::tail(base[r] + blocks * Format::kBytes, column - blocks * kBlock, count);
                    for (int t = 0; t < Tokens; ++t)
                        sums[r][t] = fma(w, load_first(x + t * columns + column, count), sums[r][t]);
                }
            }
        }
        for (int t = 0; t < Tokens; ++t) {
            float four[4];
            const Vec third = kTileRows > 2 ? sums[kTileRows - 2][t] : zero();
            const Vec fourth = kTileRows > 2 ? sums[kTileRows - 1][t] : zero();
            sum_four(sums[0][t], sums[1][t], third, fourth, four);
            write_rows(weight, four, out + t * weight.rows, row, smaller(kTileRows, end - row));
        }
    }
}

template <class Format, int Tokens>
void linear_few(const Weight& weight, const float* x, int64_t tokens, float* out, int64_t begin, int64_t end) {
    if constexpr (Tokens > 0) {
        if (tokens == Tokens) return linear_direct<Format, Tokens>(weight, x, out, begin, end);
        linear_few<Format, Tokens - 1>(weight, x, tokens, out, begin, end);
    }
}

inline int64_t padded_columns(const Weight& weight) { return (weight.columns + kLanes - 1) / kLanes * kLanes; }

// Elements from one widened row to the next: a line more than the columns take, because rows a power of two apart would
// share a few sets of the first-level cache.
inline int64_t widened_stride(const Weight& weight) { return padded_columns(weight) + 16; }

// Weight rows that are widened together: a multiple of kRows.
inline int64_t decoded_rows(const Weight& weight) {
    int64_t rows = kDecodedBytes / (padded_columns(weight) * 4) / kRows * kRows;
    return rows < kRows ? kRows : (rows > 64 ? 64 : rows);
}

int64_t linear_scratch(const Weight& weight) { return decoded_rows(weight) * widened_stride(weight) * 4; }

template <class Format>
void decode_columns(const Weight& weight, int64_t row, float* out, bool pad) {
    const uint8_t* data = weight.data + row * weight.row_bytes;
    const int64_t blocks = weight.columns / (kBlock * Format::kParts);
    for (int64_t block = 0; block < blocks; ++block) {
        typename Format::Scales scales;
        Format::widen_scales(data + block * Format::kBytes, scales);
        for (int part = 0; part < Format::kParts; ++part) {
            Vec w[kVectors];
            Format::decode(data + block * Format::kBytes, part, scales, w);
            for (int v = 0; v < kVectors; ++v) store(out + (block * Format::kParts + part) * kBlock + v * kLanes, w[v]);
        }
    }
    if (Format::kHasTail) {
        for (int64_t column = blocks * kBlock; column < weight.columns; column += kLanes) {
            const int64_t count = smaller(kLanes, weight.columns - column);
            Vec w = Format::tail(data + blocks * Format::kBytes, column - blocks * kBlock, count);
            store_first(out + column, w, pad ? kLanes : count);
        }
    }
}

// One register tile: kRows widened rows against Tokens tokens. Unrolled by request: only then do the sums stay in registers
// from the first loop to the last.
template <int Tokens>
void multiply_tile(const Weight& weight, const float* rows, const float* x, float* out, int64_t row, int64_t count) {
    const int64_t columns = weight.columns;
    const int64_t stride = widened_stride(weight);
    const int64_t whole = columns / kLanes * kLanes;
    Vec sums[Tokens][kRows];
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; ++t)
        for (int r = 0; r < kRows; ++r) sums[t][r] = zero();
    for (int64_t column = 0; column < whole; column += kLanes) {
        Vec w[kRows];
        for (int r = 0; r < kRows; ++r) w[r] = load(rows + r * stride + column);
#pragma GCC unroll 8
        for (int t = 0; t < Tokens; ++t) {
            Vec input = load(x + t * columns + column);
            for (int r = 0; r < kRows; ++r) sums[t][r] = fma(w[r], input, sums[t][r]);
        }
    }
    if (whole < columns) {
#pragma GCC unroll 8
        for (int t = 0; t < Tokens; ++t) {
            Vec input = load_first(x + t * columns + whole, columns - whole);
            for (int r = 0; r < kRows; ++r) sums[t][r] = fma(load(rows + r * stride + whole), input, sums[t][r]);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; ++t) {
        float four[4];
        sum_four(sums[t][0], sums[t][1], sums[t][2], sums[t][3], four);
        write_rows(weight, four, out + t * weight.rows, row, count);
    }
}

template <int Tokens>
void multiply_rest(const Weight& weight, const float* rows, const float* x, int64_t tokens, float* out, int64_t row,
                   int64_t count) {
    if constexpr (Tokens > 0) {
        if (tokens == Tokens) return multiply_tile<Tokens>(weight, rows, x, out, row, count);
        multiply_rest<Tokens - 1>(weight, rows, x, tokens, out, row, count);
    }
}

// Many tokens: a tile of weight rows is widened once into `scratch`, then meets every token.
template <class Format>
void linear_blocked(const Weight& weight, const float* x, int64_t tokens, float* out, int64_t begin, int64_t end,
                    float* scratch) {
    const int64_t stride = widened_stride(weight);
    const int64_t tile = decoded_rows(weight);
    for (int64_t first_row = begin; first_row < end; first_row += tile) {
        const int64_t rows = smaller(tile, end - first_row);
        const int64_t whole_rows = (rows + kRows - 1) / kRows * kRows;
        for (int64_t r = 0; r < whole_rows; ++r)
            decode_columns<Format>(weight, first_row + smaller(r, rows - 1), scratch + r * stride, true);
        for (int64_t token = 0; token < tokens; token += kLinearTokens) {
            const int64_t count = smaller(kLinearTokens, tokens - token);
            for (int64_t r = 0; r < rows; r += kRows)
                multiply_rest<kLinearTokens>(weight, scratch + r * stride, x + token * weight.columns, count,
                                             out + token * weight.rows, first_row + r, smaller(kRows, rows - r));
        }
    }
}

template <class Format>
void linear_format(const Weight& weight, const float* x, int64_t tokens, float* out, int64_t begin, int64_t end,
                   float* scratch) {
    if (tokens <= kDirectTokens)
        linear_few<Format, kDirectTokens>(weight, x, tokens, out, begin, end);
    else
        linear_blocked<Format>(weight, x, tokens, out, begin, end, scratch);
}

// Runs work.run<Format>() for the weight's format.
template <class Work>
inline void with_format(WeightFormat format, const Work& work) {
    switch (format) {
        case WeightFormat::kFloat32: return work.template run<Dense<Float32>>();
        case WeightFormat::kBFloat16: return work.template run<Dense<BFloat16>>();
        case WeightFormat::kFloat16: return work.template run<Dense<Float16>>();
        case WeightFormat::kQ4_0: return work.template run<Quantised<BlockQ4_0>>();
        case WeightFormat::kQ4_1: return work.template run<Quantised<BlockQ4_1>>();
        case WeightFormat::kQ8_0: return work.template run<Quantised<BlockQ8_0>>();
        case WeightFormat::kQ2_K: return work.template run<GroupQuantised<BlockQ2_K>>();
        case WeightFormat::kQ3_K: return work.template run<GroupQuantised<BlockQ3_K>>();
        case WeightFormat::kQ4_K: return work.template run<GroupQuantised<BlockQ4_K>>();
        case WeightFormat::kQ5_K: return work.template run<GroupQuantised<BlockQ5_K>>();
        case WeightFormat::kQ6_K: return work.template run<GroupQuantised<BlockQ6_K>>();
        case WeightFormat::kQ5_0: return work.template run<Quantised<BlockQ5_0>>();
        case WeightFormat::kQ5_1: return work.template run<Quantised<BlockQ5_1>>();
        case WeightFormat::kMxfp4: return work.template run<Quantised<BlockMxfp4>>();
        case WeightFormat::kNvfp4: return work.template run<Nvfp4>();
        case WeightFormat::kFp8Blocks: return work.template run<Fp8Blocks>();
    }
}

struct LinearWork {
    const Weight& weight;
    const float* x;
    int64_t tokens;
    float* out;
    int64_t begin, end;
    float* scratch;
    template <class Format>
    void run() const {
        linear_format<Format>(weight, x, tokens, out, begin, end, scratch);
    }
};

void linear(const Weight& weight, const float* x, int64_t tokens, float* out, int64_t begin, int64_t end,
            float* scratch) {
    with_format(weight.format, LinearWork{weight, x, tokens, out, begin, end, scratch});
}

struct DecodeWork {
    const Weight& weight;
    int64_t row;
    float* out;
    template <class Format>
    void run() const {
        decode_columns<Format>(weight, row, out, false);
    }
};

void decode_row(const Weight& weight, int64_t row, float* out) { with_format(weight.format, DecodeWork{weight, row, out}); }

}  // namespace
}  // namespace tokenspeed::TOKENSPEED_ISA
