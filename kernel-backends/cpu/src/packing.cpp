#include "packing.hpp"

#include <cstring>

#include "pool.hpp"

namespace tokenspeed {

namespace {

// The quants of one GGUF block of 32 or 256 columns of each row of a panel, a byte each.
using Quants = uint8_t[kPanelRows][kPanelColumns * kSuperBlocks];

// (byte >> shift) & mask of each of `count` bytes.
void fields(const uint8_t* from, int shift, int mask, int64_t count, uint8_t* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint8_t>((from[i] >> shift) & mask);
}

// The same, `by` bits up, added to what is there.
void add_fields(const uint8_t* from, int shift, int mask, int by, int64_t count, uint8_t* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(out[i] | ((from[i] >> shift) & mask) << by);
}

void halves_of_bytes(const uint8_t* from, uint8_t* out) {
    fields(from, 0, 15, 16, out);
    fields(from, 4, 15, 16, out + 16);
}

void add_bits(const uint8_t* bits, uint8_t* out) {
    for (int64_t i = 0; i < 32; ++i) out[i] = static_cast<uint8_t>(out[i] | (bits[i / 8] >> (i % 8) & 1) << 4);
}

// Scale number `index` of a row, a float16, of a run of scales of 16 rows that begins at `scales`.
void put_half(const uint8_t* half, int64_t row, uint8_t* scales) { std::memcpy(scales + 2 * row, half, 2); }

// The six-bit scales and minimums of Q4_K and Q5_K, a byte each, where `scales` are those of a superblock.
void put_six_bits(const uint8_t* packed, int64_t row, uint8_t* scales) {
    for (int64_t i = 0; i < kSuperBlocks; ++i) {
        const uint8_t a = packed[i % 4], b = packed[4 + i % 4], c = packed[8 + i % 4];
        scales[64 + 32 * i + row] = static_cast<uint8_t>(i < 4 ? a & 63 : (c & 15) | a >> 6 << 4);
        scales[80 + 32 * i + row] = static_cast<uint8_t>(i < 4 ? b & 63 : c >> 4 | b >> 6 << 4);
    }
}

void put_d_and_minimum(const uint8_t* block, int64_t row, uint8_t* scales) {
    put_half(block, row, scales);
    const uint8_t negative[2] = {block[2], static_cast<uint8_t>(block[3] ^ 0x80)};
    put_half(negative, row, scales + 32);
    put_six_bits(block + 4, row, scales);
}

// Takes one GGUF block of row `row` apart.
void take_apart(WeightFormat format, const uint8_t* block, int64_t row, uint8_t* quants, uint8_t* scales) {
    switch (format) {
        case WeightFormat::kQ4_0:
            put_half(block, row, scales);
            return halves_of_bytes(block + 2, quants);
        case WeightFormat::kQ5_0:
            put_half(block, row, scales);
            halves_of_bytes(block + 6, quants);
            return add_bits(block + 2, quants);
        case WeightFormat::kQ8_0:
            put_half(block, row, scales);
            for (int64_t i = 0; i < 32; ++i) quants[i] = static_cast<uint8_t>(block[2 + i] ^ 0x80);
            return;
        case WeightFormat::kQ4_1:
        case WeightFormat::kQ5_1: {
            const int64_t high = format == WeightFormat::kQ5_1 ? 4 : 0;
            put_half(block, row, scales);
            put_half(block + 2, row, scales + 32);
            halves_of_bytes(block + 4 + high, quants);
            if (high != 0) add_bits(block + 4, quants);
            return;
        }
        case WeightFormat::kQ4_K:
        case WeightFormat::kQ5_K: {
            const bool five = format == WeightFormat::kQ5_K;
            put_d_and_minimum(block, row, scales);
            for (int part = 0; part < 8; ++part) {
                fields(block + (five ? 48 : 16) + part / 2 * 32, part % 2 * 4, 15, 32, quants + 32 * part);
                if (five) add_fields(block + 16, part, 1, 4, 32, quants + 32 * part);
            }
            return;
        }
        case WeightFormat::kQ6_K:
            put_half(block + 208, row, scales);
            for (int64_t group = 0; group < 16; ++group) scales[32 + 16 * group + row] = block[192 + group];
            for (int part = 0; part < 8; ++part) {
                const int half = part / 4, quarter = part % 4;
                fields(block + half * 64 + quarter % 2 * 32, quarter / 2 * 4, 15, 32, quants + 32 * part);
                add_fields(block + 128 + half * 32, quarter * 2, 3, 4, 32, quants + 32 * part);
            }
            return;
        default: return;  // not packed
    }
}

// Writes the column groups of 32 columns, from `column` on, of all rows of a panel.
void put_block(int32_t bits, const Quants& quants, int64_t column, uint8_t* out) {
    auto* words = reinterpret_cast<uint32_t*>(out);  // word 16 * g + row: four columns of a row
    for (int64_t row = 0; row < kPanelRows; ++row) {
        uint32_t w[8];
        std::memcpy(w, quants[row] + column, sizeof w);
        if (bits == 8) {
            for (int g = 0; g < 8; ++g) words[16 * g + row] = w[g];
            continue;
        }
        for (int g = 0; g < 4; ++g) words[16 * g + row] = (w[g] & 0x0f0f0f0fu) | (w[g + 4] & 0x0f0f0f0fu) << 4;
        uint32_t high[2] = {0, 0};
        for (int g = 0; g < 8; ++g) {
            if (bits == 5) high[0] |= (w[g] >> 4 & 0x01010101u) << g;
            if (bits == 6) high[g / 4] |= (w[g] >> 4 & 0x03030303u) << (g % 4 * 2);
        }
        for (int part = 0; part < bits - 4; ++part) words[64 + 16 * part + row] = high[part];
    }
}

void pack_panel(const Weight& weight, const PanelLayout& layout, int64_t panel, uint8_t* quants, uint8_t* scales) {
    const bool super = layout.scales == PanelScales::kBytesAndMinimum || layout.scales == PanelScales::kBytesOfHalves;
    const int64_t blocks_each = super ? kSuperBlocks : 1;  // panel blocks of a GGUF block
    const int64_t count = weight.columns / (kPanelColumns * blocks_each);
    const int64_t source_bytes = weight.row_bytes / count;
    const int64_t scale_step = scale_bytes(layout.scales) * blocks_each / kSuperBlocks;
    Quants unpacked;
    for (int64_t block = 0; block < count; ++block) {
        for (int64_t r = 0; r < kPanelRows; ++r) {
            const int64_t row = panel * kPanelRows + r;
            if (row < weight.rows) {
                const uint8_t* source = weight.data + row * weight.row_bytes + block * source_bytes;
                take_apart(weight.format, source, r, unpacked[r], scales + block * scale_step);
            } else {  // its scales are 0: so is the memory
                std::memset(unpacked[r], 0, sizeof unpacked[r]);
            }
        }
        for (int64_t i = 0; i < blocks_each; ++i)
            put_block(layout.bits, unpacked, i * kPanelColumns,
                      quants + (block * blocks_each + i) * quant_bytes(layout.bits));
    }
}

}  // namespace

void pack_panels(const Weight& weight, uint8_t* quants, uint8_t* scales) {
    const PanelLayout layout = panel_layout(weight.format);
    const int64_t panels = panels_of(weight.rows);
    if (panels == 0) return;
    const int64_t quant_step = all_quant_bytes(weight.format, kPanelRows, weight.columns);
    const int64_t scale_step = all_scale_bytes(weight.format, kPanelRows, weight.columns);
    parallel_for(panels, thread_limit(), [&](int64_t panel) {
        pack_panel(weight, layout, panel, quants + panel * quant_step, scales + panel * scale_step);
    });
}

}  // namespace tokenspeed
