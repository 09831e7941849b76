// Paged attention over a cache of bfloat16, or of e4m3 that become bfloat16, with queries and weights rounded to bfloat16, sums and softmax in float32.
//
// A tile's keys are turned once into pairs of elements with the keys in the lanes, and its values into pairs of keys with the
// elements in the lanes: a sum is then one lane, that takes its pairs in order, and no lanes are ever added up. As in
// attention.hpp, what a row computes depends on its position and the keys only.

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

constexpr int64_t kPairs = kHalves / 2;             // pairs in a vector
constexpr int64_t kKeyVectors = kKeyTile / kPairs;  // vectors of a tile's keys

#define TOKENSPEED_UNROLLED _Pragma("GCC unroll 8")

// Elements of a cache as halves.
inline Halves halves_at(const uint16_t* p) { return load_halves(p); }
inline Halves halves_at(const uint8_t* p) { return load_e4m3_halves(p); }
inline Halves halves_at_first(const uint16_t* p, int64_t count) { return load_halves_first(p, count); }
inline Halves halves_at_first(const uint8_t* p, int64_t count) { return load_e4m3_halves_first(p, count); }

// A tile of keys and values as pairs, and all its rows' queries.
struct Pairs {
    uint16_t* queries;  // [rows, key_stride], zeros behind key_dim
    uint16_t* keys;     // [key_stride / 2, kKeyTile] pairs
    uint16_t* values;   // [kKeyTile / 2, value_stride] pairs
    int64_t key_stride;    // halves: a multiple of kHalves
    int64_t value_stride;  // pairs: a multiple of kHalves
};

// The lines of the next tile, asked for one after the other while this one is worked on: all at once they would fill the
// queue to memory and hold up the work.
template <class Type>
class Ahead {
    using Element = typename Type::Element;
    static constexpr int64_t kBytes = sizeof(Element);

public:
    Ahead(const KeyTile<Type>& next, const AttentionTile& tile, bool one_plane)
        : next_(next),
          rows_(next.keys),
          bytes_(kBytes * tile.key_dim),
          value_bytes_(one_plane ? 0 : kBytes * tile.value_dim) {}

    void ask() {
        if (row_ >= next_.count) return;
        __builtin_prefetch((const char*)rows_[row_] + byte_, 0, 2);
        byte_ += 64;
        if (byte_ < bytes_) return;
        byte_ = 0;
        if (++row_ < next_.count || value_bytes_ == 0) return;
        rows_ = next_.values;
        bytes_ = value_bytes_;
        value_bytes_ = 0;
        row_ = 0;
    }
    void ask_rest() {
        while (row_ < next_.count) ask();
    }

private:
    const KeyTile<Type>& next_;
    const Element* const* rows_;
    int64_t bytes_;
    int64_t value_bytes_;  // of the rows that come behind these
    int64_t row_ = 0;
    int64_t byte_ = 0;
};

inline int64_t whole_vectors(int64_t dim) { return (dim + kHalves - 1) / kHalves * kHalves; }

// Lays the pairs out in the tile's memory and rounds its queries.
Pairs prepare(const AttentionTile& tile) {
    Pairs pairs{(uint16_t*)tile.wide, nullptr, nullptr, whole_vectors(tile.key_dim), whole_vectors(tile.value_dim)};
    pairs.keys = pairs.queries + kMaxTileRows * pairs.key_stride;
    pairs.values = pairs.keys + kKeyTile * pairs.key_stride;
    for (int64_t r = 0; r < tile.rows; ++r)
        for (int64_t d = 0; d < tile.key_dim; d += kHalves)
            round_halves_first(tile.queries + r * tile.key_dim + d, pairs.queries + r * pairs.key_stride + d,
                               smaller(kHalves, tile.key_dim - d));
    return pairs;
}

// Halves [d, d + kHalves) of one of a tile's rows, zeros where the tile has no such row or the row has no such halves.
template <class Type>
inline Halves halves_of(const KeyTile<Type>& tile, const typename Type::Element* const* rows, int64_t j, int64_t d,
                        int64_t dim) {
    if (j < tile.skipped || j >= tile.count) return no_halves();
    return d + kHalves <= dim ? halves_at(rows[j] + d) : halves_at_first(rows[j] + d, dim - d);
}

