// Layers with a state: the short convolution, the gated delta rule, and the gated norm behind it. Each channel, and each
// column of a state, is worked on alone and token by token, so its bits depend on nothing else.

#include "../recurrent_calls.hpp"

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

inline Vec sigmoid(Vec x) { return div(set(1.0f), add(set(1.0f), exponential(sub(zero(), x)))); }

// log(1 + e^x) to a few units in the last place: the greater of x and 0, and log(1 + u) of u = e^-|x|, which is twice the
// inverse hyperbolic tangent of u / (2 + u), at most 1/3.
inline Vec softplus(Vec x) {
    Vec u = exponential(min(x, sub(zero(), x)));
    Vec s = div(u, add(set(2.0f), u));
    Vec squared = mul(s, s);
    Vec series = set(1.0f / 15.0f);
    series = fma(series, squared, set(1.0f / 13.0f));
    series = fma(series, squared, set(1.0f / 11.0f));
    series = fma(series, squared, set(1.0f / 9.0f));
    series = fma(series, squared, set(1.0f / 7.0f));
    series = fma(series, squared, set(1.0f / 5.0f));
    series = fma(series, squared, set(1.0f / 3.0f));
    series = fma(series, squared, set(1.0f));
    return fma(add(s, s), series, max(zero(), x));
}

inline float first_lane(Vec x) {
    float lanes[kLanes];
    store(lanes, x);
    return lanes[0];
}

// The inputs that the tokens of one row see: its own, and those of its source before them; null stands for zeros.
struct ConvInputs {
    const float* x;
    int64_t x_stride;
    const float* before;
    int64_t before_stride;
    int64_t kept;  // inputs of a state

    const float* at(int64_t token) const {
        if (token >= 0) return x + token * x_stride;
        return before ? before + (kept + token) * before_stride : nullptr;
    }
};

inline void conv_token(const CausalConv& call, const ConvInputs& inputs, int64_t token, float* out, int64_t begin,
                       int64_t end) {
    for (int64_t channel = begin; channel < end; channel += kLanes) {
        const int64_t count = smaller(kLanes, end - channel);
        Vec total = call.bias ? load_first(call.bias + channel, count) : zero();
        for (int64_t place = 0; place < call.width; ++place) {
            const float* input = inputs.at(token - (call.width - 1) + place);
            if (!input) continue;
            total = fma(load_first(call.weight + place * call.channels + channel, count),
                        load_first(input + channel, count), total);
        }
        store_first(out + channel, mul(total, sigmoid(total)), count);
    }
}

void causal_conv(const CausalConv& call, int64_t begin, int64_t end) {
    const int64_t kept = call.width - 1;
    for (int64_t row = 0; row < call.rows.count; ++row) {
        const int64_t first = call.rows.starts[row], tokens = call.rows.starts[row + 1] - first;
        if (tokens <= 0) continue;
        const int64_t source = call.rows.sources[row], target = call.rows.targets[row];
        const ConvInputs inputs{call.x + first * call.x_stride, call.x_stride,
                                source ? call.state.data + source * call.state.block_stride : nullptr,
                                call.state.head_stride, kept};
        for (int64_t token = 0; token < tokens; ++token)
            conv_token(call, inputs, token, call.out + (first + token) * call.channels, begin, end);
        if (!target) continue;
        // The oldest first: where source and target are one, an input moves towards the beginning.
        for (int64_t place = 0; place < kept; ++place) {
            float* to = call.state.data + target * call.state.block_stride + place * call.state.head_stride;
            const float* input = inputs.at(tokens - kept + place);
            for (int64_t channel = begin; channel < end; channel += kLanes) {
                const int64_t count = smaller(kLanes, end - channel);
                store_first(to + channel, input ? load_first(input + channel, count) : zero(), count);
            }
        }
    }
}

// What the state takes of up to kDeltaTokens tokens of one head, [tokens, key_dim] each, and [tokens].
struct DeltaTokens {
    float* queries;  // of length 1 / sqrt(key_dim)
    float* keys;     // of length 1
    float* decays;
    float* seen;  // decay * key: what is read of the state before it decays
    float* betas;
};

// out = x / sqrt(x . x + epsilon) * factor.
inline void unit(const float* x, float epsilon, float factor, float* out, int64_t size) {
    Vec squares = zero();
    for (int64_t i = 0; i < size; i += kLanes) {
        Vec value = load_first(x + i, smaller(kLanes, size - i));
        squares = fma(value, value, squares);
    }
    const Vec scale = set(factor / square_root(sum(squares) + epsilon));
    for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t count = smaller(kLanes, size - i);
        store_first(out + i, mul(load_first(x + i, count), scale), count);
    }
}

inline Vec decay_of(Vec raw, Vec bias, Vec rate) { return exponential(mul(sub(zero(), rate), softplus(add(raw, bias)))); }

