// One tier of the cache (the device, the host): a pool of parents, and for every cache group who holds which block, which
// blocks are known by content, and what gives way when room is needed.
//
// A block is *held* (somebody's table, image or operation has it), *cached* (nobody holds it, but its content is indexed,
// so it can be hit or evicted) or *free* (with the pool). Holders are numbers; for every holder the tier keeps how much it
// alone holds, which is what retracting it would free.
//
// "Does it fit?" is O(groups). A parent of which nobody holds a child is *reclaimable*: whatever is cached in it can be
// evicted, for any group. In the others a group can get every child of its own that nobody holds. So needs fit where
//     sum over groups of ceil(max(need - own unheld children in parents with a held one, 0) / children per parent)
// parents are reclaimable.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache/block_pool.h"
#include "cache/page_hash.h"

namespace tokenspeed::cache {

using HolderId = std::int32_t;

// What reviving cached blocks (holding them again) takes from a tier.
struct Revival {
    std::int64_t parents = 0;           // reclaimable ones that become held
    std::vector<std::int64_t> unheld;   // by group: change of the unheld children in held parents
};

// What a block may be, by its letter in Tier::map.
enum class BlockUse : std::uint8_t { Pinned, Held, Cached, Free, Elsewhere };
inline constexpr std::string_view kUseLetters = "phc.-";

class Tier {
public:
    // Holders are 1 .. max_holders.
    Tier(int num_parents, std::span<const int> children_per_parent, int max_holders);
    Tier(const Tier&) = delete;
    Tier& operator=(const Tier&) = delete;

    // The group's own cached blocks beside held ones give way before another parent is taken: for what passes on, as a
    // window does, so that it does not come to lie strewn.
    void reuse_own_first(int group) { groups_[index(group)].reuse_own_first = true; }

    int num_groups() const { return static_cast<int>(groups_.size()); }
    const BlockPool& pool() const { return pool_; }

    // Parents that would be left if `needs` (blocks by group) were acquired, after reviving `revival`; negative: so many
    // are missing. O(groups).
    std::int64_t spare_parents(std::span<const std::int64_t> needs, const Revival* revival = nullptr) const;
    // What of the group can be had if `promised` (blocks by group) goes to others first.
    std::int64_t obtainable(int group, std::span<const std::int64_t> promised) const;
    // What nobody holds, in units of which a block of group g has weight(g) and a parent weight_of_parent().
    std::int64_t unheld_weight() const;
    std::int64_t weight(int group) const { return groups_[index(group)].weight; }
    std::int64_t weight_of_parent() const { return parent_weight_; }
    std::int64_t least_weight() const { return least_weight_; }
    // The weight of what nobody but this holder holds.
    std::int64_t sole_weight(HolderId holder) const { return sole_[static_cast<std::size_t>(holder)]; }

    // Read only: the block with this content, or kNullBlock.
    [[nodiscard]] BlockId find(int group, const BlockKey& key) const;
    bool is_cached(int group, BlockId id) const { return meta(group, id).holders == 0 && meta(group, id).indexed; }
    bool is_indexed(int group, BlockId id) const { return meta(group, id).indexed; }
    const BlockKey& key_of(int group, BlockId id) const { return meta(group, id).key; }
    // Whether this holder, and nobody else, holds the block.
    bool held_by_alone(int group, HolderId holder, BlockId id) const {
        return meta(group, id).holders == 1 && meta(group, id).holders_xor == holder;
    }
    // What holding these blocks (of one group, each cached or held) would take; added to `revival`.
    void add_revival(int group, std::span<const BlockId> ids, Revival& revival) const;

    // Fills fresh[group] for every group with blocks for the holder; evicts the least recently used where the pool has
    // none. All or nothing: returns false and changes nothing where they do not fit.
    [[nodiscard]] bool acquire(HolderId holder, std::span<const std::span<BlockId>> fresh);
    // Shares a block whose content is indexed.
    void acquire_hit(int group, HolderId holder, BlockId id);
    // Shares a block that somebody holds.
    void share(int group, HolderId holder, BlockId id) { add_holder(groups_[index(group)], group, holder, id); }
    // The holder lets go. A block nobody holds becomes cached (most recently used) or, unindexed, free.
    void release(int group, HolderId holder, BlockId id) noexcept;
    // Makes the content of a held block known. Returns the canonical block of that content: `id`, or the one before it.
    BlockId publish(int group, BlockId id, const BlockKey& key);

