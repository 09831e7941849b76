// The calls of recurrent layers and gates, as their kernels take them. Plain data and C headers only, as in table.hpp.
#pragma once

#include <stdint.h>

namespace tokenspeed {

// Where the rows of a batch have their state: row b has the tokens starts[b] up to starts[b + 1]; block 0 is no block.
struct StateRows {
    const int32_t* starts;
    const int32_t* sources;
    const int32_t* targets;
    int64_t count;
};

// A state's view of a paged cache, float32; strides in elements, what a head holds is dense.
struct StatePlane {
    float* data;
    int64_t block_stride;
    int64_t head_stride;
};

struct CausalConv {
    const float* x;  // [tokens, channels]
    int64_t x_stride;
    int64_t channels, width;
    const float* weight;  // [width, channels], the oldest input's first
    const float* bias;    // [channels] or null
    StatePlane state;     // heads are inputs, the oldest first
    StateRows rows;
    float* out;  // [tokens, channels], dense
};

// Elements of one of a token's inputs; its own elements are dense.
struct TokenPart {
    const float* data;
    int64_t token_stride;
};

struct GatedDelta {
    TokenPart q, k;   // [tokens, key_heads, key_dim]
    TokenPart v;      // [tokens, value_heads, value_dim]
    TokenPart decay;  // [tokens, value_heads], or [tokens, value_heads, key_dim]
    TokenPart beta;   // [tokens, value_heads]
    const float* rate;  // [value_heads]
    const float* bias;  // as one token's decays
    int64_t key_heads, value_heads, key_dim, value_dim;
    bool channel_decay;
    float epsilon;
    StatePlane state;  // of a head [key_dim, value_dim]
    StateRows rows;
    float* out;  // [tokens, value_heads, value_dim], dense
};

constexpr int64_t kDeltaTokens = 16;  // tokens whose inputs are prepared together, before the state takes them

constexpr int64_t kDeltaColumns = 32;  // of a state, worked on together; with 128 keys half of a first-level cache

// Floats of scratch that `gated_delta` needs: keys and queries, what decays them, columns of a state between two tokens,
// and a state that nobody keeps.
constexpr int64_t delta_scratch(int64_t key_dim, int64_t value_dim) {
    return kDeltaTokens * (4 * key_dim + 1) + key_dim * (kDeltaColumns + value_dim);
}

struct GatedNorm {
    const float* x;  // [tokens, heads, dim], dense; may be out
    TokenPart gate;
    const float* weight;  // [dim]
    float epsilon;
    bool silu;  // else the gate's sigmoid
    float* out;
    int64_t heads, dim;
};

// Serial kernels over a range, as those of KernelTable.
struct RecurrentKernels {
    // Channels [begin, end) of all rows.
    void (*causal_conv)(const CausalConv& call, int64_t begin, int64_t end);
    // Heads [begin, end) of the batch: head h of row b is b * value_heads + h.
    void (*gated_delta)(const GatedDelta& call, int64_t begin, int64_t end, float* scratch);
    // Heads [begin, end): head h of token t is t * heads + h.
    void (*gated_norm)(const GatedNorm& call, int64_t begin, int64_t end);
    // out = x * sigmoid(gate), each gate that of size / gates elements; x may be out.
    void (*sigmoid_gate)(const float* x, const float* gate, int64_t gate_stride, float* out, int64_t rows, int64_t size,
                         int64_t gates);
    void (*add)(const float* x, float* out, int64_t size);
};

}  // namespace tokenspeed
