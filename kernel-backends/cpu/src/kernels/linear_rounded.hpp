// out = x . weight^T with bfloat16 weights read where they lie and x rounded to bfloat16 beforehand.
//
// Whatever the batch, an output is one vector of float sums that takes the columns in order, kHalves at a time, and is
// then summed over its lanes by one fixed tree, so a row's result has the same bits in any batch. Sums that are put aside
// between two panels of columns are stored and loaded whole.

#include "../table.hpp"

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

constexpr int kRows = 4;                  // weight rows of one register tile,
constexpr int kTokens = 6;                // and tokens: 24 sums and what they are made from fill the registers
constexpr int kFewerRows = 3;             // The same 24 sums where the tokens are 7 or 8: one pass over a tile's rows
constexpr int kMoreTokens = 8;            // is quicker than two.
constexpr int64_t kFewTokens = 32;        // up to here a tile's rows meet all tokens before the next rows are read
constexpr int64_t kPanelColumns = 4096;   // beyond: the columns of some rows and of a group of tokens stay in the
constexpr int64_t kPanelTiles = 16;       // second-level cache while they meet

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t groups_of(int64_t tokens) { return (tokens + kTokens - 1) / kTokens; }

// The rows of a tile, and the inputs of the first token of a group.
template <int Rows>
struct Operands {
    const uint16_t* rows[Rows];
    const uint16_t* x;
    int64_t x_stride;
};

// Loops over the sums of a tile are unrolled by request: only then does the compiler keep the sums in registers from the
// first to the last; else it stores and loads all of them around every loop, a tenth of the time.
#define TOKENSPEED_UNROLLED _Pragma("GCC unroll 8")

// Past the last row the tile reads that row again; the sums are not written.
template <int Rows>
inline Operands<Rows> operands_of(const Weight& weight, const uint16_t* x, int64_t x_stride, int64_t row, int64_t end) {
    Operands<Rows> operands{{}, x, x_stride};
    TOKENSPEED_UNROLLED
    for (int r = 0; r < Rows; ++r)
        operands.rows[r] = (const uint16_t*)(weight.data + smaller(row + r, end - 1) * weight.row_bytes);
    return operands;
}

