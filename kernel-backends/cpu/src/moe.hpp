// Mixtures of experts: which experts a token goes to, and what they make of it. Contracts: tokenspeed_kernel/ops/moe.py.
#pragma once

#include <cstdint>

#include "table.hpp"

namespace tokenspeed {

enum class Scoring : int32_t { kSoftmax, kSigmoid, kSqrtSoftplus };

struct Routing {
    int64_t experts;
    int64_t top_k;
    Scoring scoring;
    int64_t groups, top_groups;
    bool renormalise;
    float scale;
    const float* correction;  // [experts] or null
};

// logits [rows, experts], ids and weights [rows, top_k], dense.
void run_route(const Routing& routing, const float* logits, int64_t rows, int32_t* ids, float* weights);

// Experts by a table [tokens there are, top_k]; scores are those of kSqrtSoftplus. See moe.table_route.
struct TableRouting {
    const float* logits;    // [rows, experts]
    const int32_t* tokens;  // [rows]
    const int32_t* table;
    int64_t experts, top_k;
    float scale;
    int32_t* ids;  // [rows, top_k]
    float* weights;
};

void run_table_route(const TableRouting& call, int64_t rows);

enum class GatedActivation : int32_t { kSilu, kClampedSwiglu };

struct Experts {
    Weight gate_up;             // [experts * 2 * intermediate, hidden]: of each expert the gate's rows, then those of up
    Weight down;                // [experts * hidden, intermediate]
    const float* gate_up_bias;  // [experts, 2 * intermediate] or null
    const float* down_bias;     // [experts, hidden] or null
    GatedActivation activation;
    float alpha, limit, offset;  // of kClampedSwiglu, see KernelTable::clamped_swiglu
    bool rounded;        // what goes into the products is rounded to bfloat16; bfloat16 weights only

    int64_t hidden() const { return gate_up.columns; }
    int64_t intermediate() const { return down.columns; }
    int64_t count() const { return down.rows / gate_up.columns; }
};

// x and out [tokens, hidden], ids and weights [tokens, top_k], dense; an id below 0 adds nothing. Throws std::bad_alloc,
// and std::logic_error where the instruction set in force has no products of rounded inputs with these weights.
void run_experts(const Experts& experts, const float* x, const int32_t* ids, const float* weights, int64_t tokens,
                 int64_t top_k, float* out);

}  // namespace tokenspeed
