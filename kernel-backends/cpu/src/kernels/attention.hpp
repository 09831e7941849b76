// Paged attention: grouped-query, and latent, where keys and values are one plane and all heads share it.
//
// The keys of a sequence are cut into splits of kKeySplit and those into tiles of kKeyTile, both counted from position 0.
// A split is an online softmax over its tiles, splits are merged in sequence order. What a query row computes depends on
// its position and the keys only: not on how many rows share the pass, how a prompt was chunked, or how many threads work.
//
// Many query rows have a tile's keys and values widened to float32 once, in memory of the second-level cache; few rows widen
// them in registers. The arithmetic is the same.
//
// With a window a row begins at the tile that its first key lies in. Tiles and pages before the first row's window are not
// looked at; their entries of the page table may be anything.

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

// Loops over the sums of a register tile are unrolled by request: only then do the sums stay in registers throughout.
#define TOKENSPEED_UNROLLED _Pragma("GCC unroll 8")

// scores[r * kKeyTile + j] = query row r . key j, for Rows rows and four keys.
template <class Type, int Rows>
void score_four(const float* queries, const typename Type::Element* const* keys, int64_t dim, float* scores) {
    Vec sums[Rows][4];
    TOKENSPEED_UNROLLED
    for (int r = 0; r < Rows; ++r)
        for (int j = 0; j < 4; ++j) sums[r][j] = zero();
    const int64_t whole = dim / kLanes * kLanes;
    for (int64_t d = 0; d < whole; d += kLanes) {
        Vec key[4];
        for (int j = 0; j < 4; ++j) key[j] = Type::load(keys[j] + d);
        TOKENSPEED_UNROLLED
        for (int r = 0; r < Rows; ++r) {
            Vec query = load(queries + r * dim + d);
            for (int j = 0; j < 4; ++j) sums[r][j] = fma(query, key[j], sums[r][j]);
        }
    }
    if (whole < dim) {
        const int64_t count = dim - whole;
        TOKENSPEED_UNROLLED
        for (int r = 0; r < Rows; ++r) {
            Vec query = load_first(queries + r * dim + whole, count);
            for (int j = 0; j < 4; ++j) sums[r][j] = fma(query, Type::load_first(keys[j] + whole, count), sums[r][j]);
        }
    }
    TOKENSPEED_UNROLLED
    for (int r = 0; r < Rows; ++r) sum_four(sums[r][0], sums[r][1], sums[r][2], sums[r][3], scores + r * kKeyTile);
}

template <class Type, int Rows>
void score_rest(const float* queries, int64_t rows, const typename Type::Element* const* keys, int64_t dim,
                float* scores) {
    if constexpr (Rows > 0) {
        if (rows == Rows) return score_four<Type, Rows>(queries, keys, dim, scores);
        score_rest<Type, Rows - 1>(queries, rows, keys, dim, scores);
    }
}

// accumulator[r, d .. d + Vectors * kLanes) = accumulator * factor[r] + sum over keys of weight[r, j] * value[j], where
// `weights`, `factors`, `values` and `accumulator` begin at the run's first row and key.
template <class Type, int Rows, int Vectors, bool Tail>
void weigh_values(const float* weights, const float* factors, const typename Type::Element* const* values, int64_t keys,
                  float* accumulator, int64_t dim, int64_t d) {
    const int64_t count = dim - d;  // used where Tail
    Vec sums[Rows][Vectors];
    TOKENSPEED_UNROLLED
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) {
            const float* p = accumulator + r * dim + d + v * kLanes;
            sums[r][v] = mul(Tail ? load_first(p, count) : load(p), set(factors[r]));
        }
    for (int64_t j = 0; j < keys; ++j) {
        Vec value[Vectors];
        for (int v = 0; v < Vectors; ++v)
            value[v] = Tail ? Type::load_first(values[j] + d, count) : Type::load(values[j] + d + v * kLanes);
        TOKENSPEED_UNROLLED
        for (int r = 0; r < Rows; ++r) {
            Vec weight = set(weights[r * kKeyTile + j]);
            for (int v = 0; v < Vectors; ++v) sums[r][v] = fma(weight, value[v], sums[r][v]);
        }
    }
    TOKENSPEED_UNROLLED
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) {
            float* p = accumulator + r * dim + d + v * kLanes;
            if (Tail)
                store_first(p, sums[r][v], count);
            else
                store(p, sums[r][v]);
        }
}

template <class Type, int Rows, int Vectors, bool Tail>
void weigh_rest(const Run& run, const float* weights, const float* factors, const typename Type::Element* const* values,
                float* accumulator, int64_t dim, int64_t d) {
    if constexpr (Rows > 0) {
        if (run.rows != Rows)
            return weigh_rest<Type, Rows - 1, Vectors, Tail>(run, weights, factors, values, accumulator, dim, d);
        weigh_values<Type, Rows, Vectors, Tail>(weights + run.row * kKeyTile + run.first, factors + run.row,
                                                values + run.first, run.end - run.first, accumulator + run.row * dim, dim,
                                                d);
    }
}

