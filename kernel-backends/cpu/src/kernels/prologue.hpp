// The prologues: the only writers of the caches. Head norms, rotary, the write of keys and values or of a latent entry.

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

// The first `dim` elements of a head are rotated in place: pair (i, i + dim/2) by the angle of the position.
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
        const float* angles = call.cos_sin + (int64_t)call.positions[token] * call.rotary_dim;
        for (int64_t head = 0; head < call.q_heads; ++head) {
            float* q = call.q + token * call.q_stride + head * dim;
            if (call.q_norm) rms_norm(q, nullptr, call.q_norm, call.epsilon, q, 1, dim);
            rotate(q, angles, call.rotary_dim);
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
            rotate(key, angles, call.rotary_dim);
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
        case KvType::kE4M3: return prologue_type<E4M3>(call, begin, end);
    }
}

// The latent of a token is normed, the part of the key behind it rotated; both are one entry of the cache.
template <class Type>
void latent_prologue_type(const LatentPrologue& call, int64_t begin, int64_t end) {
    const int64_t head_dim = call.plain_dim + call.rotary_dim;
    for (int64_t token = begin; token < end; ++token) {
        const float* angles = call.cos_sin + (int64_t)call.positions[token] * call.rotary_dim;
        for (int64_t head = 0; head < call.q_heads; ++head)
            rotate(call.q + token * call.q_stride + head * head_dim + call.plain_dim, angles, call.rotary_dim);
        const int64_t slot = call.slots[token];
        if (slot < call.cache.page_size) continue;  // padding, as above
        float entry[kMaxLatentDim + kMaxRotaryDim];
        const float* source = call.compressed + token * call.compressed_stride;
        rms_norm(source, nullptr, call.latent_norm, call.epsilon, entry, 1, call.latent_dim);
        memcpy(entry + call.latent_dim, source + call.latent_dim, (size_t)call.rotary_dim * sizeof(float));
        rotate(entry + call.latent_dim, angles, call.rotary_dim);
        write_head<Type>(call.cache.keys, slot / call.cache.page_size, 0, slot % call.cache.page_size, entry,
                         call.latent_dim + call.rotary_dim);
    }
}

void latent_prologue(const LatentPrologue& call, int64_t begin, int64_t end) {
    switch (call.cache.type) {
        case KvType::kFloat32: return latent_prologue_type<Float32>(call, begin, end);
        case KvType::kBFloat16: return latent_prologue_type<BFloat16>(call, begin, end);
        case KvType::kFloat16: return latent_prologue_type<Float16>(call, begin, end);
        case KvType::kE4M3: return latent_prologue_type<E4M3>(call, begin, end);
    }
}

}  // namespace
}  // namespace tokenspeed::TOKENSPEED_ISA
