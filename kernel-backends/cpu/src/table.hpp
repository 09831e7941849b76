// The function table every instruction set fills: serial kernels over a range, called by the drivers, which own threads
// and scratch. Plain data and C headers only, because the AVX translation units include it.
#pragma once

#include <stdint.h>

#include "recurrent_calls.hpp"

namespace tokenspeed {

enum class WeightFormat : int32_t {
    kFloat32, kBFloat16, kFloat16, kQ4_0, kQ4_1, kQ8_0, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kQ5_0, kQ5_1,
    kMxfp4, kNvfp4, kFp8Blocks,
};
enum class KvType : int32_t { kFloat32, kBFloat16, kFloat16, kE4M3 };

inline int64_t element_bytes(KvType type) { return type == KvType::kFloat32 ? 4 : type == KvType::kE4M3 ? 1 : 2; }

// A weight matrix [rows, columns], where it lies. `bias` [rows] may be null. Nothing is owned.
struct Weight {
    WeightFormat format;
    int64_t rows;
    int64_t columns;
    int64_t row_bytes;
    const uint8_t* data;
    const float* bias;
};

constexpr int64_t kKeyTile = 64;      // keys of one softmax step, aligned to multiples of it in the sequence
constexpr int64_t kKeySplit = 512;    // keys of one independent partial result, merged in sequence order
constexpr int64_t kMaxTileRows = 64;  // query rows (query tokens times heads of one group) that share a pass over the keys
constexpr int64_t kMaxHeadDim = 512;

// One plane (keys or values) of a paged cache [blocks, kv heads, page size, head dim]; strides in elements, dim is dense.
struct CachePlane {
    uint8_t* data;
    int64_t block_stride;
    int64_t head_stride;
    int64_t token_stride;
};

struct Cache {
    CachePlane keys;
    CachePlane values;
    KvType type;
    int64_t page_size;
    int64_t head_dim;
};

// The running state of an attention over some keys, one entry per query row: maximum, sum of exponentials and the
// unnormalised weighted sum of values [rows, value_dim].
struct AttentionState {
    float* maximum;
    float* sum;
    float* accumulator;
};

// One group of query rows against one KV head of one sequence.
struct AttentionTile {
    const float* queries;        // [rows, key_dim], scaled
    const int64_t* row_starts;   // the first key that each row sees: 0 without a window; does not descend
    const int64_t* row_limits;   // the key behind the last one that it sees: its position + 1; does not descend
    const int32_t* pages;        // page table of the sequence; read from the page of the first row's start on
    int64_t rows;                // at most kMaxTileRows
    int64_t kv_head;
    int64_t key_dim;
    int64_t value_dim;           // where keys and values are one plane, a value is the first elements of a key
    float* wide;                 // null, or room (wide_floats) for a tile's keys and values in another form
    float soft_cap;              // above 0: a score s becomes soft_cap * tanh(s / soft_cap)
    const int32_t* selected = nullptr;  // where given, key i is the entry selected[i] of the sequence, else entry i
};

// The floats that AttentionTile::wide needs: keys and values as float32, or, rounded, keys, values and queries as halves,
// rows grown to whole vectors.
constexpr int64_t wide_floats(int64_t key_dim, int64_t value_dim) { return kKeyTile * (key_dim + value_dim + 64); }

// Keys and values of one head, side by side: what the latents of some neighbouring positions were expanded to.
constexpr int64_t kExpandedKeys = 128;

struct ExpandedKeys {
    const float* keys;    // [count, key_dim]
    const float* values;  // [count, value_dim]
    int64_t key_dim;
    int64_t value_dim;
    int64_t begin;        // the first position, a multiple of kKeyTile
    int64_t count;        // at most kExpandedKeys
};

// Attention over expanded keys with queries, keys, values and weights rounded to bfloat16.
struct RoundedExpansion {
    // Halves of memory that `turn` fills, and that it needs besides.
    int64_t (*turned_halves)(int64_t key_dim, int64_t value_dim);
    int64_t (*row_halves)(int64_t key_dim, int64_t value_dim);
    // Halves from one rounded query to the next.
    int64_t (*query_halves)(int64_t key_dim);
    void (*round_query)(const float* query, int64_t key_dim, uint16_t* out);
    // Rounds keys and values and lays them out for `attend`.
    void (*turn)(const ExpandedKeys& expanded, uint16_t* rows, uint16_t* turned);
    // As KernelTable::attend_expanded, over what was turned, with the tile's queries rounded; tile.queries is not looked at.
    void (*attend)(const ExpandedKeys& expanded, uint16_t* turned, const AttentionTile& tile, uint16_t* queries,
                   const AttentionState& state);
};

struct Prologue {
    float* q;
    const float* k;
    const float* v;
    int64_t q_stride, k_stride, v_stride;  // elements between tokens
    int64_t q_heads, kv_heads;
    const int32_t* positions;
    const float* cos_sin;  // [positions, rotary_dim]: cosines, then sines
    int64_t rotary_dim;    // elements of a head that are rotated, its first ones
    const float* q_norm;   // [head_dim] or null
    const float* k_norm;
    float epsilon;
    const int64_t* slots;
    Cache cache;
};

// Latent attention: an entry of the cache is latent_dim elements and rotary_dim behind them, for all heads. Only the keys'
// plane of the cache is used.
constexpr int64_t kMaxLatentDim = 1024;
constexpr int64_t kMaxRotaryDim = 256;

struct LatentPrologue {
    float* q;                 // heads of plain_dim + rotary_dim elements; the last are rotated
    const float* compressed;  // [tokens, latent_dim + rotary_dim]
    int64_t q_stride, compressed_stride;  // elements between tokens
    int64_t q_heads, plain_dim, latent_dim, rotary_dim;
    const int32_t* positions;
    const float* cos_sin;      // [positions, rotary_dim]
    const float* latent_norm;  // [latent_dim]
    float epsilon;
    const int64_t* slots;
    Cache cache;
};

// The keys of the indexer of sparse attention: an entry of the cache is `dim` elements, the first rotary_dim of them rotated.
constexpr int64_t kMaxIndexDim = 512;

struct IndexPrologue {
    float* q;          // heads of `dim` elements; the first rotary_dim are rotated
    const float* key;  // [tokens, dim]
    int64_t q_stride, key_stride;  // elements between tokens
    int64_t q_heads, dim, rotary_dim;
    const int32_t* positions;
    const float* cos_sin;      // [positions, rotary_dim]
    const float* norm_weight;  // [dim]
    const float* norm_bias;
    float epsilon;
    const int64_t* slots;
    Cache cache;  // the keys' plane
};

// One query of the indexer against the entries of its sequence.
struct IndexQuery {
    const float* q;        // [heads, dim], dense
    const float* weights;  // [heads]
    int64_t heads, dim;
    const int32_t* pages;
};

// Attention over parts of the keys, to become one: partials [parts, rows, dim], partial_lse [parts, rows], -infinity where a
// part has no key. lse [rows] may be null.
struct PartialMerge {
    const float* partials;
    const float* partial_lse;
    float* out;  // [rows, dim]
    float* lse;
    int64_t parts, rows, dim;
};

// Products of bfloat16 weights with activations rounded to bfloat16.
struct RoundedProducts {
    // Elements from one rounded row to the next.
    int64_t (*stride)(const Weight& weight);
    // Rounds x [tokens, columns] to out [tokens, stride]; zeros behind the columns up to a multiple of 32.
    void (*round_rows)(const Weight& weight, const float* x, int64_t tokens, uint16_t* out);
    // As KernelTable::linear, with rounded x [tokens, stride].
    void (*linear)(const Weight& weight, const uint16_t* x, int64_t tokens, float* out, int64_t begin, int64_t end);
};

struct Int8Products;  // panels.hpp

struct KernelTable {
    const char* name;
    const RoundedProducts* rounded;  // null where the set has none
    const Int8Products* int8;        // filled in by threads.cpp

