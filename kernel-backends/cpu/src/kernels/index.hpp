// The indexer of sparse attention: its keys on their way to the cache, and the scores of entries for one query.
//
// A score depends on its query and its entry only: every entry is multiplied with the heads in one order, whatever range it
// is asked for in.

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

// out = (x - mean) / sqrt(variance + epsilon) * weight + bias.
inline void layer_norm(const float* x, const float* weight, const float* bias, float epsilon, float* out, int64_t size) {
    Vec sums = zero();
    for (int64_t i = 0; i < size; i += kLanes) sums = add(sums, load_first(x + i, smaller(kLanes, size - i)));
    const Vec mean = set(sum(sums) / (float)size);
    Vec squares = zero();
    for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t count = smaller(kLanes, size - i);
        store_first(out + i, sub(load_first(x + i, count), mean), count);
        const Vec centred = load_first(out + i, count);  // zeros behind the end, which `sub` would not leave
        squares = fma(centred, centred, squares);
    }
    const Vec scale = set(1.0f / square_root(sum(squares) / (float)size + epsilon));
    for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t count = smaller(kLanes, size - i);
        const Vec normed = mul(mul(load_first(out + i, count), scale), load_first(weight + i, count));
        store_first(out + i, add(normed, load_first(bias + i, count)), count);
    }
}

template <class Type>
void index_prologue_type(const IndexPrologue& call, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
        const float* angles = call.cos_sin + (int64_t)call.positions[token] * call.rotary_dim;
        for (int64_t head = 0; head < call.q_heads; ++head)
            rotate(call.q + token * call.q_stride + head * call.dim, angles, call.rotary_dim);
        const int64_t slot = call.slots[token];
        if (slot < call.cache.page_size) continue;  // padding: block 0 is never read, so nothing need be written
        float entry[kMaxIndexDim];
        layer_norm(call.key + token * call.key_stride, call.norm_weight, call.norm_bias, call.epsilon, entry, call.dim);
        rotate(entry, angles, call.rotary_dim);
        write_head<Type>(call.cache.keys, slot / call.cache.page_size, 0, slot % call.cache.page_size, entry, call.dim);
    }
}

void index_prologue(const IndexPrologue& call, int64_t begin, int64_t end) {
    switch (call.cache.type) {
        case KvType::kFloat32: return index_prologue_type<Float32>(call, begin, end);
        case KvType::kBFloat16: return index_prologue_type<BFloat16>(call, begin, end);
        case KvType::kFloat16: return index_prologue_type<Float16>(call, begin, end);
        case KvType::kE4M3: return index_prologue_type<E4M3>(call, begin, end);
    }
}

template <class Type>
void index_scores_type(const Cache& cache, const IndexQuery& query, int64_t begin, int64_t end, float* scores) {
    AttentionTile tile{};
    tile.pages = query.pages;
    const typename Type::Element* keys[kKeyTile];
    float products[kAttentionRows * kKeyTile];
    for (int64_t first = begin; first < end; first += kKeyTile) {
        const int64_t count = smaller(kKeyTile, end - first);
        locate(cache.keys, cache, tile, first, count, keys);
        for (int64_t j = count; j % 4 != 0; ++j) keys[j] = keys[count - 1];
        float totals[kKeyTile] = {};
        for (int64_t head = 0; head < query.heads; head += kAttentionRows) {
            const int64_t rows = smaller(kAttentionRows, query.heads - head);
            for (int64_t j = 0; j < count; j += 4)
                score_rest<Type, kAttentionRows>(query.q + head * query.dim, rows, keys + j, query.dim, products + j);
            for (int64_t r = 0; r < rows; ++r) {
                const Vec weight = set(query.weights[head + r]);
                for (int64_t j = 0; j < count; j += kLanes) {
                    // The second operand of max survives a NaN. What lies behind the count is garbage and stays apart.
                    const Vec product = max(zero(), load(products + r * kKeyTile + j));
                    store(totals + j, fma(weight, product, load(totals + j)));
                }
            }
        }
        memcpy(scores + (first - begin), totals, (size_t)count * sizeof(float));
    }
}

void store_entry(KvType type, const float* source, uint8_t* target, int64_t dim) {
    const CachePlane plane{target, 0, 0, 0};
    switch (type) {
        case KvType::kFloat32: return write_head<Float32>(plane, 0, 0, 0, source, dim);
        case KvType::kBFloat16: return write_head<BFloat16>(plane, 0, 0, 0, source, dim);
        case KvType::kFloat16: return write_head<Float16>(plane, 0, 0, 0, source, dim);
        case KvType::kE4M3: return write_head<E4M3>(plane, 0, 0, 0, source, dim);
    }
}

template <class Type>
void load_entry_type(const uint8_t* source, float* target, int64_t dim) {
    const auto* elements = (const typename Type::Element*)source;
    for (int64_t i = 0; i < dim; i += kLanes) {
        const int64_t count = smaller(kLanes, dim - i);
        store_first(target + i, Type::load_first(elements + i, count), count);
    }
}

void load_entry(KvType type, const uint8_t* source, float* target, int64_t dim) {
    switch (type) {
        case KvType::kFloat32: return load_entry_type<Float32>(source, target, dim);
        case KvType::kBFloat16: return load_entry_type<BFloat16>(source, target, dim);
        case KvType::kFloat16: return load_entry_type<Float16>(source, target, dim);
        case KvType::kE4M3: return load_entry_type<E4M3>(source, target, dim);
    }
}

void index_scores(const Cache& cache, const IndexQuery& query, int64_t begin, int64_t end, float* scores) {
    switch (cache.type) {
        case KvType::kFloat32: return index_scores_type<Float32>(cache, query, begin, end, scores);
        case KvType::kBFloat16: return index_scores_type<BFloat16>(cache, query, begin, end, scores);
        case KvType::kFloat16: return index_scores_type<Float16>(cache, query, begin, end, scores);
        case KvType::kE4M3: return index_scores_type<E4M3>(cache, query, begin, end, scores);
    }
}

}  // namespace
}  // namespace tokenspeed::TOKENSPEED_ISA
