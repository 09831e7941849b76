// Paged grouped-query attention and the prologue that writes the cache.
//
// The keys of a sequence are cut into splits of kKeySplit and those into tiles of kKeyTile, both counted from position 0.
// A split is an online softmax over its tiles, splits are merged in sequence order. What a query row computes depends on
// its position and the keys only: not on how many rows share the pass, how a prompt was chunked, or how many threads work.
//
// With a window a row begins at the tile that its first key lies in. Tiles and pages before the first row's window are not
// looked at; their entries of the page table may be anything.

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

// Heads are rotated in place: pair (i, i + dim/2) by the angle of the position.
inline void rotate(float* head, const float* cos_sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += kLanes) {
        const int64_t count = smaller(kLanes, half - i);
        Vec cosine = load_first(cos_sin + i, count);
        Vec sine = load_first(cos_sin + half + i, count);
        Vec low = load_first(head + i, count);
        Vec high = load_first(head + half + i, count);
        store_first(head + i, sub(mul(low, cosine), mul(high, sine)), count);
        store_first(head + half + i, add(mul(high, cosine), mul(low, sine)), count);
    }
}

template <class Type>
void write_head(const CachePlane& plane, int64_t block, int64_t head, int64_t offset, const float* source, int64_t dim) {
    auto* target = (typename Type::Element*)plane.data + block * plane.block_stride + head * plane.head_stride +
                   offset * plane.token_stride;
    for (int64_t i = 0; i < dim; i += kLanes) {
        const int64_t count = smaller(kLanes, dim - i);
        Type::store_first(target + i, load_first(source + i, count), count);
    }
}

template <class Type>
void prologue_type(const Prologue& call, int64_t begin, int64_t end) {
    const int64_t dim = call.cache.head_dim;
    for (int64_t token = begin; token < end; ++token) {
        const float* angles = call.cos_sin + (int64_t)call.positions[token] * dim;
        for (int64_t head = 0; head < call.q_heads; ++head) {
            float* q = call.q + token * call.q_stride + head * dim;
            if (call.q_norm) rms_norm(q, nullptr, call.q_norm, call.epsilon, q, 1, dim);
            rotate(q, angles, dim);
        }
        const int64_t slot = call.slots[token];
        if (slot < call.cache.page_size) continue;  // padding: block 0 is never read, so nothing need be written
        const int64_t block = slot / call.cache.page_size;
        const int64_t offset = slot % call.cache.page_size;
        for (int64_t head = 0; head < call.kv_heads; ++head) {
            float key[kMaxHeadDim];
            const float* source = call.k + token * call.k_stride + head * dim;
            if (call.k_norm)
                rms_norm(source, nullptr, call.k_norm, call.epsilon, key, 1, dim);
            else
                memcpy(key, source, (size_t)dim * sizeof(float));
            rotate(key, angles, dim);
            write_head<Type>(call.cache.keys, block, head, offset, key, dim);
            const float* value = call.v + token * call.v_stride + head * dim;
            write_head<Type>(call.cache.values, block, head, offset, value, dim);
        }
    }
}

void prologue(const Prologue& call, int64_t begin, int64_t end) {
    switch (call.cache.type) {
        case KvType::kFloat32: return prologue_type<Float32>(call, begin, end);
        case KvType::kBFloat16: return prologue_type<BFloat16>(call, begin, end);
        case KvType::kFloat16: return prologue_type<Float16>(call, begin, end);
    }
}

