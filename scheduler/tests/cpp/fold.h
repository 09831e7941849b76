// A 64-bit hash over what a scheduler says, for tests that compare states. Numbers that only count up (forward ids,
// rounds, counters of the past) stay out, so that two ways to the same state are equal.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "scheduler/scheduler.h"

namespace dealer {

class Fold {
public:
    Fold& operator<<(std::int64_t value) {
        state_ ^= static_cast<std::uint64_t>(value);
        state_ *= 0x9e3779b97f4a7c15u;
        state_ ^= state_ >> 29;
        state_ *= 0xbf58476d1ce4e5b9u;
        state_ ^= state_ >> 32;
        return *this;
    }
    Fold& operator<<(const std::vector<std::int32_t>& values) {
        *this << static_cast<std::int64_t>(values.size());
        for (const std::int32_t value : values) *this << static_cast<std::int64_t>(value);
        return *this;
    }
    Fold& operator<<(std::string_view text) {
        *this << static_cast<std::int64_t>(text.size());
        for (const char letter : text) *this << static_cast<std::int64_t>(letter);
        return *this;
    }
    std::uint64_t value() const { return state_; }

private:
    std::uint64_t state_ = 0x243f6a8885a308d3u;
};

inline Fold& operator<<(Fold& fold, const tokenspeed::Plan& plan) {
    fold << plan.handle << plan.row << plan.kind << plan.input_len << plan.prefix_len << plan.prompt_len << plan.samples
         << plan.input_ids << plan.starts;
    for (const tokenspeed::BlockTableDelta& delta : plan.tables) {
        fold << delta.row << delta.first_slot << delta.count << delta.version_from << delta.version_to << delta.ids;
    }
    for (const auto& ids : plan.zero_blocks) fold << ids;
    for (const auto& pairs : plan.copy_blocks) fold << pairs;
    for (const tokenspeed::CacheOperation& operation : plan.operations) {
        fold << static_cast<std::int64_t>(operation.kind) << std::int64_t{operation.handle} << operation.group
             << operation.source << operation.target << operation.offsets;
    }
    for (const tokenspeed::PlanAbort& abort : plan.aborts) fold << std::int64_t{abort.handle} << abort.reason;
    return fold;
}

// What can be seen of a scheduler now, without ages and the past.
inline Fold& operator<<(Fold& fold, const tokenspeed::Scheduler& scheduler) {
    const tokenspeed::Snapshot snapshot = scheduler.snapshot();
    for (std::size_t state = 0; state + 1 < snapshot.states.size(); ++state) fold << snapshot.states[state];
    for (const auto* groups : {&snapshot.groups, &snapshot.host}) {
        for (const tokenspeed::GroupCounts& group : *groups) fold << group.held << group.cached << group.free << group.pinned;
    }
    fold << snapshot.pending_operations;
    for (const tokenspeed::RequestRow& row : scheduler.requests(1000)) {
        fold << std::int64_t{row.handle} << static_cast<std::int64_t>(row.state) << std::int64_t{row.computed_tokens}
             << std::int64_t{row.generated_tokens} << row.blocks << std::int64_t{row.retractions};
        // Not its text: that has numbers of operations.
        const tokenspeed::Explanation why = scheduler.explain(row.handle);
        fold << why.code << why.short_by << why.group_id << std::int64_t{why.other};
    }
    return fold;
}

}  // namespace dealer
