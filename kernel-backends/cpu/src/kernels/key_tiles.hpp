// What every attention over tiles of keys shares: where the keys lie, the online softmax, and which rows go together.

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

// Neighbouring query rows that see the same keys [first, end) of a tile.
struct Run {
    int64_t row;
    int64_t rows;  // at most kAttentionRows
    int64_t first;
    int64_t end;
};

// Caps the scores of the keys [first, end) of one row, in place; its neighbours in their vectors come along.
inline void cap_scores(float* scores, int64_t first, int64_t end, float cap) {
    for (int64_t j = first / kLanes * kLanes; j < end; j += kLanes)
        store(scores + j, mul(hyperbolic_tangent(div(load(scores + j), set(cap))), set(cap)));
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
    const float factor = next == best ? 1.0f : exponential(best - next);
    total = total * factor + sum(sums);
    best = next;
    return factor;
}

// A tile of keys: the positions [begin + skipped, begin + count) of a sequence, where they lie.
template <class Type>
struct KeyTile {
    using Element = typename Type::Element;
    int64_t begin;
    int64_t skipped;
    int64_t count;  // 0 or less: no keys
    const Element* keys[kKeyTile];
    const Element* values[kKeyTile];
};

template <class Element>
void locate(const CachePlane& plane, const Cache& cache, const AttentionTile& tile, int64_t begin, int64_t count,
            const Element** pointers) {
    if (tile.selected) {
        for (int64_t j = 0; j < count; ++j) {
            const int64_t entry = tile.selected[begin + j];
            pointers[j] = (const Element*)plane.data +
                          (int64_t)tile.pages[entry / cache.page_size] * plane.block_stride +
                          tile.kv_head * plane.head_stride + entry % cache.page_size * plane.token_stride;
        }
        return;
    }
    int64_t page = begin / cache.page_size;
    int64_t offset = begin % cache.page_size;
    for (int64_t j = 0; j < count; ++page, offset = 0) {
        const Element* p = (const Element*)plane.data + (int64_t)tile.pages[page] * plane.block_stride +
                           tile.kv_head * plane.head_stride + offset * plane.token_stride;
        for (; offset < cache.page_size && j < count; ++offset, ++j, p += plane.token_stride) pointers[j] = p;
    }
}

// Finds the keys of [start, end) that lie in the tile at `begin`.
template <class Type>
void find_keys(const Cache& cache, const AttentionTile& tile, int64_t begin, int64_t start, int64_t end,
               KeyTile<Type>& found) {
    const int64_t skipped = larger(0, start - begin);
    const int64_t count = smaller(kKeyTile, end - begin);
    found.begin = begin;
    found.skipped = skipped;
    found.count = count;
    if (count <= skipped) return;
    locate(cache.keys, cache, tile, begin + skipped, count - skipped, found.keys + skipped);
    locate(cache.values, cache, tile, begin + skipped, count - skipped, found.values + skipped);
}

template <class Element>
inline void ask_for(const Element* p, int64_t dim) {
    const char* first = (const char*)p;
    for (int64_t byte = 0; byte < dim * (int64_t)sizeof(Element); byte += 64) __builtin_prefetch(first + byte, 0, 2);
}

// Softens the rows' scores of the tile at `begin`, [tile.rows, kKeyTile], and returns how many runs the rows make. Rows are
// taken together while they see the same keys of this tile: a weight of zero must not meet a value that the row may not see.
int64_t soften_rows(const AttentionTile& tile, int64_t begin, float* scores, const AttentionState& state, float* factors,
                    Run* runs) {
    int64_t count = 0;
    for (int64_t r = 0; r < tile.rows; ++r) {
        const int64_t first = larger(0, tile.row_starts[r] - begin);
        const int64_t end = smaller(kKeyTile, tile.row_limits[r] - begin);
        if (first >= end) continue;
        if (tile.soft_cap > 0.0f) cap_scores(scores + r * kKeyTile, first, end, tile.soft_cap);
        factors[r] = soften(scores + r * kKeyTile, first, end, state.maximum[r], state.sum[r]);
        Run& last = runs[count > 0 ? count - 1 : 0];
        if (count > 0 && last.row + last.rows == r && last.rows < kAttentionRows && last.first == first && last.end == end)
            ++last.rows;
        else
            runs[count++] = {r, 1, first, end};
    }
    return count;
}

// A state that has seen nothing.
void clear(const AttentionTile& tile, const AttentionState& state) {
    for (int64_t r = 0; r < tile.rows; ++r) {
        state.maximum[r] = -__builtin_inff();
        state.sum[r] = 0.0f;
    }
    memset(state.accumulator, 0, (size_t)(tile.rows * tile.value_dim) * sizeof(float));
}

}  // namespace
}  // namespace tokenspeed::TOKENSPEED_ISA