    // Bytes of scratch that `linear` needs for this weight.
    int64_t (*linear_scratch)(const Weight& weight);
    // out[t, row] = x[t, :] . weight[row, :] (+ bias) for row in [begin, end). x [tokens, columns], out [tokens, rows].
    void (*linear)(const Weight& weight, const float* x, int64_t tokens, float* out, int64_t begin, int64_t end,
                   float* scratch);
    // Writes weight row `row` as float32.
    void (*decode_row)(const Weight& weight, int64_t row, float* out);

    // out = x / rms(x) * weight for `rows` rows of `size`; a residual, where given, becomes residual + x and is normed.
    void (*rms_norm)(const float* x, float* residual, const float* weight, float epsilon, float* out, int64_t rows,
                     int64_t size);
    // out = gate * sigmoid(gate) * up.
    void (*silu_and_mul)(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, float* out,
                         int64_t rows, int64_t size);

    void (*prologue)(const Prologue& call, int64_t token_begin, int64_t token_end);

    // Attends over the keys [split * kKeySplit, ...) of one split that a row sees, into a fresh state.
    void (*attend)(const Cache& cache, const AttentionTile& tile, int64_t split, const AttentionState& state);
    // Adds a later split's state to an earlier one; either may have seen no key.
    void (*merge)(const AttentionState& into, const AttentionState& from, int64_t rows, int64_t head_dim);
    // out = accumulator / sum, zeros where nothing was seen.
    void (*finish)(const float* accumulator, float sum, float* out, int64_t head_dim);
    void (*latent_prologue)(const LatentPrologue& call, int64_t token_begin, int64_t token_end);
    void (*merge_partials)(const PartialMerge& call, int64_t row_begin, int64_t row_end);

