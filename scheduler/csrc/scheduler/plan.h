// What crosses to the engine once a round. A plan owns its memory; readers look at it in place.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tokenspeed {

enum class RowKind : std::int32_t { Prefill = 0, Decode = 1 };

using IntArray = std::vector<std::int32_t>;

// Changed block tables of one group: entry i replaces the ids of row[i]'s table from first_slot[i] on.
struct BlockTableDelta {
    IntArray row, first_slot, count, version_from, version_to, ids;
};

struct PlanAbort {
    std::int32_t handle;
    std::string reason;
    std::string detail;
};

struct Plan {
    std::int64_t forward_id = 0;  // 0 for a plan without rows
    IntArray handle, row, kind, input_len, prefix_len, prompt_len, samples;
    IntArray input_ids;
    IntArray starts;
    std::vector<BlockTableDelta> tables;  // by group
    std::vector<IntArray> zero_blocks;    // by group
    std::vector<IntArray> copy_blocks;    // by group, pairs
    std::vector<PlanAbort> aborts;

    std::int32_t num_rows() const { return static_cast<std::int32_t>(handle.size()); }
};

}  // namespace tokenspeed
