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

inline constexpr const char* kFullHistory = "full_history";
inline constexpr const char* kSlidingWindow = "sliding_window";
inline constexpr const char* kState = "state";

enum class Attention : std::uint8_t { FullHistory, SlidingWindow, State };

struct CacheGroup {
    std::string group_id;
    std::string kind;
    std::int32_t block_granularity = 0;  // tokens of one block; history kinds only
    std::int32_t children_per_parent = 1;
    std::int32_t sliding_window_tokens = 0;   // sliding windows only
    std::int32_t checkpoint_granularity = 0;  // state groups only

    // Throws std::invalid_argument naming the group and the field.
    void validate() const;
    // Throws std::invalid_argument for a kind that does not exist.
    Attention attention() const;
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
    std::int32_t host_parents = 0;  // without the null parent; 0: no host tier
    bool host_cache = true;
    bool storage = false;
    std::int32_t storage_min_tokens = 0;
    std::int64_t storage_timeout_ticks = 5000;
    std::int32_t storage_max_operations = 16;

    // Throws std::invalid_argument naming the field (and the group) and what would do.
    void validate() const;

    // Whether published blocks are written back to the host. The decode role has its prompts from the peer.
    bool writes_back() const {
        return host_parents > 0 && host_cache && prefix_cache && role != fsm::Role::Decode;
    }
    // The most parents of a group that one request of `tokens` tokens holds when it runs alone.
    std::int64_t working_set(const CacheGroup& group, std::int64_t tokens) const;
    // The most blocks a window spans, with `chunk` tokens behind it that are computed at once.
    std::int64_t window_blocks(const CacheGroup& group, std::int64_t chunk) const;
    // The most tokens that one request, alone in the pool, can grow to.
    std::int64_t pool_tokens() const;
    // The largest prompt plus output that one request, alone in the pool, can have.
    std::int64_t single_request_bound() const;

private:
    void validate_groups() const;
    void validate_tiers() const;
};

constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit; }

}  // namespace tokenspeed
