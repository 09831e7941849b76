// The Python door of latent attention.
#pragma once

#include <nanobind/nanobind.h>

namespace tokenspeed {

// Adds mla_prologue, mla_attend and merge_partials.
void bind_latent(nanobind::module_& m);

}  // namespace tokenspeed
