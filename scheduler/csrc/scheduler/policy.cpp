#include "scheduler/policy.h"

#include <algorithm>

namespace tokenspeed {

ReserveDecision ReservePrefillDemands(const RequestProgress& progress, const CacheGroup& group,
                                      const SchedulerConfig& config) {
    if (group.attention() != Attention::FullHistory) return {.tokens = 1, .whole_generation = true};
    if (config.role == fsm::Role::Prefill) return {.tokens = 0, .whole_generation = true};
    const std::int64_t written = std::max(progress.remaining_new_tokens - 1, 0);
    const std::int64_t unit = progress.declared ? config.headroom_tokens : group.block_granularity;
    const std::int64_t headroom = std::max<std::int64_t>(unit * (1 + progress.retractions), 1);
    return {.tokens = std::min(written, headroom), .whole_generation = written <= headroom};
}

bool comes_before(const Place& a, const Place& b) {
    return a.priority != b.priority ? a.priority > b.priority : a.age < b.age;
}

bool restores_before(const RetractedView& a, const RetractedView& b) {
    return a.generated != b.generated ? a.generated : a.epoch < b.epoch;
}

bool gives_way_before(const VictimView& a, const VictimView& b) {
    if (a.prepaid != b.prepaid) return b.prepaid;
    if (a.incomplete != b.incomplete) return a.incomplete;
    if (a.armed != b.armed) return a.armed;
    if (a.size != b.size) return a.size > b.size;
    if (a.generated != b.generated) return a.generated < b.generated;
    return a.age > b.age;
}

std::int32_t chunk_tokens(std::int32_t from, const ChunkLimits& limits) {
    const std::int64_t left = limits.prefill_len - from;
    std::int64_t end = from + std::min(limits.budget, left);
    if (limits.junction > from && limits.junction < end) return limits.junction - from;
    if (end < limits.prefill_len && limits.checkpoint_granularity > 0) {
        const std::int64_t aligned = end / limits.checkpoint_granularity * limits.checkpoint_granularity;
        if (aligned > from) end = aligned;
    }
    return static_cast<std::int32_t>(end - from);
}

}  // namespace tokenspeed
