// The Python class of packed weights.
#pragma once

#include <nanobind/nanobind.h>

namespace tokenspeed {

void bind_packed_matrix(nanobind::module_& m);

}  // namespace tokenspeed