// All runs over one range of columns after the other: the values' columns stay in the first-level cache for all rows.
template <class Type>
void weigh(const Run* runs, int64_t count, const float* weights, const float* factors,
           const typename Type::Element* const* values, float* accumulator, int64_t dim) {
    int64_t d = 0;
    for (; d + 4 * kLanes <= dim; d += 4 * kLanes)
        for (int64_t i = 0; i < count; ++i)
            weigh_rest<Type, kAttentionRows, 4, false>(runs[i], weights, factors, values, accumulator, dim, d);
    for (; d + kLanes <= dim; d += kLanes)
        for (int64_t i = 0; i < count; ++i)
            weigh_rest<Type, kAttentionRows, 1, false>(runs[i], weights, factors, values, accumulator, dim, d);
    if (d < dim)
        for (int64_t i = 0; i < count; ++i)
            weigh_rest<Type, kAttentionRows, 1, true>(runs[i], weights, factors, values, accumulator, dim, d);
}

#undef TOKENSPEED_UNROLLED

// One step of the online softmax of all rows; Loader reads what Type stores. While the first rows are scored, the keys and
// values of `next` are asked for: a page is a short stream that the processor's own prefetcher loses at its end.
template <class Loader, class Type, class NextType>
void attend_tile(const AttentionTile& tile, KeyTile<Type>& now, const KeyTile<NextType>& next, bool one_plane,
                 const AttentionState& state) {
    float scores[kMaxTileRows * kKeyTile];
    float factors[kMaxTileRows];
    Run runs[kMaxTileRows];
    const int64_t scored = now.skipped / 4 * 4;
    for (int64_t j = scored; j < now.skipped; ++j) now.keys[j] = now.keys[now.skipped];  // these are scored, then masked
    for (int64_t j = now.count; j % 4 != 0; ++j) now.keys[j] = now.keys[now.count - 1];
    for (int64_t r = 0; r < tile.rows; r += kAttentionRows) {
        const int64_t rows = smaller(kAttentionRows, tile.rows - r);
        for (int64_t j = scored; j < now.count; j += 4) {
            for (int64_t i = j; r == 0 && i < smaller(j + 4, next.count); ++i) {
                ask_for(next.keys[i], tile.key_dim);
                if (!one_plane) ask_for(next.values[i], tile.value_dim);
            }
            score_rest<Loader, kAttentionRows>(tile.queries + r * tile.key_dim, rows, now.keys + j, tile.key_dim,
                                             scores + r * kKeyTile + j);
        }
    }
    const int64_t count = soften_rows(tile, now.begin, scores, state, factors, runs);
    weigh<Loader>(runs, count, scores, factors, now.values, state.accumulator, tile.value_dim);
}

// Copies the keys and values of a tile as float32 to `memory`, once for all rows.
template <class Loader, class Type>
void widen(const KeyTile<Type>& from, const AttentionTile& tile, bool one_plane, float* memory, KeyTile<Float32>& to) {
    to.begin = from.begin;
    to.skipped = from.skipped;
    to.count = from.count;
    const auto copy = [&](const typename Type::Element* const* rows, int64_t dim, const float** copies) {
        const int64_t stride = (dim + kLanes - 1) / kLanes * kLanes;
        for (int64_t j = from.skipped; j < from.count; ++j, memory += stride) {
            for (int64_t d = 0; d < dim; d += kLanes) {
                const int64_t count = smaller(kLanes, dim - d);
                store(memory + d, count == kLanes ? Loader::load(rows[j] + d) : Loader::load_first(rows[j] + d, count));
            }
            copies[j] = memory;
        }
    };
    copy(from.keys, tile.key_dim, to.keys);
    if (one_plane)
        memcpy(to.values, to.keys, sizeof to.keys);
    else
        copy(from.values, tile.value_dim, to.values);
}

// The tile as it lies, or widened first where the caller gave memory for that.
template <class Loader, class Type>
void attend_now(const AttentionTile& tile, KeyTile<Type>& now, const KeyTile<Type>& next, bool one_plane,
                const AttentionState& state) {
    if (!tile.wide) return attend_tile<Loader>(tile, now, next, one_plane, state);
    KeyTile<Float32> wide;
    widen<Loader>(now, tile, one_plane, tile.wide, wide);
    attend_tile<Float32>(tile, wide, next, one_plane, state);
}

// Whether no key and no value of the tile is NaN.
inline bool all_numbers(const KeyTile<E4M3>& now, const AttentionTile& tile, bool one_plane) {
    for (int64_t j = now.skipped; j < now.count; ++j)
        if (!all_e4m3_numbers(now.keys[j], tile.key_dim) ||
            (!one_plane && !all_e4m3_numbers(now.values[j], tile.value_dim)))
            return false;
    return true;
}

template <class Type>
void attend_as_found(const AttentionTile& tile, KeyTile<Type>& now, const KeyTile<Type>& next, bool one_plane,
                     const AttentionState& state) {
    attend_now<Type>(tile, now, next, one_plane, state);
}
inline void attend_as_found(const AttentionTile& tile, KeyTile<E4M3>& now, const KeyTile<E4M3>& next, bool one_plane,
                            const AttentionState& state) {
    if (all_numbers(now, tile, one_plane)) return attend_now<E4M3Numbers>(tile, now, next, one_plane, state);
    attend_now<E4M3>(tile, now, next, one_plane, state);
}

