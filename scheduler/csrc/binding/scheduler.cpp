// The scheduler and what it is told. Planning and advancing run without the interpreter's lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>

#include "binding/bind.h"
#include "scheduler/scheduler.h"

namespace tokenspeed::binding {
namespace {

using namespace nb::literals;
using Tokens = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void submit(Scheduler& scheduler, std::int32_t handle, Tokens prompt, std::int32_t max_new_tokens, bool declared,
            std::int32_t priority, nb::bytes name_space, std::int32_t max_cached_prefix_tokens) {
    scheduler.submit(handle, std::span(prompt.data(), prompt.size()),
                     {.max_new_tokens = max_new_tokens,
                      .declared = declared,
                      .priority = priority,
                      .name_space = {name_space.c_str(), name_space.size()},
                      .max_cached_prefix_tokens = max_cached_prefix_tokens});
}

Event event_of(nb::handle object) {
    if (nb::isinstance<ForwardResult>(object)) return nb::cast<const ForwardResult&>(object);
    if (nb::isinstance<Finish>(object)) return nb::cast<const Finish&>(object);
    if (nb::isinstance<Abort>(object)) return nb::cast<const Abort&>(object);
    if (nb::isinstance<OperationDone>(object)) return nb::cast<const OperationDone&>(object);
    if (nb::isinstance<Tick>(object)) return nb::cast<const Tick&>(object);
    if (nb::isinstance<ForgetCache>(object)) return ForgetCache{};
    if (nb::isinstance<Bootstrapped>(object)) return nb::cast<const Bootstrapped&>(object);
    if (nb::isinstance<RemotePrefillDone>(object)) return nb::cast<const RemotePrefillDone&>(object);
    throw nb::type_error(
        ("an event is a ForwardResult, Finish, Abort, OperationDone, Tick, ForgetCache, Bootstrapped or RemotePrefillDone, not " + std::string(nb::repr(object).c_str())).c_str());
}

void advance(Scheduler& scheduler, nb::sequence events) {
    std::vector<Event> batch;
    batch.reserve(nb::len(events));
    for (nb::handle object : events) batch.push_back(event_of(object));
    nb::gil_scoped_release release;
    scheduler.advance(batch);
}

// The plan is immutable; nanobind has no shared_ptr<const T>.
std::shared_ptr<Plan> plan(Scheduler& scheduler) {
    nb::gil_scoped_release release;
    return std::const_pointer_cast<Plan>(scheduler.plan());
}

// A read-only view of an event's array; the journal reads events back.
template <typename Element>
nb::object event_array(const std::vector<Element>& values, nb::handle owner) {
    static const Element nothing{};
    using View = nb::ndarray<nb::numpy, const Element, nb::ndim<1>, nb::c_contig>;
    return nb::cast(View(values.empty() ? &nothing : values.data(), {values.size()}, owner));
}

nb::object event_flags(const std::vector<std::uint8_t>& flags, nb::handle owner) {
    return flags.empty() ? nb::none() : event_array(flags, owner);
}

}  // namespace

void bind_scheduler(nb::module_& module) {
    nb::class_<ForwardResult>(module, "ForwardResult", "The result of one plan.")
        .def(
            "__init__",
            [](ForwardResult* self, std::int64_t forward_id, Tokens tokens, std::optional<Flags> failed) {
                new (self) ForwardResult{forward_id, {tokens.data(), tokens.data() + tokens.size()}, {}};
                if (failed) self->failed.assign(failed->data(), failed->data() + failed->size());
            },
            "forward_id"_a, nb::arg("tokens").noconvert(), nb::arg("failed").noconvert() = nb::none())
        .def_ro("forward_id", &ForwardResult::forward_id)
        .def_prop_ro("tokens",
                     [](nb::handle self) { return event_array(nb::cast<const ForwardResult&>(self).tokens, self); })
        .def_prop_ro("failed",
                     [](nb::handle self) { return event_flags(nb::cast<const ForwardResult&>(self).failed, self); });
    nb::class_<Finish>(module, "Finish", "The request ended.")
        .def(nb::init<std::int32_t>(), "handle"_a)
        .def_ro("handle", &Finish::handle);
    nb::class_<Abort>(module, "Abort", "The request is not wanted any more.")
        .def(nb::init<std::int32_t>(), "handle"_a)
        .def_ro("handle", &Abort::handle);

    nb::class_<OperationDone>(module, "OperationDone", "A cache operation ended.")
        .def(
            "__init__",
            [](OperationDone* self, std::int64_t op_id, std::optional<Flags> succeeded) {
                new (self) OperationDone{op_id, {}};
                if (succeeded) self->succeeded.assign(succeeded->data(), succeeded->data() + succeeded->size());
            },
            "op_id"_a, nb::arg("succeeded").noconvert() = nb::none())
        .def_ro("op_id", &OperationDone::op_id)
        .def_prop_ro("succeeded", [](nb::handle self) {
            return event_flags(nb::cast<const OperationDone&>(self).succeeded, self);
        });
    nb::class_<Tick>(module, "Tick", "The time, in ticks of the caller's choice.")
        .def(nb::init<std::int64_t>(), "now"_a)
        .def_ro("now", &Tick::now);
    nb::class_<ForgetCache>(module, "ForgetCache", "Prefixes that nobody holds are not to be hit any more.")
        .def(nb::init<>());
    nb::class_<Bootstrapped>(module, "Bootstrapped", "The handshake with the peer is done.")
        .def(nb::init<std::int32_t>(), "handle"_a)
        .def_ro("handle", &Bootstrapped::handle);
    nb::class_<RemotePrefillDone>(module, "RemotePrefillDone", "The peer computed the prompt.")
        .def(nb::init<std::int32_t, std::int32_t>(), "handle"_a, "first_token"_a)
        .def_ro("handle", &RemotePrefillDone::handle)
        .def_ro("first_token", &RemotePrefillDone::first_token);

    nb::class_<Scheduler>(module, "Scheduler", "The control plane's mind. One thread calls it.")
        .def(nb::init<SchedulerConfig>(), "config"_a)
        .def("submit", &submit, "handle"_a, nb::arg("prompt").noconvert(), nb::kw_only(), "max_new_tokens"_a,
             "declared"_a = true, "priority"_a = 0, "namespace"_a = nb::bytes("", 0),
             "max_cached_prefix_tokens"_a = -1)
        .def("advance", &advance, "events"_a)
        .def("plan", &plan)
        .def("snapshot", &Scheduler::snapshot)
        .def("requests", &Scheduler::requests, "limit"_a = 200)
        .def("explain", nb::overload_cast<std::int32_t>(&Scheduler::explain, nb::const_), "handle"_a)
        .def("set_time", &Scheduler::set_time, "seconds"_a)
        .def("maps", &Scheduler::maps, "cells"_a = 256)
        .def("headroom", &Scheduler::headroom, "typical_tokens"_a = 0)
        .def("describe", &Scheduler::describe, "handle"_a)
        .def("take_notes", &Scheduler::take_notes)
        .def("decisions", &Scheduler::decisions, "last"_a = 64)
        .def("has_work", &Scheduler::has_work)
        .def("max_single_request_tokens", &Scheduler::max_single_request_tokens)
        .def("check_invariants", &Scheduler::check_invariants);
}

}  // namespace tokenspeed::binding
