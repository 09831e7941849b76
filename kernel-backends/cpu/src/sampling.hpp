// The sampler's operations; tokenspeed_kernel.ops.sampling has their contract, step by step.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace tokenspeed {

// One row's sampling parameters and what its random number depends on.
struct Draw {
    float temperature;
    int32_t top_k;
    float top_p;
    float min_p;
    int64_t seed;
    int32_t choice;
    int32_t position;
};

// The uniform number of (seed, choice, position), in (0, 1].
float uniform(int64_t seed, int32_t choice, int32_t position);

// The token drawn from one row of logits [size], size > 0. The logits are overwritten.
int32_t sample_row(float* logits, int64_t size, const Draw& draw);

// Adds the sampler's functions to the module.
void bind_sampling(nanobind::module_& m);

}  // namespace tokenspeed
