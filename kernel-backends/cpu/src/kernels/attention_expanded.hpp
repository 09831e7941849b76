// Attention over keys and values that were taken out of their latents, float32 side by side; see expanded.cpp.
//
// An online softmax over tiles of kKeyTile positions in the order of the sequence, all of one state: what a query row computes
// depends on its position and the keys only. No splits are merged, so it has not the bits of attention.hpp.

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

void attend_expanded(const ExpandedKeys& expanded, const AttentionTile& tile, const AttentionState& state) {
    const int64_t end = smaller(tile.row_limits[tile.rows - 1], expanded.begin + expanded.count);
    KeyTile<Float32> none;
    none.count = 0;
    for (int64_t begin = expanded.begin; begin < end; begin += kKeyTile) {
        KeyTile<Float32> now;
        now.begin = begin;
        now.skipped = 0;
        now.count = smaller(kKeyTile, end - begin);
        for (int64_t j = 0; j < now.count; ++j) {
            now.keys[j] = expanded.keys + (begin - expanded.begin + j) * expanded.key_dim;
            now.values[j] = expanded.values + (begin - expanded.begin + j) * expanded.value_dim;
        }
        attend_tile<Float32>(tile, now, none, false, state);
    }
}

}  // namespace
}  // namespace tokenspeed::TOKENSPEED_ISA
