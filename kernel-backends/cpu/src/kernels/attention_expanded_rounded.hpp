// As attention_expanded.hpp with queries, keys, values and weights rounded to bfloat16, sums and softmax in float32: the pairs
// of attention_rounded.hpp, made once for all query rows that see them.

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

// Halves of one tile's turned keys and values.
inline int64_t tile_halves(int64_t key_dim, int64_t value_dim) {
    return kKeyTile * (whole_vectors(key_dim) + whole_vectors(value_dim));
}

int64_t turned_halves(int64_t key_dim, int64_t value_dim) {
    return kExpandedKeys / kKeyTile * tile_halves(key_dim, value_dim);
}

int64_t row_halves(int64_t key_dim, int64_t value_dim) { return tile_halves(key_dim, value_dim); }

// Where the pairs of tile number `index` lie; the queries are nowhere yet.
inline Pairs pairs_of(const ExpandedKeys& expanded, uint16_t* turned, int64_t index) {
    const int64_t key_stride = whole_vectors(expanded.key_dim), value_stride = whole_vectors(expanded.value_dim);
    uint16_t* keys = turned + index * tile_halves(expanded.key_dim, expanded.value_dim);
    return {nullptr, keys, keys + kKeyTile * key_stride, key_stride, value_stride};
}

inline void round_row(const float* from, uint16_t* to, int64_t dim) {
    for (int64_t d = 0; d < dim; d += kHalves) round_halves_first(from + d, to + d, smaller(kHalves, dim - d));
}

void turn_expanded(const ExpandedKeys& expanded, uint16_t* rows, uint16_t* turned) {
    for (int64_t index = 0; index * kKeyTile < expanded.count; ++index) {
        const Pairs pairs = pairs_of(expanded, turned, index);
        const int64_t first = index * kKeyTile;
        KeyTile<BFloat16> tile;
        tile.begin = expanded.begin + first;
        tile.skipped = 0;
        tile.count = smaller(kKeyTile, expanded.count - first);
        uint16_t* values = rows + kKeyTile * pairs.key_stride;
        for (int64_t j = 0; j < tile.count; ++j) {
            uint16_t* const key = rows + j * pairs.key_stride;
            uint16_t* const value = values + j * pairs.value_stride;
            round_row(expanded.keys + (first + j) * expanded.key_dim, key, expanded.key_dim);
            round_row(expanded.values + (first + j) * expanded.value_dim, value, expanded.value_dim);
            tile.keys[j] = key;
            tile.values[j] = value;
        }
        turn_keys<BFloat16>(tile, expanded.key_dim, pairs, nullptr);
        turn_values<BFloat16>(tile, expanded.value_dim, pairs, nullptr);
    }
}

void round_query(const float* query, int64_t key_dim, uint16_t* out) { round_row(query, out, key_dim); }

void attend_turned(const ExpandedKeys& expanded, uint16_t* turned, const AttentionTile& tile, uint16_t* queries,
                   const AttentionState& state) {
    const int64_t end = smaller(tile.row_limits[tile.rows - 1], expanded.begin + expanded.count);
    KeyTile<BFloat16> none;
    none.count = 0;
    Ahead<BFloat16> nothing(none, tile, true);
    for (int64_t index = 0; expanded.begin + index * kKeyTile < end; ++index) {
        Pairs pairs = pairs_of(expanded, turned, index);
        pairs.queries = queries;
        attend_pairs(tile, expanded.begin + index * kKeyTile, pairs, state, nothing);
    }
}

}  // namespace
}  // namespace tokenspeed::TOKENSPEED_ISA
