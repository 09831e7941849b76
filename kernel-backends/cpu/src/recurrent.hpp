// Layers with a state, and gates: the operations over a whole call, as in drivers.hpp, and their Python door.
#pragma once

#include <nanobind/nanobind.h>

#include "recurrent_calls.hpp"

namespace tokenspeed {

void run_causal_conv(const CausalConv& call);
void run_gated_delta(const GatedDelta& call);
void run_gated_norm(const GatedNorm& call, int64_t tokens);
void run_sigmoid_gate(const float* x, const float* gate, int64_t gate_stride, float* out, int64_t rows, int64_t size,
                      int64_t gates);
void run_add(const float* x, float* out, int64_t size);

// Adds causal_conv, gated_delta, gated_norm, sigmoid_gate and add.
void bind_recurrent(nanobind::module_& m);

}  // namespace tokenspeed
