// What DeepSeek-V4 needs beyond sparse attention: compressed entries, and residual streams.
#pragma once

#include <nanobind/nanobind.h>

namespace tokenspeed {

// Adds compress, write_entries, apply_sinks and rotary.
void bind_compressed(nanobind::module_& m);

// Adds hyper_begin, hyper_mix, hyper_spread and hyper_collapse.
void bind_streams(nanobind::module_& m);

}  // namespace tokenspeed
