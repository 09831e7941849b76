#pragma once

#include <nanobind/nanobind.h>

namespace tokenspeed::binding {

namespace nb = nanobind;

void bind_states(nb::module_& module);
void bind_config(nb::module_& module);
void bind_plan(nb::module_& module);
void bind_reports(nb::module_& module);
void bind_scheduler(nb::module_& module);

}  // namespace tokenspeed::binding
