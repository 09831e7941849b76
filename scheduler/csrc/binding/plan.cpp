// Plans cross without a copy: every array is a read-only view whose owner is the Python object of the plan.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>

#include "binding/bind.h"
#include "scheduler/plan.h"

namespace tokenspeed::binding {
namespace {

using View = nb::ndarray<nb::numpy, const std::int32_t, nb::ndim<1>, nb::c_contig>;
using PairView = nb::ndarray<nb::numpy, const std::int32_t, nb::shape<-1, 2>, nb::c_contig>;

// An empty vector has no memory to point at.
const std::int32_t* address(const IntArray& array) {
    static const std::int32_t nothing[2] = {0, 0};
    return array.empty() ? nothing : array.data();
}

View view(const IntArray& array, nb::handle owner) { return View(address(array), {array.size()}, owner); }

template <typename Owner, IntArray Owner::*Member>
View member(nb::handle self) {
    return view(nb::cast<const Owner&>(self).*Member, self);
}

template <typename Part, std::vector<Part> Plan::*Member>
nb::list parts(nb::handle self) {
    nb::list list;
    for (const Part& part : nb::cast<const Plan&>(self).*Member) {
        list.append(nb::cast(&part, nb::rv_policy::reference_internal, self));
    }
    return list;
}

nb::list zero_blocks(nb::handle self) {
    nb::list list;
    for (const IntArray& ids : nb::cast<const Plan&>(self).zero_blocks) list.append(view(ids, self));
    return list;
}

nb::list copy_blocks(nb::handle self) {
    nb::list list;
    for (const IntArray& pairs : nb::cast<const Plan&>(self).copy_blocks) {
        list.append(PairView(address(pairs), {pairs.size() / 2, 2}, self));
    }
    return list;
}

// The 32-byte digests of an operation's pages, [n, 32].
using DigestView = nb::ndarray<nb::numpy, const std::uint8_t, nb::shape<-1, 32>, nb::c_contig>;

DigestView digests(nb::handle self) {
    static const std::uint8_t nothing = 0;
    const auto& bytes = nb::cast<const CacheOperation&>(self).digests;
    return DigestView(bytes.empty() ? &nothing : bytes.data(), {bytes.size() / 32, 32}, self);
}

nb::bytes digest(const Plan& plan) {
    const auto hash = plan.digest();
    return nb::bytes(reinterpret_cast<const char*>(hash.data()), hash.size());
}

}  // namespace

void bind_plan(nb::module_& module) {
    using Delta = BlockTableDelta;
    nb::class_<Delta>(module, "BlockTableDelta", "What changed in the block tables of one group.")
        .def_prop_ro("row", &member<Delta, &Delta::row>)
        .def_prop_ro("first_slot", &member<Delta, &Delta::first_slot>)
        .def_prop_ro("count", &member<Delta, &Delta::count>)
        .def_prop_ro("version_from", &member<Delta, &Delta::version_from>)
        .def_prop_ro("version_to", &member<Delta, &Delta::version_to>)
        .def_prop_ro("ids", &member<Delta, &Delta::ids>);

    using Operation = CacheOperation;
    nb::class_<Operation>(module, "CacheOperation", "Blocks that move between tiers.")
        .def_ro("op_id", &Operation::op_id)
        .def_ro("kind", &Operation::kind)
        .def_ro("handle", &Operation::handle)
        .def_prop_ro("group", &member<Operation, &Operation::group>)
        .def_prop_ro("source", &member<Operation, &Operation::source>)
        .def_prop_ro("target", &member<Operation, &Operation::target>)
        .def_prop_ro("digests", &digests)
        .def_prop_ro("offsets", &member<Operation, &Operation::offsets>);

    nb::class_<PlanAbort>(module, "PlanAbort", "A request the scheduler ended by itself.")
        .def_ro("handle", &PlanAbort::handle)
        .def_ro("reason", &PlanAbort::reason)
        .def_ro("detail", &PlanAbort::detail);

    nb::class_<Plan>(module, "Plan", "One round; its arrays are read-only views that keep it alive.")
        .def_ro("forward_id", &Plan::forward_id)
        .def_prop_ro("num_rows", &Plan::num_rows)
        .def_prop_ro("handle", &member<Plan, &Plan::handle>)
        .def_prop_ro("row", &member<Plan, &Plan::row>)
        .def_prop_ro("kind", &member<Plan, &Plan::kind>)
        .def_prop_ro("input_len", &member<Plan, &Plan::input_len>)
        .def_prop_ro("prefix_len", &member<Plan, &Plan::prefix_len>)
        .def_prop_ro("prompt_len", &member<Plan, &Plan::prompt_len>)
        .def_prop_ro("samples", &member<Plan, &Plan::samples>)
        .def_prop_ro("input_ids", &member<Plan, &Plan::input_ids>)
        .def_prop_ro("starts", &member<Plan, &Plan::starts>)
        .def_prop_ro("tables", &parts<BlockTableDelta, &Plan::tables>)
        .def_prop_ro("zero_blocks", &zero_blocks)
        .def_prop_ro("copy_blocks", &copy_blocks)
        .def_prop_ro("operations", &parts<CacheOperation, &Plan::operations>)
        .def_prop_ro("aborts", &parts<PlanAbort, &Plan::aborts>)
        .def("digest", &digest);
}

}  // namespace tokenspeed::binding