inline void prepare_token(const GatedDelta& call, int64_t token, int64_t head, int64_t place, const DeltaTokens& into) {
    const int64_t size = call.key_dim, key_head = head / (call.value_heads / call.key_heads);
    float* keys = into.keys + place * size;
    float* decays = into.decays + place * size;
    unit(call.q.data + token * call.q.token_stride + key_head * size, call.epsilon, 1.0f / square_root((float)size),
         into.queries + place * size, size);
    unit(call.k.data + token * call.k.token_stride + key_head * size, call.epsilon, 1.0f, keys, size);
    into.betas[place] = first_lane(sigmoid(set(call.beta.data[token * call.beta.token_stride + head])));
    const float* raw = call.decay.data + token * call.decay.token_stride + (call.channel_decay ? head * size : head);
    const float* bias = call.bias + (call.channel_decay ? head * size : head);
    const Vec rate = set(call.rate[head]);
    const Vec shared = decay_of(set(raw[0]), set(bias[0]), rate);
    for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t count = smaller(kLanes, size - i);
        Vec decay = shared;
        if (call.channel_decay) decay = decay_of(load_first(raw + i, count), load_first(bias + i, count), rate);
        store_first(decays + i, decay, count);
        store_first(into.seen + place * size + i, mul(decay, load_first(keys + i, count)), count);
    }
}

// Some columns of a state, [key_dim] of them `stride` apart.
struct Columns {
    float* data;
    int64_t stride;
};

// Sums over the keys are taken in so many parts, for the processor to overlap them; the same for any number of columns, so
// that their bits do not hang on it.
constexpr int kChains = kLanes == 16 ? 2 : 1;

// The rule for one token and some columns of a state: `Vectors` vectors of them, the last with `count` lanes. `from` and
// `to` may be the same. `Ahead`: the next head's state is asked for meanwhile, as it lies behind this one.
template <int Vectors, bool Ahead = false>
inline void delta_columns(const DeltaTokens& tokens, int64_t place, int64_t size, const Columns& from, const Columns& to,
                          const float* v, float* out, int64_t count) {
    const float* keys = tokens.keys + place * size;
    const float* queries = tokens.queries + place * size;
    const float* decays = tokens.decays + place * size;
    const float* seen = tokens.seen + place * size;
    auto lanes = [count](int vector) { return vector == Vectors - 1 ? count : (int64_t)kLanes; };

    Vec sums[kChains][Vectors];
    for (int chain = 0; chain < kChains; ++chain)
        for (int vector = 0; vector < Vectors; ++vector) sums[chain][vector] = zero();
    int64_t key = 0;
    for (; key + kChains <= size; key += kChains)
        for (int chain = 0; chain < kChains; ++chain)
            for (int vector = 0; vector < Vectors; ++vector)
                sums[chain][vector] = fma(load_first(from.data + (key + chain) * from.stride + vector * kLanes, lanes(vector)),
                                          set(seen[key + chain]), sums[chain][vector]);
    for (; key < size; ++key)
        for (int vector = 0; vector < Vectors; ++vector)
            sums[0][vector] = fma(load_first(from.data + key * from.stride + vector * kLanes, lanes(vector)), set(seen[key]),
                                  sums[0][vector]);

    Vec update[Vectors];
    for (int vector = 0; vector < Vectors; ++vector) {
        for (int width = kChains / 2; width > 0; width /= 2)
            for (int chain = 0; chain < width; ++chain)
                sums[chain][vector] = add(sums[chain][vector], sums[chain + width][vector]);
        Vec difference = sub(load_first(v + vector * kLanes, lanes(vector)), sums[0][vector]);
        update[vector] = mul(set(tokens.betas[place]), difference);
        for (int chain = 0; chain < kChains; ++chain) sums[chain][vector] = zero();
    }
    auto take = [&](int64_t at, int chain) {
        const Vec k = set(keys[at]), decay = set(decays[at]), q = set(queries[at]);
        for (int vector = 0; vector < Vectors; ++vector) {
            Vec state = mul(load_first(from.data + at * from.stride + vector * kLanes, lanes(vector)), decay);
            state = fma(k, update[vector], state);
            store_first(to.data + at * to.stride + vector * kLanes, state, lanes(vector));
            sums[chain][vector] = fma(state, q, sums[chain][vector]);
            if (Ahead) __builtin_prefetch(from.data + (size + at) * from.stride + vector * kLanes, 0, 2);
        }
    };
    for (key = 0; key + kChains <= size; key += kChains)
        for (int chain = 0; chain < kChains; ++chain) take(key + chain, chain);
    for (; key < size; ++key) take(key, 0);
    for (int vector = 0; vector < Vectors; ++vector) {
        for (int width = kChains / 2; width > 0; width /= 2)
            for (int chain = 0; chain < width; ++chain)
                sums[chain][vector] = add(sums[chain][vector], sums[chain + width][vector]);
        store_first(out + vector * kLanes, sums[0][vector], lanes(vector));
    }
}

constexpr int kDeltaVectors = kDeltaColumns / kLanes;
constexpr int kWideVectors = 8;

