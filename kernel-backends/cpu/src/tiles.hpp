// Products of bfloat16 weights by a tile unit (AMX). It has not run on hardware: off unless asked for, see enable_amx.
#pragma once

#include <cstdint>

#include "table.hpp"

namespace tokenspeed {

// Asks the system for the tile unit, for this process. Throws std::runtime_error where this build or this machine has none, or
// the system refuses.
void enable_amx();

// As run_rounded_linear, in tiles: by the unit, or `emulated` in plain C++. Throws std::logic_error where the weight is not
// bfloat16, the set in force cannot round, or the unit was not enabled.
void run_tiled_linear(const Weight& weight, const float* x, int64_t tokens, float* out, bool emulated);

}  // namespace tokenspeed
