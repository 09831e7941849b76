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

}  // namespace

void CacheGroup::validate() const {
    const std::string who = "cache group '" + group_id + "': ";
    if (group_id.empty()) throw std::invalid_argument("a cache group's group_id is empty: give it a name");
    if (kind != kFullHistory && kind != kSlidingWindow && kind != kState) {
        throw std::invalid_argument(who + "kind '" + kind + "' is none of " + kFullHistory + ", " + kSlidingWindow +
                                    ", " + kState);
    }
    at_least(who + "block_granularity", block_granularity, 1);
    at_least(who + "children_per_parent", children_per_parent, 1);
}

void SchedulerConfig::validate() const {
    if (role != fsm::Role::Fused) {
        throw std::invalid_argument("role: this scheduler plans for FUSED; PREFILL and DECODE are not supported yet");
    }
    if (groups.empty()) throw std::invalid_argument("groups is empty: at least one cache group is needed");
    at_least("num_parents", num_parents, 1);
    at_least("prefix_granularity", prefix_granularity, 1);
    at_least("max_num_seqs", max_num_seqs, 1);
    at_least("max_scheduled_tokens", max_scheduled_tokens, 1);
    at_least("max_model_len", max_model_len, 2);
    at_least("headroom_tokens", headroom_tokens, 0);
    at_least("max_overtakes", max_overtakes, 0);
    if (overlap_depth != 0 && overlap_depth != 1) refuse("overlap_depth", overlap_depth, "it must be 0 or 1");
    for (std::size_t i = 0; i < groups.size(); ++i) {
        const CacheGroup& group = groups[i];
        group.validate();
        const std::string who = "cache group '" + group.group_id + "': ";
        for (std::size_t j = 0; j < i; ++j) {
            if (groups[j].group_id == group.group_id) throw std::invalid_argument(who + "group_id is used twice");
        }
        if (group.kind != kFullHistory) {
            throw std::invalid_argument(who + "kind '" + group.kind + "' is not supported yet, only " + kFullHistory);
        }
        if (prefix_granularity % group.block_granularity != 0) {
            refuse(who + "block_granularity", group.block_granularity,
                   "it must divide prefix_granularity " + std::to_string(prefix_granularity));
        }
        const std::int64_t ids = (static_cast<std::int64_t>(num_parents) + 1) * group.children_per_parent;
        if (ids > std::numeric_limits<std::int32_t>::max()) {
            refuse(who + "children_per_parent", group.children_per_parent,
                   "with num_parents " + std::to_string(num_parents) + " block ids would not fit 32 bits");
        }
    }
    if (groups.size() > 1) {
        throw std::invalid_argument("groups: cache group '" + groups[1].group_id +
                                    "' is the second one; more than one group is not supported yet");
    }
}

std::int64_t SchedulerConfig::pool_tokens() const {
    std::int64_t tokens = std::numeric_limits<std::int64_t>::max();
    for (const CacheGroup& group : groups) {
        const std::int64_t blocks = static_cast<std::int64_t>(num_parents) * group.children_per_parent;
        tokens = std::min(tokens, blocks * group.block_granularity);
    }
    return tokens;
}

std::int64_t SchedulerConfig::single_request_bound() const {
    return std::min<std::int64_t>(max_model_len, pool_tokens());
}

}  // namespace tokenspeed
