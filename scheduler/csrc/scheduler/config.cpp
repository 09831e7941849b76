#include "scheduler/config.h"

#include <algorithm>
#include <limits>

namespace tokenspeed {
namespace {

[[noreturn]] void refuse(const std::string& field, std::int64_t value, const std::string& wanted) {
    throw std::invalid_argument(field + " is " + std::to_string(value) + ": " + wanted);
}

void at_least(const std::string& field, std::int64_t value, std::int64_t least) {
    if (value < least) refuse(field, value, "it must be at least " + std::to_string(least));
}

void is_zero(const std::string& field, std::int64_t value, const std::string& kind) {
    if (value != 0) refuse(field, value, "a " + kind + " group has none; leave it out");
}

}  // namespace

Attention CacheGroup::attention() const {
    if (kind == kFullHistory) return Attention::FullHistory;
    if (kind == kSlidingWindow) return Attention::SlidingWindow;
    if (kind == kState) return Attention::State;
    throw std::invalid_argument("cache group '" + group_id + "': kind '" + kind + "' is none of " + kFullHistory + ", " +
                                kSlidingWindow + ", " + kState);
}

void CacheGroup::validate() const {
    if (group_id.empty()) throw std::invalid_argument("a cache group's group_id is empty: give it a name");
    const std::string who = "cache group '" + group_id + "': ";
    const Attention its = attention();
    if (its == Attention::State) {
        is_zero(who + "block_granularity", block_granularity, kind);
        at_least(who + "checkpoint_granularity", checkpoint_granularity, 1);
    } else {
        at_least(who + "block_granularity", block_granularity, 1);
        is_zero(who + "checkpoint_granularity", checkpoint_granularity, kind);
    }
    if (its == Attention::SlidingWindow) {
        at_least(who + "sliding_window_tokens", sliding_window_tokens, 1);
    } else {
        is_zero(who + "sliding_window_tokens", sliding_window_tokens, kind);
    }
    at_least(who + "children_per_parent", children_per_parent, 1);
}

void SchedulerConfig::validate() const {
    if (groups.empty()) throw std::invalid_argument("groups is empty: at least one cache group is needed");
    at_least("num_parents", num_parents, 1);
    at_least("prefix_granularity", prefix_granularity, 1);
    at_least("max_num_seqs", max_num_seqs, 1);
    at_least("max_scheduled_tokens", max_scheduled_tokens, 1);
    at_least("max_model_len", max_model_len, 2);
    at_least("headroom_tokens", headroom_tokens, 0);
    at_least("max_overtakes", max_overtakes, 0);
    if (overlap_depth != 0 && overlap_depth != 1) refuse("overlap_depth", overlap_depth, "it must be 0 or 1");
    validate_groups();
    validate_tiers();
    if (pool_tokens() < 2) {
        refuse("num_parents", num_parents,
               "not even a request of two tokens fits beside itself in every cache group; give the KV cache more memory");
    }
}

void SchedulerConfig::validate_groups() const {
    for (std::size_t i = 0; i < groups.size(); ++i) {
        const CacheGroup& group = groups[i];
        group.validate();
        const std::string who = "cache group '" + group.group_id + "': ";
        for (std::size_t j = 0; j < i; ++j) {
            if (groups[j].group_id == group.group_id) throw std::invalid_argument(who + "group_id is used twice");
        }
        if (group.attention() == Attention::State) {
            if (group.checkpoint_granularity % prefix_granularity != 0) {
                refuse(who + "checkpoint_granularity", group.checkpoint_granularity,
                       "it must be a multiple of prefix_granularity " + std::to_string(prefix_granularity));
            }
            // A chunk ends at a checkpoint; with a smaller budget none would ever be left, in silence.
            if (prefix_cache && group.checkpoint_granularity > max_scheduled_tokens) {
                refuse("max_scheduled_tokens", max_scheduled_tokens,
                       "cache group '" + group.group_id + "' needs at least its checkpoint_granularity " +
                           std::to_string(group.checkpoint_granularity) + " (or no prefix_cache)");
            }
        } else if (prefix_granularity % group.block_granularity != 0) {
            refuse(who + "block_granularity", group.block_granularity,
                   "it must divide prefix_granularity " + std::to_string(prefix_granularity));
        }
        const std::int64_t parents = std::max(num_parents, host_parents);
        if ((parents + 1) * group.children_per_parent > std::numeric_limits<std::int32_t>::max()) {
            refuse(who + "children_per_parent", group.children_per_parent,
                   "with " + std::to_string(parents) + " parents block ids would not fit 32 bits");
        }
    }
}

void SchedulerConfig::validate_tiers() const {
    at_least("host_parents", host_parents, 0);
    at_least("storage_min_tokens", storage_min_tokens, 0);
    at_least("storage_timeout_ticks", storage_timeout_ticks, 1);
    at_least("storage_max_operations", storage_max_operations, 1);
    if (role == fsm::Role::Prefill && host_parents > 0 && !host_cache) {
        refuse("host_parents", host_parents, "the prefill role retracts nobody, so without host_cache it has no use for them");
    }
    if (storage && !writes_back()) {
        throw std::invalid_argument(
            "storage is on: it reads and writes host blocks, so it needs host_parents above 0, host_cache and prefix_cache");
    }
}

std::int64_t SchedulerConfig::working_set(const CacheGroup& group, std::int64_t tokens) const {
    const std::int64_t children = group.children_per_parent;
    switch (group.attention()) {
        case Attention::FullHistory:
            return ceil_div(ceil_div(tokens, group.block_granularity), children);
        case Attention::SlidingWindow: {
            // It can begin anywhere in a parent, so it spans one more than it fills.
            const std::int64_t blocks = std::min(window_blocks(group, 0), ceil_div(tokens, group.block_granularity));
            return std::min(blocks, ceil_div(blocks, children) + (children > 1 ? 1 : 0));
        }
        case Attention::State:
            // A prompt that hits reads a checkpoint and writes another block, wherever they are.
            return prefix_cache ? 2 : 1;
    }
    return 0;
}

std::int64_t SchedulerConfig::window_blocks(const CacheGroup& group, std::int64_t chunk) const {
    // The next token looks back at W - 1 others, and one that is out at one more; they can begin anywhere in a block.
    const std::int64_t tokens = group.sliding_window_tokens + overlap_depth + chunk;
    return ceil_div(tokens - 1, group.block_granularity) + 1;
}

std::int64_t SchedulerConfig::pool_tokens() const {
    const auto fits = [&](std::int64_t tokens) {
        std::int64_t parents = 0;
        for (const CacheGroup& group : groups) parents += working_set(group, tokens);
        return parents <= num_parents;
    };
    std::int64_t fit = 0, above = std::numeric_limits<std::int32_t>::max();
    while (above - fit > 1) {
        const std::int64_t middle = fit + (above - fit) / 2;
        (fits(middle) ? fit : above) = middle;
    }
    return fit;
}

std::int64_t SchedulerConfig::single_request_bound() const {
    return std::min<std::int64_t>(max_model_len, pool_tokens());
}

}  // namespace tokenspeed