// Prepared tokens [0, count) of a head, whose first is `first`. One alone takes the state in wide pieces, as memory streams
// best. Several take a few columns at a time, which lie side by side in `packed` between two tokens: they stay in the
// first-level cache, where rows a power of two apart would crowd into a few sets.
void delta_tokens(const GatedDelta& call, const DeltaTokens& tokens, int64_t first, int64_t count, int64_t head,
                  float* from, float* to, float* packed) {
    const int64_t size = call.value_dim;
    auto take = [&](auto rule, int64_t column, int64_t lanes) {
        const Columns between{packed, kDeltaColumns};
        for (int64_t place = 0; place < count; ++place) {
            const int64_t token = first + place;
            rule(tokens, place, call.key_dim, place ? between : Columns{from + column, size},
                 place + 1 < count ? between : Columns{to + column, size},
                 call.v.data + token * call.v.token_stride + head * size + column,
                 call.out + (token * call.value_heads + head) * size + column, lanes);
        }
    };
    int64_t column = 0;
    if (count == 1)
        for (; column + kWideVectors * kLanes <= size; column += kWideVectors * kLanes)
            take(delta_columns<kWideVectors, true>, column, kLanes);
    for (; column + kDeltaColumns <= size; column += kDeltaColumns) take(delta_columns<kDeltaVectors>, column, kLanes);
    for (; column < size; column += kLanes) take(delta_columns<1>, column, smaller(kLanes, size - column));
}

void gated_delta(const GatedDelta& call, int64_t begin, int64_t end, float* scratch) {
    const int64_t size = call.key_dim, elements = size * call.value_dim;
    const DeltaTokens tokens{scratch, scratch + kDeltaTokens * size, scratch + 2 * kDeltaTokens * size,
                             scratch + 3 * kDeltaTokens * size, scratch + 4 * kDeltaTokens * size};
    float* packed = scratch + kDeltaTokens * (4 * size + 1);
    float* passing = packed + size * kDeltaColumns;
    for (int64_t place = begin; place < end; ++place) {
        const int64_t row = place / call.value_heads, head = place % call.value_heads;
        const int64_t first = call.rows.starts[row], stop = call.rows.starts[row + 1];
        if (first >= stop) continue;
        const int64_t source = call.rows.sources[row], target = call.rows.targets[row];
        float* plane = call.state.data + head * call.state.head_stride;
        float* to = target ? plane + target * call.state.block_stride : passing;
        float* from = source ? plane + source * call.state.block_stride : to;
        if (!source) memset(to, 0, (size_t)elements * sizeof(float));
        for (int64_t token = first; token < stop; token += kDeltaTokens) {
            const int64_t count = smaller(kDeltaTokens, stop - token);
            for (int64_t i = 0; i < count; ++i) prepare_token(call, token + i, head, i, tokens);
            delta_tokens(call, tokens, token, count, head, from, to, packed);
            from = to;
        }
    }
}

void gated_norm(const GatedNorm& call, int64_t begin, int64_t end) {
    for (int64_t place = begin; place < end; ++place) {
        const float* x = call.x + place * call.dim;
        const float* gate = call.gate.data + place / call.heads * call.gate.token_stride + place % call.heads * call.dim;
        const Vec factor = set(inverse_rms(x, nullptr, call.epsilon, call.dim));
        for (int64_t i = 0; i < call.dim; i += kLanes) {
            const int64_t count = smaller(kLanes, call.dim - i);
            Vec value = mul(mul(load_first(x + i, count), factor), load_first(call.weight + i, count));
            const Vec raw = load_first(gate + i, count);
            Vec opened = sigmoid(raw);
            if (call.silu) opened = mul(raw, opened);
            store_first(call.out + place * call.dim + i, mul(value, opened), count);
        }
    }
}

void sigmoid_gate(const float* x, const float* gate, int64_t gate_stride, float* out, int64_t rows, int64_t size,
                  int64_t gates) {
    const int64_t share = gates ? size / gates : 0;
    for (int64_t row = 0; row < rows; ++row) {
        const float* source = x + row * size;
        const float* from = gate + row * gate_stride;
        float* to = out + row * size;
        if (share == 1) {
            for (int64_t i = 0; i < size; i += kLanes) {
                const int64_t count = smaller(kLanes, size - i);
                store_first(to + i, mul(load_first(source + i, count), sigmoid(load_first(from + i, count))), count);
            }
            continue;
        }
        for (int64_t part = 0; part < gates; ++part) {
            const Vec factor = sigmoid(set(from[part]));
            for (int64_t i = part * share; i < (part + 1) * share; i += kLanes) {
                const int64_t count = smaller(kLanes, (part + 1) * share - i);
                store_first(to + i, mul(load_first(source + i, count), factor), count);
            }
        }
    }
}

void add_to(const float* x, float* out, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t count = smaller(kLanes, size - i);
        store_first(out + i, add(load_first(out + i, count), load_first(x + i, count)), count);
    }
}

}  // namespace
}  // namespace tokenspeed::TOKENSPEED_ISA
