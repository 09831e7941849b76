// One cache group: who holds which block, which blocks are known by content, and what may be evicted.
//
// A block is *held* (somebody's table has it), *cached* (nobody holds it, but its content is indexed, so it can be hit
// or evicted) or *free* (with the pool). Holders are numbers (request-pool rows); for every holder the cache keeps how
// many blocks it alone holds, which is what retracting it would free.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache/block_pool.h"
#include "cache/page_hash.h"

namespace tokenspeed::cache {

using HolderId = std::int32_t;

class GroupCache {
public:
    // The pool must outlive the cache. Holders are 1 .. max_holders.
    GroupCache(BlockPool& pool, int group, int children_per_parent, int max_holders);
    GroupCache(const GroupCache&) = delete;
    GroupCache& operator=(const GroupCache&) = delete;

    // Blocks that can be had at once: the pool's free ones and the evictable. O(1).
    std::int64_t obtainable() const { return pool_.free_blocks(group_) + evictable_; }

    // Read only: the block with this content, or kNullBlock.
    [[nodiscard]] BlockId find(const BlockKey& key) const;
    bool is_evictable(BlockId id) const { return meta(id).holders == 0 && meta(id).indexed; }

    // Takes `ids.size()` fresh blocks for the holder, evicting the least recently used where the pool has none.
    // All or nothing: returns false and changes nothing where obtainable() does not suffice.
    [[nodiscard]] bool acquire_fresh(HolderId holder, std::span<BlockId> ids);
    // Shares a block that find() returned.
    void acquire_hit(HolderId holder, BlockId id);
    // The holder lets go. A block nobody holds becomes evictable (most recently used) or, unindexed, free.
    void release(HolderId holder, BlockId id) noexcept;
    // Makes the block's content known. Returns the canonical block of that content: `id`, or the one that was first.
    BlockId publish(BlockId id, const BlockKey& key);

    // Blocks that nobody but this holder holds.
    std::int64_t sole_blocks(HolderId holder) const { return sole_[static_cast<std::size_t>(holder)]; }
    int holders_of(BlockId id) const { return meta(id).holders; }
    // Whether this holder, and nobody else, holds the block.
    bool held_by_alone(HolderId holder, BlockId id) const {
        return meta(id).holders == 1 && meta(id).holders_xor == holder;
    }
    bool is_indexed(BlockId id) const { return meta(id).indexed; }

    std::int64_t total() const { return total_; }
    std::int64_t held() const { return held_; }
    std::int64_t cached() const { return evictable_; }
    std::int64_t free() const { return total_ - held_ - evictable_; }
    std::int64_t evictions() const { return evictions_; }

    // Given what every holder's tables hold (with repetitions), returns what is wrong, or an empty string.
    [[nodiscard]] std::string check(const std::vector<std::pair<HolderId, BlockId>>& held) const;

private:
    struct Meta {
        std::int32_t holders = 0;
        // Exclusive or of the holders' numbers: with one holder left it is that holder, without a list of them.
        HolderId holders_xor = 0;
        BlockId older = kNullBlock;  // neighbours among the evictable
        BlockId newer = kNullBlock;
        bool indexed = false;
        BlockKey key;
    };

    Meta& meta(BlockId id) { return meta_[static_cast<std::size_t>(id)]; }
    const Meta& meta(BlockId id) const { return meta_[static_cast<std::size_t>(id)]; }
    void add_holder(HolderId holder, BlockId id);
    void link_newest(BlockId id) noexcept;
    void unlink(BlockId id) noexcept;
    void evict_oldest();

    BlockPool& pool_;
    int group_;
    std::int64_t total_;
    std::int64_t held_ = 0;
    std::int64_t evictable_ = 0;
    std::int64_t evictions_ = 0;
    BlockId oldest_ = kNullBlock;
    BlockId newest_ = kNullBlock;
    std::vector<Meta> meta_;          // by block id
    std::vector<std::int64_t> sole_;  // by holder
    std::unordered_map<BlockKey, BlockId, BlockKeyHash> index_;  // looked up, never walked: its order decides nothing
};

}  // namespace tokenspeed::cache
