// What the scheduler knows about its world, and the capacity arithmetic that follows from it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "fsm/states.h"

namespace tokenspeed {

// A request that can never run here; the text names the bound and both figures.
class RequestRefused : public std::invalid_argument {
public:
    using std::invalid_argument::invalid_argument;
};

// The names of the three attention kinds; a scheduler takes those it can plan for.
inline constexpr const char* kFullHistory = "full_history";
inline constexpr const char* kSlidingWindow = "sliding_window";
inline constexpr const char* kState = "state";

struct CacheGroup {
    std::string group_id;
    std::string kind;
    std::int32_t block_granularity = 0;  // tokens of one block
    std::int32_t children_per_parent = 1;

    // Throws std::invalid_argument naming the group and the field.
    void validate() const;
};

struct SchedulerConfig {
    fsm::Role role = fsm::Role::Fused;
    std::vector<CacheGroup> groups;
    std::int32_t num_parents = 0;         // without the null parent
    std::int32_t prefix_granularity = 0;  // tokens of one prefix page
    std::int32_t max_num_seqs = 0;
    std::int32_t max_scheduled_tokens = 0;
    std::int32_t max_model_len = 0;
    std::int32_t overlap_depth = 0;
    bool mixed_batches = true;
    bool prefix_cache = true;
    std::int32_t headroom_tokens = 4096;
    std::int32_t max_overtakes = 8;

    // Throws std::invalid_argument naming the field (and the group) and what would do.
    void validate() const;

    // Tokens the pool can hold if one request has all of it.
    std::int64_t pool_tokens() const;
    // The largest prompt plus output that one request, alone in the pool, can have.
    std::int64_t single_request_bound() const;
};

constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit; }

}  // namespace tokenspeed