// scores[r * kKeyTile + j] = query row r . key j, for Rows rows and four keys.
template <class Type, int Rows>
void score_four(const float* queries, const typename Type::Element* const* keys, int64_t dim, float* scores) {
    Vec sums[Rows][4];
    for (int r = 0; r < Rows; ++r)
        for (int j = 0; j < 4; ++j) sums[r][j] = zero();
    const int64_t whole = dim / kLanes * kLanes;
    for (int64_t d = 0; d < whole; d += kLanes) {
        Vec key[4];
        for (int j = 0; j < 4; ++j) key[j] = Type::load(keys[j] + d);
        for (int r = 0; r < Rows; ++r) {
            Vec query = load(queries + r * dim + d);
            for (int j = 0; j < 4; ++j) sums[r][j] = fma(query, key[j], sums[r][j]);
        }
    }
    if (whole < dim) {
        const int64_t count = dim - whole;
        for (int r = 0; r < Rows; ++r) {
            Vec query = load_first(queries + r * dim + whole, count);
            for (int j = 0; j < 4; ++j) sums[r][j] = fma(query, Type::load_first(keys[j] + whole, count), sums[r][j]);
        }
    }
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

// accumulator[r, d .. d + Vectors * kLanes) = accumulator * factor[r] + sum over keys of weight[r, j] * value[j].
template <class Type, int Rows, int Vectors, bool Tail>
void weigh_values(const float* weights, const float* factors, const typename Type::Element* const* values, int64_t keys,
                  float* accumulator, int64_t dim, int64_t d) {
    const int64_t count = dim - d;  // used where Tail
    Vec sums[Rows][Vectors];
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) {
            const float* p = accumulator + r * dim + d + v * kLanes;
            sums[r][v] = mul(Tail ? load_first(p, count) : load(p), set(factors[r]));
        }
    for (int64_t j = 0; j < keys; ++j) {
        Vec value[Vectors];
        for (int v = 0; v < Vectors; ++v)
            value[v] = Tail ? Type::load_first(values[j] + d, count) : Type::load(values[j] + d + v * kLanes);
        for (int r = 0; r < Rows; ++r) {
            Vec weight = set(weights[r * kKeyTile + j]);
            for (int v = 0; v < Vectors; ++v) sums[r][v] = fma(weight, value[v], sums[r][v]);
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) {
            float* p = accumulator + r * dim + d + v * kLanes;
            if (Tail)
                store_first(p, sums[r][v], count);
            else
                store(p, sums[r][v]);
        }
}

template <class Type, int Rows>
void weigh_rest(int64_t rows, const float* weights, const float* factors, const typename Type::Element* const* values,
                int64_t keys, float* accumulator, int64_t dim) {
    if constexpr (Rows > 0) {
        if (rows != Rows)
            return weigh_rest<Type, Rows - 1>(rows, weights, factors, values, keys, accumulator, dim);
        int64_t d = 0;
        for (; d + 4 * kLanes <= dim; d += 4 * kLanes)
            weigh_values<Type, Rows, 4, false>(weights, factors, values, keys, accumulator, dim, d);
        for (; d + kLanes <= dim; d += kLanes)
            weigh_values<Type, Rows, 1, false>(weights, factors, values, keys, accumulator, dim, d);
        if (d < dim) weigh_values<Type, Rows, 1, true>(weights, factors, values, keys, accumulator, dim, d);
    }
}

// Turns the scores of one row, of the keys [first, end) of a tile, into weights, in place; returns the factor for what was
// accumulated before.
inline float soften(float* scores, int64_t first, int64_t end, float& best, float& total) {
    for (int64_t j = 0; j < first; ++j) scores[j] = -__builtin_inff();
    for (int64_t j = end; j < kKeyTile; ++j) scores[j] = -__builtin_inff();
    Vec top = load(scores);
    for (int64_t j = kLanes; j < kKeyTile; j += kLanes) top = max(top, load(scores + j));
    const float tile_best = TOKENSPEED_ISA::maximum(top);
    const float next = tile_best > best ? tile_best : best;
    Vec sums = zero();
    for (int64_t j = 0; j < kKeyTile; j += kLanes) {
        Vec weight = exponential(sub(load(scores + j), set(next)));
        store(scores + j, weight);
        sums = add(sums, weight);
    }
    const float factor = exponential(best - next);
    total = total * factor + sum(sums);
    best = next;
    return factor;
}

// Keys and values of positions [begin, begin + count) of a sequence.
template <class Element>
void locate(const CachePlane& plane, const Cache& cache, const AttentionTile& tile, int64_t begin, int64_t count,
            const Element** pointers) {
    int64_t page = begin / cache.page_size;
    int64_t offset = begin % cache.page_size;
    for (int64_t j = 0; j < count; ++page, offset = 0) {
        const Element* p = (const Element*)plane.data + (int64_t)tile.pages[page] * plane.block_stride +
                           tile.kv_head * plane.head_stride + offset * plane.token_stride;
        for (; offset < cache.page_size && j < count; ++offset, ++j, p += plane.token_stride) pointers[j] = p;
    }
}

template <class Type>
void attend_type(const Cache& cache, const AttentionTile& tile, int64_t split, const AttentionState& state) {
    using Element = typename Type::Element;
    const int64_t dim = cache.head_dim;
    for (int64_t r = 0; r < tile.rows; ++r) {
        state.maximum[r] = -__builtin_inff();
        state.sum[r] = 0.0f;
    }
    memset(state.accumulator, 0, (size_t)(tile.rows * dim) * sizeof(float));
    const int64_t start = larger(tile.row_starts[0], split * kKeySplit);
    const int64_t end = smaller(tile.row_limits[tile.rows - 1], (split + 1) * kKeySplit);
    float scores[kMaxTileRows * kKeyTile];
    float factors[kMaxTileRows];
    const Element* keys[kKeyTile];
    const Element* values[kKeyTile];
    for (int64_t begin = start / kKeyTile * kKeyTile; begin < end; begin += kKeyTile) {
        const int64_t skipped = larger(0, start - begin);
        const int64_t count = smaller(kKeyTile, end - begin);
        locate(cache.keys, cache, tile, begin + skipped, count - skipped, keys + skipped);
        locate(cache.values, cache, tile, begin + skipped, count - skipped, values + skipped);
        const int64_t scored = skipped / 4 * 4;
        for (int64_t j = scored; j < skipped; ++j) keys[j] = keys[skipped];  // these are scored, then masked
        for (int64_t j = count; j % 4 != 0; ++j) keys[j] = keys[count - 1];
        for (int64_t r = 0; r < tile.rows; r += kAttentionRows) {
            const int64_t rows = smaller(kAttentionRows, tile.rows - r);
            for (int64_t j = scored; j < count; j += 4)
                score_rest<Type, kAttentionRows>(tile.queries + r * dim, rows, keys + j, dim, scores + r * kKeyTile + j);
        }
        // Rows are taken together while they see the same keys of this tile: a weight of zero must not meet a value
        // that the row may not see.
        for (int64_t r = 0; r < tile.rows;) {
            const int64_t first = larger(0, tile.row_starts[r] - begin);
            const int64_t behind = smaller(kKeyTile, tile.row_limits[r] - begin);
            int64_t rows = 0;
            while (rows < kAttentionRows && r + rows < tile.rows &&
                   larger(0, tile.row_starts[r + rows] - begin) == first &&
                   smaller(kKeyTile, tile.row_limits[r + rows] - begin) == behind) {
                if (first < behind)
                    factors[rows] = soften(scores + (r + rows) * kKeyTile, first, behind, state.maximum[r + rows],
                                           state.sum[r + rows]);
                ++rows;
            }
            if (first < behind)
                weigh_rest<Type, kAttentionRows>(rows, scores + r * kKeyTile + first, factors, values + first,
                                                 behind - first, state.accumulator + r * dim, dim);
            r += rows;
        }
    }
}

void attend(const Cache& cache, const AttentionTile& tile, int64_t split, const AttentionState& state) {
    switch (cache.type) {
        case KvType::kFloat32: return attend_type<Float32>(cache, tile, split, state);
        case KvType::kBFloat16: return attend_type<BFloat16>(cache, tile, split, state);
        case KvType::kFloat16: return attend_type<Float16>(cache, tile, split, state);
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

}  // namespace
}  // namespace tokenspeed::TOKENSPEED_ISA
