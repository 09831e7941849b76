// The owner of a request's blocks in one cache group. Move-only; its end gives every block back, suffix first.
//
// Slot s holds the block of tokens [s * block_granularity, (s + 1) * block_granularity). The device keeps a copy of each
// table and is told what changed: the table remembers from which slot on the copy is out of date.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/group_cache.h"

namespace tokenspeed::cache {

class BlockTable {
public:
    BlockTable() = default;
    BlockTable(GroupCache& cache, HolderId holder) : cache_(&cache), holder_(holder) {}
    BlockTable(BlockTable&& other) noexcept;
    BlockTable& operator=(BlockTable&& other) noexcept;
    BlockTable(const BlockTable&) = delete;
    BlockTable& operator=(const BlockTable&) = delete;
    ~BlockTable() { release(); }

    bool empty() const { return ids_.empty(); }
    int size() const { return static_cast<int>(ids_.size()); }
    std::span<const BlockId> ids() const { return ids_; }

    // Appends `count` fresh blocks, all or nothing.
    [[nodiscard]] bool append_fresh(int count);
    // Appends blocks that the cache has already.
    void append_hits(std::span<const BlockId> ids);
    // Appends another table's blocks of the same holder, which is empty afterwards.
    void append(BlockTable&& other);

    // Publishes the block of a slot under its content. Where that content has a canonical block already, the slot is
    // redirected to it; the duplicate stays held until the forwards up to `last_forward`, which may still read it, have
    // landed.
    void publish(int slot, const BlockKey& key, std::int64_t last_forward);
    // Lets go of duplicates that no forward after `landed` can read.
    void forward_landed(std::int64_t landed) noexcept;

    // Gives every block back, suffix first.
    void release() noexcept;

    // The device's copy: from which slot on it is out of date (size() where it is not), and its version.
    int changed_from() const { return changed_from_; }
    bool changed() const { return changed_from_ < size(); }
    int version() const { return version_; }
    void mark_sent() {
        changed_from_ = size();
        ++version_;
    }

    // For check_invariants(): appends (holder, block) for everything this table holds.
    void collect(std::vector<std::pair<HolderId, BlockId>>& held) const;

private:
    struct Duplicate {
        BlockId id;
        std::int64_t last_forward;
    };

    GroupCache* cache_ = nullptr;
    HolderId holder_ = 0;
    int changed_from_ = 0;
    int version_ = 0;
    std::vector<BlockId> ids_;
    std::vector<Duplicate> duplicates_;
};

}  // namespace tokenspeed::cache