    // Forgets the content of every block that nobody holds: all cached blocks become free. No eviction: nothing gave way.
    void forget_cached();

    std::int64_t total(int group) const {
        return static_cast<std::int64_t>(pool_.num_parents()) * groups_[index(group)].children;
    }
    std::int64_t held(int group) const { return groups_[index(group)].held; }
    std::int64_t cached(int group) const { return groups_[index(group)].cached; }
    // What the group can get without anything being evicted.
    std::int64_t free(int group) const { return pool_.free_blocks(group); }
    std::int64_t evictions() const { return evictions_; }
    // A picture of the group's blocks in the order of their ids: one of kUseLetters for each of at most `cells` equal runs,
    // that of most of its blocks. A use that would not show anywhere gets the run that has most of it, unless that is the
    // only one of another use. `pinned` (sorted, without repetitions) are held; nullptr: whatever is held is pinned.
    // O(blocks), and fast where parents are whole: only mixed ones are looked into.
    std::string map(int group, int cells, const std::vector<BlockId>* pinned) const;

    // Given what every holder holds of every group (with repetitions), returns what is wrong, or an empty string.
    using Holdings = std::vector<std::vector<std::pair<HolderId, BlockId>>>;
    [[nodiscard]] std::string check(const Holdings& held) const;

private:
    struct Meta {
        std::int32_t holders = 0;
        // Exclusive or of the holders' numbers: with one holder left it is that holder, without a list of them.
        HolderId holders_xor = 0;
        bool indexed = false;
        std::int64_t stamp = 0;  // when it was let go last: the order of eviction
        BlockKey key;
    };
    struct Group {
        int children = 1;
        bool reuse_own_first = false;
        std::int64_t weight = 1;
        std::int64_t unheld = 0;  // unheld children in parents with a held one
        std::int64_t held = 0;
        std::int64_t cached = 0;
        std::vector<Meta> meta;                       // by block id
        std::unordered_map<BlockKey, BlockId, BlockKeyHash> blocks;  // looked up, never walked: its order decides nothing
        std::set<std::pair<std::int64_t, BlockId>> loose;  // cached children in parents with a held one, oldest first
        std::set<std::pair<int, int>> holes;  // (free children, parent) of parents with a held child: the fullest first
    };
    // A parent with cached but no held children is *idle* and in the list of those, the least recently used first.
    struct Parent {
        int held = 0;
        int cached = 0;
        int hole = 0;  // its entry among the holes: its free children, 0 for none
        int older = 0;
        int newer = 0;
        std::int64_t stamp = 0;
    };

    static std::size_t index(int group) { return static_cast<std::size_t>(group); }
    Meta& meta(int group, BlockId id) { return groups_[index(group)].meta[static_cast<std::size_t>(id)]; }
    const Meta& meta(int group, BlockId id) const { return groups_[index(group)].meta[static_cast<std::size_t>(id)]; }
    void add_holder(Group& own, int group, HolderId holder, BlockId id);
    void becomes_held(Group& own, BlockId id);
    void becomes_unheld(Group& own, int group, BlockId id) noexcept;
    BlockId obtain(int group, std::span<const std::int64_t> needs);
    bool may_take_parent(int group, std::span<const std::int64_t> needs) const;
    BlockId take_from_idle(int group);
    void evict(int group, BlockId id);
    void link_idle(int parent, std::int64_t stamp) noexcept;
    void unlink_idle(int parent) noexcept;
    void refresh_hole(Group& own, int parent);
    std::string check_parents() const;
    std::string check_group(int group, const std::vector<std::pair<HolderId, BlockId>>& held,
                            std::vector<std::int64_t>& sole) const;

    BlockPool pool_;
    std::vector<Group> groups_;
    std::vector<Parent> parents_;       // by index
    std::vector<std::int64_t> sole_;    // by holder
    std::int64_t parent_weight_ = 1;
    std::int64_t least_weight_ = 1;
    std::int64_t reclaimable_ = 0;      // parents without a held child
    std::int64_t next_stamp_ = 1;
    std::int64_t evictions_ = 0;
    int oldest_idle_ = 0;
    int newest_idle_ = 0;
};

}  // namespace tokenspeed::cache
