// attention.mla_extend_expanded: latent attention with keys and values taken out of their latents.
#pragma once

#include <nanobind/nanobind.h>

namespace tokenspeed {

// Adds the class UpProjection.
void bind_expanded(nanobind::module_& m);

}  // namespace tokenspeed
