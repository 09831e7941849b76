// Sparse attention: the indexer, and latent attention over what it selected.
#pragma once

#include <nanobind/nanobind.h>

namespace tokenspeed {

// Adds index_prologue, index_select and mla_selected.
void bind_index(nanobind::module_& m);

}  // namespace tokenspeed
