#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "binding/bind.h"
#include "scheduler/config.h"

namespace tokenspeed::binding {

using namespace nb::literals;

void bind_config(nb::module_& module) {
    nb::class_<CacheGroup>(module, "CacheGroup", "One cache group. Errors (ValueError) name the group and the field.")
        .def(
            "__init__",
            [](CacheGroup* self, std::string group_id, std::string kind, std::int32_t block_granularity,
               std::int32_t children_per_parent, std::int32_t sliding_window_tokens,
               std::int32_t checkpoint_granularity) {
                CacheGroup group{std::move(group_id),   std::move(kind),       block_granularity,
                                 children_per_parent,   sliding_window_tokens, checkpoint_granularity};
                group.validate();
                new (self) CacheGroup(std::move(group));
            },
            nb::kw_only(), "group_id"_a, "kind"_a, "block_granularity"_a = 0, "children_per_parent"_a = 1,
            "sliding_window_tokens"_a = 0, "checkpoint_granularity"_a = 0)
        .def_ro("group_id", &CacheGroup::group_id)
        .def_ro("kind", &CacheGroup::kind)
        .def_ro("block_granularity", &CacheGroup::block_granularity)
        .def_ro("children_per_parent", &CacheGroup::children_per_parent)
        .def_ro("sliding_window_tokens", &CacheGroup::sliding_window_tokens)
        .def_ro("checkpoint_granularity", &CacheGroup::checkpoint_granularity);

    nb::class_<SchedulerConfig>(module, "SchedulerConfig",
                                "Everything the scheduler knows about its world, validated whole.")
        .def(
            "__init__",
            [](SchedulerConfig* self, fsm::Role role, std::vector<CacheGroup> groups, std::int32_t num_parents,
               std::int32_t prefix_granularity, std::int32_t max_num_seqs, std::int32_t max_scheduled_tokens,
               std::int32_t max_model_len, std::int32_t overlap_depth, bool mixed_batches, bool prefix_cache,
               std::int32_t headroom_tokens, std::int32_t max_overtakes, std::int32_t host_parents, bool host_cache,
               bool storage, std::int32_t storage_min_tokens, std::int64_t storage_timeout_ticks,
               std::int32_t storage_max_operations) {
                SchedulerConfig config{.role = role,
                                       .groups = std::move(groups),
                                       .num_parents = num_parents,
                                       .prefix_granularity = prefix_granularity,
                                       .max_num_seqs = max_num_seqs,
                                       .max_scheduled_tokens = max_scheduled_tokens,
                                       .max_model_len = max_model_len,
                                       .overlap_depth = overlap_depth,
                                       .mixed_batches = mixed_batches,
                                       .prefix_cache = prefix_cache,
                                       .headroom_tokens = headroom_tokens,
                                       .max_overtakes = max_overtakes,
                                       .host_parents = host_parents,
                                       .host_cache = host_cache,
                                       .storage = storage,
                                       .storage_min_tokens = storage_min_tokens,
                                       .storage_timeout_ticks = storage_timeout_ticks,
                                       .storage_max_operations = storage_max_operations};
                config.validate();
                new (self) SchedulerConfig(std::move(config));
            },
            nb::kw_only(), "role"_a = fsm::Role::Fused, "groups"_a, "num_parents"_a, "prefix_granularity"_a,
            "max_num_seqs"_a, "max_scheduled_tokens"_a, "max_model_len"_a, "overlap_depth"_a = 0,
            "mixed_batches"_a = true, "prefix_cache"_a = true, "headroom_tokens"_a = 4096, "max_overtakes"_a = 8,
            "host_parents"_a = 0, "host_cache"_a = true, "storage"_a = false, "storage_min_tokens"_a = 0,
            "storage_timeout_ticks"_a = 5000, "storage_max_operations"_a = 16)
        .def_ro("role", &SchedulerConfig::role)
        .def_ro("groups", &SchedulerConfig::groups)
        .def_ro("num_parents", &SchedulerConfig::num_parents)
        .def_ro("prefix_granularity", &SchedulerConfig::prefix_granularity)
        .def_ro("max_num_seqs", &SchedulerConfig::max_num_seqs)
        .def_ro("max_scheduled_tokens", &SchedulerConfig::max_scheduled_tokens)
        .def_ro("max_model_len", &SchedulerConfig::max_model_len)
        .def_ro("overlap_depth", &SchedulerConfig::overlap_depth)
        .def_ro("mixed_batches", &SchedulerConfig::mixed_batches)
        .def_ro("prefix_cache", &SchedulerConfig::prefix_cache)
        .def_ro("headroom_tokens", &SchedulerConfig::headroom_tokens)
        .def_ro("max_overtakes", &SchedulerConfig::max_overtakes)
        .def_ro("host_parents", &SchedulerConfig::host_parents)
        .def_ro("host_cache", &SchedulerConfig::host_cache)
        .def_ro("storage", &SchedulerConfig::storage)
        .def_ro("storage_min_tokens", &SchedulerConfig::storage_min_tokens)
        .def_ro("storage_timeout_ticks", &SchedulerConfig::storage_timeout_ticks)
        .def_ro("storage_max_operations", &SchedulerConfig::storage_max_operations);

    module.def("single_request_bound", &SchedulerConfig::single_request_bound, "config"_a,
               "The largest prompt plus output that one request, alone in the pool, can have.");
}

}  // namespace tokenspeed::binding
