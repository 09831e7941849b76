// What the scheduler tells about itself.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "fsm/states.h"

namespace tokenspeed {

struct GroupCounts {
    std::string group_id;
    std::int64_t total = 0, held = 0, cached = 0, free = 0, pinned = 0;
};

struct Snapshot {
    std::int64_t round = 0;
    std::vector<std::int64_t> states;  // by StateId; -1 where the role has no such state
    std::vector<GroupCounts> groups;
    std::vector<std::tuple<int, int, std::int64_t>> flows;
    std::int64_t running = 0, waiting = 0, live = 0;
    std::int64_t retractions = 0, ignored_results = 0;
    std::int64_t prefix_query_tokens = 0, prefix_hit_tokens = 0;
    std::int64_t prefill_tokens = 0, decode_tokens = 0;
    std::int64_t overtakes = 0, evictions = 0;
};

struct RequestRow {
    std::int32_t handle = 0;
    fsm::StateId state = fsm::StateId::Submitted;
    std::int64_t age_rounds = 0;
    std::int32_t priority = 0;
    std::int32_t prompt_tokens = 0, computed_tokens = 0, generated_tokens = 0, cached_tokens = 0;
    std::int64_t blocks = 0;
    std::int32_t retractions = 0;
    std::string reason;
};

struct Counters {
    std::array<std::int64_t, fsm::kStateCount> states{};
    std::array<std::array<std::int64_t, fsm::kStateCount>, fsm::kStateCount> flows{};
    std::int64_t retractions = 0, ignored_results = 0, overtakes = 0;
    std::int64_t prefix_query_tokens = 0, prefix_hit_tokens = 0;
    std::int64_t prefill_tokens = 0, decode_tokens = 0;
};

}  // namespace tokenspeed
