// out = x . weight^T in two-dimensional tiles: bfloat16 weights read where they lie, x rounded to bfloat16 beforehand, float32 sums.
//
// Tiles says what a tile unit does: AMX, or the same in plain C++ for tests. A tile of sums has 16 weight rows and 16 tokens;
// it takes the columns in order, 32 at a time, whatever the batch, so that a row's result has the same bits in any batch.
#pragma once

#include <stdint.h>
#include <string.h>

#include "../table.hpp"

namespace tokenspeed {
namespace {

constexpr int64_t kTileSide = 16;     // weight rows, or tokens, of a tile
constexpr int64_t kTileColumns = 32;  // columns of one step
constexpr int64_t kTileHalves = kTileSide * kTileColumns;

// One step of 16 tokens as the unit wants its second operand: pairs of columns are rows, tokens lie side by side in them.
// Tokens past the last are zeros.
inline void pack_step(const uint16_t* x, int64_t stride, int64_t tokens, uint16_t* out) {
    memset(out, 0, sizeof(uint16_t) * kTileHalves);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t pair = 0; pair < kTileColumns / 2; ++pair)
            memcpy(out + (pair * kTileSide + t) * 2, x + t * stride + 2 * pair, 4);
}

// x [tokens, stride], zeros behind the columns up to a multiple of kTileColumns. `steps` is memory for one block of tokens:
// columns grown to a multiple of kTileColumns, times kTileSide halves.
template <class Tiles>
void linear_tiles(const Weight& weight, const uint16_t* x, int64_t stride, int64_t tokens, float* out, int64_t begin,
                  int64_t end, uint16_t* steps) {
    const int64_t whole = weight.columns / kTileColumns;
    const int64_t tail = weight.columns % kTileColumns;
    Tiles tiles;
    for (int64_t token = 0; token < tokens; token += kTileSide) {
        const int64_t count = tokens - token < kTileSide ? tokens - token : kTileSide;
        for (int64_t step = 0; step < whole + (tail > 0); ++step)
            pack_step(x + token * stride + step * kTileColumns, stride, count, steps + step * kTileHalves);
        for (int64_t row = begin; row < end; row += kTileSide) {
            const int64_t rows = end - row < kTileSide ? end - row : kTileSide;
            const uint8_t* data = weight.data + row * weight.row_bytes;
            // Rows past the last and columns past the end are not the weight's: such steps go by a copy with zeros in it.
            alignas(64) uint16_t copy[kTileHalves];
            const auto copied = [&](int64_t column, int64_t columns) {
                memset(copy, 0, sizeof copy);
                for (int64_t r = 0; r < rows; ++r)
                    memcpy(copy + r * kTileColumns, data + r * weight.row_bytes + 2 * column, (size_t)(2 * columns));
                return (const uint8_t*)copy;
            };
            tiles.clear();
            for (int64_t step = 0; step < whole; ++step) {
                const uint16_t* inputs = steps + step * kTileHalves;
                if (rows == kTileSide)
                    tiles.add(data + step * kTileColumns * 2, weight.row_bytes, inputs);
                else
                    tiles.add(copied(step * kTileColumns, kTileColumns), kTileColumns * 2, inputs);
            }
            if (tail > 0) tiles.add(copied(whole * kTileColumns, tail), kTileColumns * 2, steps + whole * kTileHalves);
            alignas(64) float sums[kTileSide * kTileSide];  // [weight row, token]
            tiles.store(sums);
            for (int64_t t = 0; t < count; ++t)
                for (int64_t r = 0; r < rows; ++r)
                    out[(token + t) * weight.rows + row + r] =
                        weight.bias ? sums[r * kTileSide + t] + weight.bias[row + r] : sums[r * kTileSide + t];
        }
    }
}

}  // namespace
}  // namespace tokenspeed