template <class Type>
void turn_keys(const KeyTile<Type>& tile, int64_t dim, const Pairs& pairs, Ahead<Type>* ahead) {
    for (int64_t key = 0; key < kKeyTile; key += kPairs)
        for (int64_t d = 0; d < dim; d += kHalves) {
            Halves rows[kPairs];
            TOKENSPEED_UNROLLED
            for (int64_t j = 0; j < kPairs; ++j) rows[j] = halves_of(tile, tile.keys, key + j, d, dim);
            transpose_pairs(rows);
            for (int64_t pair = 0; pair < kPairs; ++pair) {
                store_halves(pairs.keys + 2 * ((d / 2 + pair) * kKeyTile + key), rows[pair]);
                if (ahead) ahead->ask();
            }
        }
}

template <class Type>
void turn_values(const KeyTile<Type>& tile, int64_t dim, const Pairs& pairs, Ahead<Type>* ahead) {
    for (int64_t pair = tile.skipped / 2; 2 * pair < tile.count; ++pair)
        for (int64_t d = 0; d < dim; d += kHalves) {
            Halves low, high;
            pair_halves(halves_of(tile, tile.values, 2 * pair, d, dim), halves_of(tile, tile.values, 2 * pair + 1, d, dim),
                        low, high);
            uint16_t* target = pairs.values + 2 * (pair * pairs.value_stride + d);
            store_halves(target, low);
            store_halves(target + kHalves, high);
            if (ahead) ahead->ask();
        }
}

// scores[r, key] of Rows rows and all keys of the tile.
template <class Type, int Rows>
void score_rows(const uint16_t* queries, const Pairs& pairs, float* scores, Ahead<Type>& ahead) {
    Sums sums[Rows][kKeyVectors];
    TOKENSPEED_UNROLLED
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < kKeyVectors; ++v) sums[r][v] = no_sum();
    const uint16_t* keys = pairs.keys;
    for (int64_t d = 0; d < pairs.key_stride; d += 2, keys += 2 * kKeyTile) {
        Halves key[kKeyVectors];
        for (int v = 0; v < kKeyVectors; ++v) key[v] = load_halves(keys + v * kHalves);
        ahead.ask();
        ahead.ask();
        TOKENSPEED_UNROLLED
        for (int r = 0; r < Rows; ++r) {
            const Halves query = set_pair(queries + r * pairs.key_stride + d);
            for (int v = 0; v < kKeyVectors; ++v) sums[r][v] = add_products(sums[r][v], key[v], query);
        }
    }
    TOKENSPEED_UNROLLED
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < kKeyVectors; ++v) store(scores + r * kKeyTile + v * kLanes, sums[r][v]);
}

template <class Type, int Rows>
void score_rows_rest(const uint16_t* queries, int64_t rows, const Pairs& pairs, float* scores, Ahead<Type>& ahead) {
    if constexpr (Rows > 0) {
        if (rows == Rows) return score_rows<Type, Rows>(queries, pairs, scores, ahead);
        score_rows_rest<Type, Rows - 1>(queries, rows, pairs, scores, ahead);
    }
}

// accumulator[r, d .. d + Vectors * kLanes) = accumulator * factor[r] + weights of the run's keys . their values.
template <int Rows, int Vectors>
void weigh_pairs(const Run& run, const uint16_t* weights, const float* factors, const Pairs& pairs, float* accumulator,
                 int64_t dim, int64_t d) {
    const int64_t count = Vectors == 1 ? smaller(kLanes, dim - d) : kLanes;  // lanes of the last vector
    Sums sums[Rows][Vectors];
    TOKENSPEED_UNROLLED
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v)
            sums[r][v] = mul(load_first(accumulator + (run.row + r) * dim + d + v * kLanes, count), set(factors[run.row + r]));
    const auto add_pair = [&](int64_t pair, auto&& part) __attribute__((always_inline)) {
        Halves value[Vectors];
        for (int v = 0; v < Vectors; ++v)
            value[v] = part(load_halves(pairs.values + 2 * (pair * pairs.value_stride + d) + v * kHalves));
        TOKENSPEED_UNROLLED
        for (int r = 0; r < Rows; ++r) {
            const Halves weight = set_pair(weights + (run.row + r) * kKeyTile + 2 * pair);
            for (int v = 0; v < Vectors; ++v) sums[r][v] = add_products(sums[r][v], value[v], weight);
        }
    };
    // A key that the rows may not see must not be touched even with a weight of zero: half a pair is left out at the ends.
    if (run.first % 2 != 0) add_pair(run.first / 2, [](Halves value) { return second_halves(value); });
    for (int64_t pair = (run.first + 1) / 2; pair < run.end / 2; ++pair) add_pair(pair, [](Halves value) { return value; });
    if (run.end % 2 != 0) add_pair(run.end / 2, [](Halves value) { return first_halves(value); });
    TOKENSPEED_UNROLLED
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v)
            store_first(accumulator + (run.row + r) * dim + d + v * kLanes, sums[r][v], count);
}

