#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "binding/bind.h"
#include "scheduler/report.h"

namespace tokenspeed::binding {
namespace {

using StateCounts = nb::ndarray<nb::numpy, const std::int64_t, nb::ndim<1>, nb::c_contig>;

StateCounts states(nb::handle self) {
    const auto& counts = nb::cast<const Snapshot&>(self).states;
    return StateCounts(counts.data(), {counts.size()}, self);
}

}  // namespace

void bind_reports(nb::module_& module) {
    nb::class_<GroupCounts>(module, "GroupCounts")
        .def_ro("group_id", &GroupCounts::group_id)
        .def_ro("total", &GroupCounts::total)
        .def_ro("held", &GroupCounts::held)
        .def_ro("cached", &GroupCounts::cached)
        .def_ro("free", &GroupCounts::free)
        .def_ro("pinned", &GroupCounts::pinned)
        .def_ro("elsewhere", &GroupCounts::elsewhere);

    nb::class_<PoolMaps>(module, "PoolMaps", "Both pools by group, as pictures.")
        .def_ro("device", &PoolMaps::device)
        .def_ro("host", &PoolMaps::host);

    nb::class_<Headroom>(module, "Headroom", "What could be admitted now.")
        .def_ro("tokens", &Headroom::tokens)
        .def_ro("largest", &Headroom::largest)
        .def_ro("requests", &Headroom::requests)
        .def_ro("typical_tokens", &Headroom::typical_tokens);

    nb::class_<Snapshot>(module, "Snapshot", "Counts of one moment.")
        .def_ro("round", &Snapshot::round)
        .def_prop_ro("states", &states)
        .def_ro("groups", &Snapshot::groups)
        .def_ro("flows", &Snapshot::flows)
        .def_ro("running", &Snapshot::running)
        .def_ro("waiting", &Snapshot::waiting)
        .def_ro("live", &Snapshot::live)
        .def_ro("retractions", &Snapshot::retractions)
        .def_ro("ignored_results", &Snapshot::ignored_results)
        .def_ro("prefix_query_tokens", &Snapshot::prefix_query_tokens)
        .def_ro("prefix_hit_tokens", &Snapshot::prefix_hit_tokens)
        .def_ro("prefill_tokens", &Snapshot::prefill_tokens)
        .def_ro("decode_tokens", &Snapshot::decode_tokens)
        .def_ro("overtakes", &Snapshot::overtakes)
        .def_ro("evictions", &Snapshot::evictions)
        .def_ro("host", &Snapshot::host)
        .def_ro("host_hit_tokens", &Snapshot::host_hit_tokens)
        .def_ro("storage_hit_tokens", &Snapshot::storage_hit_tokens)
        .def_ro("host_evictions", &Snapshot::host_evictions)
        .def_ro("pending_operations", &Snapshot::pending_operations)
        .def_ro("image_blocks", &Snapshot::image_blocks)
        .def_ro("restores", &Snapshot::restores)
        .def_ro("recomputed_tokens", &Snapshot::recomputed_tokens)
        .def_ro("storage_timeouts", &Snapshot::storage_timeouts);

    nb::class_<Explanation>(module, "Explanation", "Why a request does not run, or that it does.")
        .def_ro("handle", &Explanation::handle)
        .def_ro("state", &Explanation::state)
        .def_ro("code", &Explanation::code)
        .def_ro("text", &Explanation::text)
        .def_ro("short_by", &Explanation::short_by)
        .def_ro("group_id", &Explanation::group_id)
        .def_ro("other", &Explanation::other)
        .def_ro("op_id", &Explanation::op_id);

    nb::class_<Decision>(module, "Decision", "What one round decided.")
        .def_ro("round", &Decision::round)
        .def_ro("prefill_rows", &Decision::prefill_rows)
        .def_ro("prefill_tokens", &Decision::prefill_tokens)
        .def_ro("decode_rows", &Decision::decode_rows)
        .def_ro("blocked", &Decision::blocked)
        .def_ro("retracted", &Decision::retracted)
        .def_ro("restored", &Decision::restored)
        .def_ro("aborted", &Decision::aborted)
        .def_ro("evictions", &Decision::evictions)
        .def_ro("free_blocks", &Decision::free_blocks);

    nb::class_<RequestRow>(module, "RequestRow")
        .def_ro("handle", &RequestRow::handle)
        .def_ro("state", &RequestRow::state)
        .def_ro("age_rounds", &RequestRow::age_rounds)
        .def_ro("priority", &RequestRow::priority)
        .def_ro("prompt_tokens", &RequestRow::prompt_tokens)
        .def_ro("computed_tokens", &RequestRow::computed_tokens)
        .def_ro("generated_tokens", &RequestRow::generated_tokens)
        .def_ro("cached_tokens", &RequestRow::cached_tokens)
        .def_ro("blocks", &RequestRow::blocks)
        .def_ro("retractions", &RequestRow::retractions)
        .def_ro("reason", &RequestRow::reason)
        .def_ro("max_new_tokens", &RequestRow::max_new_tokens)
        .def_ro("host_blocks", &RequestRow::host_blocks)
        .def_ro("arrived", &RequestRow::arrived)
        .def_ro("since", &RequestRow::since);

    nb::class_<Visit>(module, "Visit", "A request came into a state.")
        .def_ro("state", &Visit::state)
        .def_ro("round", &Visit::round)
        .def_ro("time", &Visit::time);

    nb::class_<Description>(module, "Description", "All there is to say about one request.")
        .def_ro("alive", &Description::alive)
        .def_ro("row", &Description::row)
        .def_prop_ro("visits", [](const Description& self) { return self.timeline.visits; })
        .def_prop_ro("visits_omitted", [](const Description& self) { return self.timeline.omitted; })
        .def_ro("lines", &Description::lines);

    nb::class_<Note>(module, "Note", "Something that happened to a request.")
        .def_ro("time", &Note::time)
        .def_ro("kind", &Note::kind)
        .def_ro("handle", &Note::handle)
        .def_ro("text", &Note::text);
}

}  // namespace tokenspeed::binding