template <class Type>
void attend_type(const Cache& cache, const AttentionTile& tile, int64_t split, const AttentionState& state) {
    clear(tile, state);
    const int64_t start = larger(tile.row_starts[0], split * kKeySplit);
    const int64_t end = smaller(tile.row_limits[tile.rows - 1], (split + 1) * kKeySplit);
    if (start >= end) return;
    const bool one_plane = cache.keys.data == cache.values.data;
    KeyTile<Type> tiles[2];
    int64_t begin = start / kKeyTile * kKeyTile;
    find_keys(cache, tile, begin, start, end, tiles[0]);
    for (int now = 0; begin < end; begin += kKeyTile, now = 1 - now) {
        find_keys(cache, tile, begin + kKeyTile, start, end, tiles[1 - now]);
        attend_as_found(tile, tiles[now], tiles[1 - now], one_plane, state);
    }
}

void attend(const Cache& cache, const AttentionTile& tile, int64_t split, const AttentionState& state) {
    switch (cache.type) {
        case KvType::kFloat32: return attend_type<Float32>(cache, tile, split, state);
        case KvType::kBFloat16: return attend_type<BFloat16>(cache, tile, split, state);
        case KvType::kFloat16: return attend_type<Float16>(cache, tile, split, state);
        case KvType::kE4M3: return attend_type<E4M3>(cache, tile, split, state);
    }
}

void merge(const AttentionState& into, const AttentionState& from, int64_t rows, int64_t dim) {
    for (int64_t r = 0; r < rows; ++r) {
        if (from.sum[r] == 0.0f) continue;  // the row sees no key of that split
        if (into.sum[r] == 0.0f) {          // nor of the ones before: its window begins in that split
            into.maximum[r] = from.maximum[r];
            into.sum[r] = from.sum[r];
            memcpy(into.accumulator + r * dim, from.accumulator + r * dim, (size_t)dim * sizeof(float));
            continue;
        }
        const float best = into.maximum[r] > from.maximum[r] ? into.maximum[r] : from.maximum[r];
        const float old_factor = exponential(into.maximum[r] - best);
        const float new_factor = exponential(from.maximum[r] - best);
        into.maximum[r] = best;
        into.sum[r] = into.sum[r] * old_factor + from.sum[r] * new_factor;
        for (int64_t d = 0; d < dim; d += kLanes) {
            const int64_t count = smaller(kLanes, dim - d);
            Vec old_part = mul(load_first(into.accumulator + r * dim + d, count), set(old_factor));
            Vec new_part = load_first(from.accumulator + r * dim + d, count);
            store_first(into.accumulator + r * dim + d, fma(new_part, set(new_factor), old_part), count);
        }
    }
}

void finish(const float* accumulator, float total, float* out, int64_t dim) {
    const float factor = total == 0.0f ? 0.0f : 1.0f / total;
    for (int64_t d = 0; d < dim; d += kLanes) {
        const int64_t count = smaller(kLanes, dim - d);
        store_first(out + d, mul(load_first(accumulator + d, count), set(factor)), count);
    }
}

// A part that is alone is copied: it must come out bit by bit. What an empty part holds is not looked at.
void merge_partials(const PartialMerge& call, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        float best = -__builtin_inff();
        int64_t used = 0;
        int64_t alone = 0;
        for (int64_t part = 0; part < call.parts; ++part) {
            const float lse = call.partial_lse[part * call.rows + row];
            if (lse == -__builtin_inff()) continue;
            ++used;
            alone = part;
            if (!(lse <= best)) best = lse;  // a NaN goes through to the output
        }
        float* out = call.out + row * call.dim;
        if (call.lse && used <= 1) call.lse[row] = best;
        if (used == 1 && out != call.partials + (alone * call.rows + row) * call.dim)
            memcpy(out, call.partials + (alone * call.rows + row) * call.dim, (size_t)call.dim * sizeof(float));
        if (used == 0) memset(out, 0, (size_t)call.dim * sizeof(float));
        if (used <= 1) continue;
        float total = 0.0f;
        for (int64_t part = 0; part < call.parts; ++part)
            total += exponential(call.partial_lse[part * call.rows + row] - best);
        if (call.lse) call.lse[row] = best + __builtin_logf(total);
        bool first = true;
        for (int64_t part = 0; part < call.parts; ++part) {
            const float lse = call.partial_lse[part * call.rows + row];
            if (lse == -__builtin_inff()) continue;
            const Vec weight = set(exponential(lse - best) / total);
            const float* partial = call.partials + (part * call.rows + row) * call.dim;
            for (int64_t d = 0; d < call.dim; d += kLanes) {
                const int64_t count = smaller(kLanes, call.dim - d);
                const Vec sum = first ? zero() : load_first(out + d, count);
                store_first(out + d, fma(weight, load_first(partial + d, count), sum), count);
            }
            first = false;
        }
    }
}

}  // namespace
}  // namespace tokenspeed::TOKENSPEED_ISA
