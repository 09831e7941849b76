// What crosses to the engine once a round. A plan owns its memory; readers look at it in place.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cache/sha256.h"

namespace tokenspeed {

enum class RowKind : std::int32_t { Prefill = 0, Decode = 1 };

// See CacheOperation in tokenspeed_scheduler/__init__.pyi for what each moves.
enum class OperationKind : std::int32_t {
    WriteBack,
    ImageSave,
    LoadBack,
    Restore,
    StorageQuery,
    StorageFetch,
    StoragePut,
    HandOff,
    RemotePrefill,
};
inline constexpr std::array<std::string_view, 9> kOperationNames{
    "WRITE_BACK",    "IMAGE_SAVE",  "LOAD_BACK", "RESTORE",        "STORAGE_QUERY",
    "STORAGE_FETCH", "STORAGE_PUT", "HAND_OFF",  "REMOTE_PREFILL",
};

using IntArray = std::vector<std::int32_t>;

// Changed block tables of one group: entry i replaces the ids of row[i]'s table from first_slot[i] on.
struct BlockTableDelta {
    IntArray row, first_slot, count, version_from, version_to, ids;
};

struct CacheOperation {
    std::int64_t op_id = 0;
    OperationKind kind = OperationKind::WriteBack;
    std::int32_t handle = 0;
    IntArray group, source, target;
    std::vector<std::uint8_t> digests;  // 32 bytes a block, storage kinds only
    IntArray offsets;                   // storage kinds only

    std::size_t size() const { return group.size(); }
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
    std::vector<CacheOperation> operations;
    std::vector<PlanAbort> aborts;

    std::int32_t num_rows() const { return static_cast<std::int32_t>(handle.size()); }
    // SHA-256 over everything the plan says: equal plans have equal digests on every machine.
    cache::Sha256::Output digest() const;
};

}  // namespace tokenspeed
