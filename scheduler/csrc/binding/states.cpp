// Enums, exceptions and the transition table, all made from the one table in fsm/states.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cctype>
#include <string>
#include <tuple>
#include <vector>

#include "binding/bind.h"
#include "fsm/states.h"
#include "scheduler/config.h"
#include "scheduler/plan.h"

namespace tokenspeed::binding {
namespace {

// PrefillAwaitingResult -> PREFILL_AWAITING_RESULT
std::string constant_name(std::string_view name) {
    std::string constant;
    for (const char letter : name) {
        if (std::isupper(static_cast<unsigned char>(letter)) != 0 && !constant.empty()) constant += '_';
        constant += static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
    }
    return constant;
}

using TableEntry = std::tuple<std::string, std::string, std::vector<std::string>>;

std::vector<TableEntry> transition_table() {
    std::vector<TableEntry> entries;
    for (std::size_t state = 0; state < fsm::kStateCount; ++state) {
        for (std::size_t event = 0; event < fsm::kEventCount; ++event) {
            const fsm::StateSet set =
                fsm::successors(static_cast<fsm::StateId>(state), static_cast<fsm::EventId>(event));
            if (set.empty()) continue;
            std::vector<std::string> names;
            for (std::size_t next = 0; next < fsm::kStateCount; ++next) {
                if (set.contains(static_cast<fsm::StateId>(next))) names.emplace_back(fsm::kStateNames[next]);
            }
            entries.emplace_back(fsm::kStateNames[state], fsm::kEventNames[event], std::move(names));
        }
    }
    return entries;
}

}  // namespace

void bind_states(nb::module_& module) {
    nb::enum_<fsm::Role>(module, "Role", nb::is_arithmetic())
        .value("FUSED", fsm::Role::Fused)
        .value("PREFILL", fsm::Role::Prefill)
        .value("DECODE", fsm::Role::Decode);
    nb::enum_<fsm::StateId> state(module, "State", nb::is_arithmetic(),
                                  "The twelve states, in the order of the transition table.");
    for (std::size_t i = 0; i < fsm::kStateCount; ++i) {
        state.value(constant_name(fsm::kStateNames[i]).c_str(), static_cast<fsm::StateId>(i));
    }
    nb::enum_<RowKind>(module, "RowKind", nb::is_arithmetic())
        .value("PREFILL", RowKind::Prefill)
        .value("DECODE", RowKind::Decode);
    nb::enum_<OperationKind> operation(module, "OperationKind", nb::is_arithmetic());
    for (std::size_t i = 0; i < kOperationNames.size(); ++i) {
        operation.value(std::string(kOperationNames[i]).c_str(), static_cast<OperationKind>(i));
    }
    nb::exception<fsm::InvalidTransition>(module, "InvalidTransition", PyExc_RuntimeError);
    nb::exception<RequestRefused>(module, "RequestRefused", PyExc_ValueError);
    module.def("transition_table", &transition_table,
               "(state, event, successors) for every legal pair, by name: the one table.");
}

}  // namespace tokenspeed::binding