template <int Rows, int Vectors>
void weigh_pairs_rest(const Run& run, const uint16_t* weights, const float* factors, const Pairs& pairs,
                      float* accumulator, int64_t dim, int64_t d) {
    if constexpr (Rows > 0) {
        if (run.rows == Rows) return weigh_pairs<Rows, Vectors>(run, weights, factors, pairs, accumulator, dim, d);
        weigh_pairs_rest<Rows - 1, Vectors>(run, weights, factors, pairs, accumulator, dim, d);
    }
}

#undef TOKENSPEED_UNROLLED

template <class Type>
void attend_pairs(const AttentionTile& tile, int64_t begin, const Pairs& pairs, const AttentionState& state,
                  Ahead<Type>& ahead) {
    float scores[kMaxTileRows * kKeyTile];
    float factors[kMaxTileRows];
    uint16_t weights[kMaxTileRows * kKeyTile];
    Run runs[kMaxTileRows];
    for (int64_t r = 0; r < tile.rows; r += kAttentionRows)
        score_rows_rest<Type, kAttentionRows>(pairs.queries + r * pairs.key_stride, smaller(kAttentionRows, tile.rows - r), pairs,
                                        scores + r * kKeyTile, ahead);
    const int64_t count = soften_rows(tile, begin, scores, state, factors, runs);
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = runs[i].row * kKeyTile; j < (runs[i].row + runs[i].rows) * kKeyTile; j += kHalves)
            round_halves_first(scores + j, weights + j, kHalves);
    const int64_t dim = tile.value_dim;
    int64_t d = 0;
    for (; d + 4 * kLanes <= dim; d += 4 * kLanes)
        for (int64_t i = 0; i < count; ++i)
            weigh_pairs_rest<kAttentionRows, 4>(runs[i], weights, factors, pairs, state.accumulator, dim, d);
    for (; d < dim; d += kLanes)
        for (int64_t i = 0; i < count; ++i)
            weigh_pairs_rest<kAttentionRows, 1>(runs[i], weights, factors, pairs, state.accumulator, dim, d);
}

template <class Type>
void attend_rounded_type(const Cache& cache, const AttentionTile& tile, int64_t split, const AttentionState& state) {
    clear(tile, state);
    const int64_t start = larger(tile.row_starts[0], split * kKeySplit);
    const int64_t end = smaller(tile.row_limits[tile.rows - 1], (split + 1) * kKeySplit);
    if (start >= end) return;
    const Pairs pairs = prepare(tile);
    KeyTile<Type> tiles[2];
    int64_t begin = start / kKeyTile * kKeyTile;
    find_keys(cache, tile, begin, start, end, tiles[0]);
    for (int now = 0; begin < end; begin += kKeyTile, now = 1 - now) {
        KeyTile<Type>& next = tiles[1 - now];
        find_keys(cache, tile, begin + kKeyTile, start, end, next);
        Ahead<Type> ahead(next, tile, cache.keys.data == cache.values.data);
        // Few rows are scored too soon to ask for everything meanwhile. Turning the keys of many waits for memory itself.
        Ahead<Type>* const early = tile.rows > kAttentionRows ? nullptr : &ahead;
        turn_keys(tiles[now], tile.key_dim, pairs, early);
        turn_values(tiles[now], tile.value_dim, pairs, early);
        attend_pairs(tile, begin, pairs, state, ahead);
        ahead.ask_rest();
    }
}

void attend_rounded(const Cache& cache, const AttentionTile& tile, int64_t split, const AttentionState& state) {
    if (cache.type == KvType::kE4M3) return attend_rounded_type<E4M3>(cache, tile, split, state);
    attend_rounded_type<BFloat16>(cache, tile, split, state);
}

}  // namespace
}  // namespace tokenspeed::TOKENSPEED_ISA
