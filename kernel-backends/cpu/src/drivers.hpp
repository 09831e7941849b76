// The operations, each over a whole call: they cut the work into ranges, spread them over threads and run the kernels in
// force. Results do not depend on the number of threads. Pointers are trusted; sizes of 0 are fine.
#pragma once

#include <cstdint>

#include "panels.hpp"
#include "table.hpp"

namespace tokenspeed {

// x [tokens, columns], out [tokens, rows], dense.
void run_linear(const Weight& weight, const float* x, int64_t tokens, float* out);

// The same with x rounded to bfloat16 beforehand; bfloat16 weights only. Throws std::logic_error where the weight is of another
// format or the instruction set in force has no such products.
void run_rounded_linear(const Weight& weight, const float* x, int64_t tokens, float* out);

// The same with a weight in panels and x in 8 bits, or in 15 where `wide`; bias [rows] may be null.
void run_panel_linear(const Panels& weight, const float* bias, const float* x, int64_t tokens, float* out, bool wide);

// out[t] = row ids[t] of the weight; ids [tokens].
void run_embedding(const Weight& weight, const int32_t* ids, int64_t tokens, float* out);

// residual may be null.
void run_rms_norm(const float* x, float* residual, const float* weight, float epsilon, float* out, int64_t rows,
                  int64_t size);

void run_silu_and_mul(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, float* out,
                      int64_t rows, int64_t size);

void run_clamped_swiglu(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, float alpha, float limit,
                        float offset, float* out, int64_t rows, int64_t size);

void run_gelu_tanh_and_mul(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, float* out,
                           int64_t rows, int64_t size);

// out[row] = x[row] * factors[places[row]], or factors[0] where places is null; out may be x.
void run_scale_rows(const float* x, const float* factors, const int32_t* places, float* out, int64_t rows, int64_t size);

void run_prologue(const Prologue& call, int64_t tokens);

// Elements of the queries: of every token and head `dim`, the head's at head_stride, the token's at token_stride.
struct QueryPart {
    const float* data;
    int64_t token_stride;
    int64_t head_stride;
    int64_t dim;
};

struct Attention {
    QueryPart q[2];  // [tokens, q_heads], behind one another a query as long as a key; the second may have no elements
    int64_t tokens;  // rows of q and out; counts where there are several parts
    float* out;      // [parts, tokens, q_heads, value_dim], dense
    float* lse;      // [parts, tokens, q_heads], or null
    int64_t q_heads, kv_heads;
    int64_t value_dim;
    Cache cache;  // latent attention gives one plane for keys and values
    const int32_t* page_table;  // [sequences, page_table_stride]
    int64_t page_table_stride;
    const int32_t* query_start;  // [sequences + 1], or null: every sequence has queries_each tokens
    int64_t queries_each;
    const int32_t* lengths;  // [sequences]: keys, the queries' own included
    int64_t sequences;
    float scale;
    int64_t window;  // keys that a query sees, its own the last of them; 0: all
    // A sequence's keys are cut into so many parts of whole pages, equal but for the last of them, each with an output of its
    // own; see attention.mla_decode_partial. 1: all keys.
    int64_t parts;
    bool rounded;  // whether queries and weights are rounded to bfloat16
    const float* sinks = nullptr;  // [q_heads]: one more score in each softmax, that has no value; null: none
    float soft_cap = 0.0f;         // see AttentionTile; 0: scores stay as they are
    // Where given, query t attends to the entries of its sequence that selected[t * selected_count ...] names, up to the first
    // that is negative, and to no others; `lengths` is not looked at.
    const int32_t* selected = nullptr;
    int64_t selected_count = 0;

    int64_t key_dim() const { return q[0].dim + q[1].dim; }
};

// Sequence b's queries are its last positions. A query that sees no key gives zeros, and -infinity for lse. Throws
// std::bad_alloc; std::logic_error where it is to round and the cache is neither bfloat16 nor e4m3 or the set in force cannot.
void run_attention(const Attention& call);

void run_latent_prologue(const LatentPrologue& call, int64_t tokens);

void run_merge_partials(const PartialMerge& call);

}  // namespace tokenspeed