    // Index of the largest value, the lowest one where several are equal. NaN is passed over; 0 where all are NaN.
    int64_t (*argmax)(const float* values, int64_t size);
    bool (*has_nan)(const float* values, int64_t size);
    // The largest value; NaN is passed over; -infinity where nothing else is there.
    float (*maximum)(const float* values, int64_t size);
    // out[i] = exp(values[i] - shift).
    void (*shifted_exp)(const float* values, float shift, float* out, int64_t size);

    // out = g * sigmoid(alpha * g) * (u + offset) with g = min(gate, limit) and u = up within [-limit, limit].
    void (*clamped_swiglu)(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, float alpha,
                           float limit, float offset, float* out, int64_t rows, int64_t size);

    // out = gelu(gate) * up, gelu by tanh.
    void (*gelu_tanh_and_mul)(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, float* out,
                              int64_t rows, int64_t size);

    RecurrentKernels recurrent;
    void (*index_prologue)(const IndexPrologue& call, int64_t token_begin, int64_t token_end);
    // scores[i] = sum over the heads of weight * max(q . key, 0) for the entries i of [begin, end); begin is a multiple of
    // kKeyTile.
    void (*index_scores)(const Cache& cache, const IndexQuery& query, int64_t begin, int64_t end, float* scores);
    // Writes `dim` elements to `target` as a cache of this type has them.
    void (*store_entry)(KvType type, const float* source, uint8_t* target, int64_t dim);
    // Reads `dim` elements at `source` as a cache of this type has them.
    void (*load_entry)(KvType type, const uint8_t* source, float* target, int64_t dim);

    // As `attend`, with queries and weights rounded to bfloat16; caches of bfloat16 or e4m3, `wide` given. Null where the set has none.
    void (*attend_rounded)(const Cache& cache, const AttentionTile& tile, int64_t split,
                           const AttentionState& state) = nullptr;

    // Goes on with `state` over the expanded keys that a row sees; pages, kv_head, wide and selected are not looked at.
    void (*attend_expanded)(const ExpandedKeys& expanded, const AttentionTile& tile, const AttentionState& state) = nullptr;
    const RoundedExpansion* rounded_expansion = nullptr;  // null where the set has none
};

}  // namespace tokenspeed
