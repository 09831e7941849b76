// The Python module. Its contract is tokenspeed_scheduler/__init__.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "binding/bind.h"

NB_MODULE(_core, module) {
    module.doc() = "The scheduler's C++ core";
    tokenspeed::binding::bind_states(module);
    tokenspeed::binding::bind_config(module);
    tokenspeed::binding::bind_plan(module);
    tokenspeed::binding::bind_reports(module);
    tokenspeed::binding::bind_scheduler(module);
}