// Adds the products of columns [begin, end), `begin` a multiple of kHalves. At each step `lines` lines from `ahead` on are
// asked for: the rows of a tile are short streams that the processor's own prefetcher loses at their ends.
template <int Rows, int Tokens>
inline void add_columns(const Operands<Rows>& operands, int64_t begin, int64_t end, Sums (&sums)[Tokens][Rows],
                        const uint8_t* ahead, int lines) {
    int64_t column = begin;
    for (; column + kHalves <= end; column += kHalves) {
        for (int line = 0; line < lines; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        Halves w[Rows];
        TOKENSPEED_UNROLLED
        for (int r = 0; r < Rows; ++r) w[r] = load_halves(operands.rows[r] + column);
        TOKENSPEED_UNROLLED
        for (int t = 0; t < Tokens; ++t) {
            const Halves input = load_halves(operands.x + t * operands.x_stride + column);
            TOKENSPEED_UNROLLED
            for (int r = 0; r < Rows; ++r) sums[t][r] = add_products(sums[t][r], w[r], input);
        }
    }
    if (column < end) {
        TOKENSPEED_UNROLLED
        for (int t = 0; t < Tokens; ++t) {
            const Halves input = load_halves(operands.x + t * operands.x_stride + column);
            TOKENSPEED_UNROLLED
            for (int r = 0; r < Rows; ++r)
                sums[t][r] = add_products(sums[t][r], load_halves_first(operands.rows[r] + column, end - column), input);
        }
    }
}

template <int Rows, int Tokens>
inline void write_sums(const Weight& weight, const Sums (&sums)[Tokens][Rows], float* out, int64_t row, int64_t end) {
    static_assert(Rows == 1 || Rows == 3 || Rows == 4);
    TOKENSPEED_UNROLLED
    for (int t = 0; t < Tokens; ++t) {
        float four[4];
        if constexpr (Rows == 4)
            sum_four(sums[t][0], sums[t][1], sums[t][2], sums[t][3], four);
        else if constexpr (Rows == 3)
            sum_four(sums[t][0], sums[t][1], sums[t][2], no_sum(), four);
        else
            sum_four(sums[t][0], no_sum(), no_sum(), no_sum(), four);
        float* target = out + t * weight.rows + row;
        if (row + Rows <= end && !weight.bias) {
            memcpy(target, four, sizeof(float) * Rows);
            continue;
        }
        for (int64_t r = 0; r < smaller(Rows, end - row); ++r)
            target[r] = weight.bias ? four[r] + weight.bias[row + r] : four[r];
    }
}

// One call's arguments; `x` holds tokens rows of x_stride halves, zeros behind the columns.
struct Rounded {
    const Weight& weight;
    const uint16_t* x;
    int64_t x_stride;
    float* out;
    int64_t end;  // of the rows to compute
};

// Rows from `row` on against a group of tokens, over all columns.
template <int Rows, int Tokens>
inline void multiply_tile(const Rounded& call, int64_t row, int64_t token, const uint8_t* ahead, int lines) {
    const Operands<Rows> operands =
        operands_of<Rows>(call.weight, call.x + token * call.x_stride, call.x_stride, row, call.end);
    Sums sums[Tokens][Rows];
    TOKENSPEED_UNROLLED
    for (int t = 0; t < Tokens; ++t)
        TOKENSPEED_UNROLLED
        for (int r = 0; r < Rows; ++r) sums[t][r] = no_sum();
    add_columns<Rows, Tokens>(operands, 0, call.weight.columns, sums, ahead, lines);
    write_sums<Rows, Tokens>(call.weight, sums, call.out + token * call.weight.rows, row, call.end);
}

template <int Rows>
struct Tile {
    template <int Tokens>
    static void run(const Rounded& call, int64_t row, int64_t token, const uint8_t* ahead, int lines) {
        multiply_tile<Rows, Tokens>(call, row, token, ahead, lines);
    }
};

// kPanelTiles tiles of rows from `row` on against a group of tokens, a panel of columns after the other.
struct Panels {
    template <int Tokens>
    static void run(const Rounded& call, int64_t row, int64_t token, const uint8_t*, int) {
        if (call.weight.columns <= kPanelColumns) {  // one panel: nothing is put aside
            for (int64_t tile = 0; tile < kPanelTiles && row + tile * kRows < call.end; ++tile)
                multiply_tile<kRows, Tokens>(call, row + tile * kRows, token, nullptr, 0);
            return;
        }
        Sums kept[kPanelTiles][Tokens][kRows];
        const int64_t columns = call.weight.columns;
        const uint16_t* x = call.x + token * call.x_stride;
        for (int64_t begin = 0; begin < columns; begin += kPanelColumns) {
            const int64_t end = smaller(columns, begin + kPanelColumns);
            for (int64_t tile = 0; tile < kPanelTiles && row + tile * kRows < call.end; ++tile) {
                const auto operands = operands_of<kRows>(call.weight, x, call.x_stride, row + tile * kRows, call.end);
                Sums sums[Tokens][kRows];
                TOKENSPEED_UNROLLED
                for (int t = 0; t < Tokens; ++t)
                    TOKENSPEED_UNROLLED
                    for (int r = 0; r < kRows; ++r) sums[t][r] = begin == 0 ? no_sum() : kept[tile][t][r];
                add_columns<kRows, Tokens>(operands, begin, end, sums, nullptr, 0);
                TOKENSPEED_UNROLLED
                for (int t = 0; t < Tokens; ++t)
                    TOKENSPEED_UNROLLED
                    for (int r = 0; r < kRows; ++r) kept[tile][t][r] = sums[t][r];
                if (end == columns)
                    write_sums<kRows, Tokens>(call.weight, sums, call.out + token * call.weight.rows, row + tile * kRows,
                                              call.end);
            }
        }
    }
};

// Work::run<Tokens> for a count that is known at run time, `Tokens` at most.
template <class Work, int Tokens>
void run_group(const Rounded& call, int64_t tokens, int64_t row, int64_t token, const uint8_t* ahead, int lines) {
    if constexpr (Tokens > 0) {
        if (tokens == Tokens) return Work::template run<Tokens>(call, row, token, ahead, lines);
        run_group<Work, Tokens - 1>(call, tokens, row, token, ahead, lines);
    }
}

// Cuts the tokens into groups of nearly equal size.
template <class Work>
void run_groups(const Rounded& call, int64_t tokens, int64_t row, const uint8_t* ahead) {
    const int64_t groups = groups_of(tokens);
    const int lines = (int)((kRows + groups - 1) / groups);
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = tokens * group / groups;
        run_group<Work, kTokens>(call, tokens * (group + 1) / groups - first, row, first, ahead, lines);
        ahead += call.weight.columns / kHalves * lines * 64;
    }
}

// A line more than the columns take: rows a power of two apart would share a few sets of the first-level cache.
int64_t rounded_stride(const Weight& weight) { return ((weight.columns + kHalves - 1) / kHalves + 1) * kHalves; }

void round_rows(const Weight& weight, const float* x, int64_t tokens, uint16_t* out) {
    const int64_t stride = rounded_stride(weight);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t column = 0; column < weight.columns; column += kHalves)
            round_halves_first(x + t * weight.columns + column, out + t * stride + column,
                               smaller(kHalves, weight.columns - column));
}

void linear_rounded(const Weight& weight, const uint16_t* x, int64_t tokens, float* out, int64_t begin, int64_t end) {
    const Rounded call{weight, x, rounded_stride(weight), out, end};
    if (tokens == 1) {  // one long stream, which the processor's own prefetcher follows at the memory's speed
        for (int64_t row = begin; row < end; ++row) multiply_tile<1, 1>(call, row, 0, nullptr, 0);
        return;
    }
    if (tokens > kTokens && tokens <= kMoreTokens) {
        for (int64_t row = begin; row < end; row += kFewerRows)
            run_group<Tile<kFewerRows>, kMoreTokens>(call, tokens, row, 0,
                                                     weight.data + (row + kFewerRows) * weight.row_bytes, kFewerRows);
        return;
    }
    const bool few = tokens <= kFewTokens;
    for (int64_t row = begin; row < end; row += few ? kRows : kRows * kPanelTiles) {
        if (few)
            run_groups<Tile<kRows>>(call, tokens, row, weight.data + (row + kRows) * weight.row_bytes);
        else
            run_groups<Panels>(call, tokens, row, nullptr);
    }
}

#undef TOKENSPEED_UNROLLED

}  // namespace
}  // namespace tokenspeed::TOKENSPEED_ISA
