// What the scheduler tells about itself.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "fsm/states.h"

namespace tokenspeed {

// held + cached + free + elsewhere = total; elsewhere is what other groups have the parents of.
struct GroupCounts {
    std::string group_id;
    std::int64_t total = 0, held = 0, cached = 0, free = 0, pinned = 0, elsewhere = 0;
};

// Both pools by group, as pictures (cache::Tier::map); `host` is empty without one.
struct PoolMaps {
    std::vector<std::string> device, host;
};

// What could be admitted now, beside the reserves of all that run.
struct Headroom {
    std::int64_t tokens = 0;    // what free and evictable blocks hold, in the tightest group that keeps a history
    std::int64_t largest = 0;   // prompt and output of the largest request that fits whole
    std::int64_t requests = 0;  // how many of `typical_tokens` fit
    std::int64_t typical_tokens = 0;
};

// What is counted since the start, besides states.
struct Totals {
    std::int64_t retractions = 0, ignored_results = 0, overtakes = 0;
    std::int64_t prefix_query_tokens = 0, prefix_hit_tokens = 0, host_hit_tokens = 0, storage_hit_tokens = 0;
    std::int64_t prefill_tokens = 0, decode_tokens = 0;
    std::int64_t image_blocks = 0, restores = 0, recomputed_tokens = 0, storage_timeouts = 0;
};

struct Snapshot : Totals {
    std::int64_t round = 0;
    std::vector<std::int64_t> states;  // by StateId; -1 where the role has no such state
    std::vector<GroupCounts> groups;
    std::vector<GroupCounts> host;
    std::vector<std::tuple<int, int, std::int64_t>> flows;
    std::int64_t running = 0, waiting = 0, live = 0;
    std::int64_t evictions = 0, host_evictions = 0, pending_operations = 0;
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
    std::int32_t max_new_tokens = 0;
    std::int64_t host_blocks = 0;
    double arrived = 0, since = 0;  // by set_time(): when it was submitted, and came into its state
};

// A request came into a state.
struct Visit {
    fsm::StateId state = fsm::StateId::Submitted;
    std::int64_t round = 0;
    double time = 0;
};

// The states a request came into: the newest kMaxVisits, the newest last.
inline constexpr std::size_t kMaxVisits = 128;
struct Timeline {
    std::vector<Visit> visits;
    std::int64_t omitted = 0;

    void add(const Visit& visit) {
        if (visits.size() == kMaxVisits) {
            visits.erase(visits.begin());
            ++omitted;
        }
        visits.push_back(visit);
    }
};

// All there is to say about one request, alive or among the last that ended.
struct Description {
    bool alive = false;
    RequestRow row;
    Timeline timeline;
    std::vector<std::string> lines;
};

// Something that happened to a request and that somebody may want to hear of.
struct Note {
    double time = 0;
    std::string kind;  // "retraction" or "storage_timeout"
    std::int32_t handle = 0;
    std::string text;
};

// Why a request does not run, or that it does.
struct Explanation {
    std::int32_t handle = 0;
    fsm::StateId state = fsm::StateId::Finished;
    std::string code;
    std::string text;
    std::int64_t short_by = 0;
    std::string group_id;
    std::int32_t other = 0;
    std::int64_t op_id = 0;
};

// What one round decided.
struct Decision {
    std::int64_t round = 0;
    std::int64_t prefill_rows = 0, prefill_tokens = 0, decode_rows = 0;
    std::vector<std::tuple<std::int32_t, std::string, std::int64_t>> blocked;  // handle, code, figure
    std::vector<std::int32_t> retracted, restored, aborted;
    std::int64_t evictions = 0;
    std::vector<std::int64_t> free_blocks;  // by group

    bool quiet() const {
        return prefill_rows + decode_rows == 0 && blocked.empty() && retracted.empty() && restored.empty() &&
               aborted.empty();
    }
};

struct Counters : Totals {
    std::array<std::int64_t, fsm::kStateCount> states{};
    std::array<std::array<std::int64_t, fsm::kStateCount>, fsm::kStateCount> flows{};
};

}  // namespace tokenspeed
