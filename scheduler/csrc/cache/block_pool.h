// The physical pool all cache groups share: parents of equal size, each cut into the children (blocks) of one group.
//
// A parent is bound to a group by its first child and free for any group again when its last child is released.
// Block ids: id = parent * children_per_parent + child with parents 1 .. num_parents, so that the ids of parent 0 are
// the null blocks. Nothing here knows tokens, requests or hashes.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace tokenspeed::cache {

using BlockId = std::int32_t;
inline constexpr BlockId kNullBlock = 0;

class BlockPool {
public:
    // Throws std::invalid_argument for fewer than one parent.
    explicit BlockPool(int num_parents);

    // Tells the pool how many children group `group` cuts a parent into. The first call decides: another figure later
    // is std::invalid_argument, even if everything was freed in between.
    void declare(int group, int children_per_parent);

    // Whether `count` blocks can be acquired for the group right now.
    [[nodiscard]] bool can_acquire(int group, std::int64_t count) const;

    // Fills `ids` with fresh blocks: holes of the group's own parents first (the fullest parent, then the lowest), then
    // the longest-empty parents. All or nothing: returns false and changes nothing where they do not suffice.
    [[nodiscard]] bool acquire(int group, std::span<BlockId> ids);

    // Gives a block back. Releasing one that is not out is a broken invariant and ends the process in debug builds
    // only; check() finds it in all.
    void release(int group, BlockId id) noexcept;

    int num_parents() const { return num_parents_; }
    int num_groups() const { return static_cast<int>(groups_.size()); }
    int children_per_parent(int group) const { return groups_.at(static_cast<std::size_t>(group)).children; }
    int empty_parents() const { return empty_count_; }
    // Blocks the group can still get: holes in its own parents and whole empty parents.
    std::int64_t free_blocks(int group) const {
        const Group& own = groups_[static_cast<std::size_t>(group)];
        return own.holes + static_cast<std::int64_t>(empty_count_) * own.children;
    }
    bool is_out(int group, BlockId id) const;

    // Returns what is wrong with the pool's own books, or an empty string.
    [[nodiscard]] std::string check() const;

private:
    struct Group {
        int children = 0;
        std::int64_t holes = 0;                     // free children in parents bound to this group
        std::set<std::pair<int, int>> partly;       // (free children, parent): the fullest first, then the lowest
    };
    struct Parent {
        int group = -1;
        int free_children = 0;
        std::vector<bool> out;  // by child; sized when bound
    };

    int take_empty_parent(int group);
    BlockId take_child(Group& own, int parent_index);
    void push_empty(int parent_index) noexcept;

    int num_parents_;
    std::vector<Group> groups_;
    std::vector<Parent> parents_;   // by index; 0 is null and never used
    std::vector<int> empty_ring_;   // FIFO of empty parents
    std::size_t empty_head_ = 0;
    int empty_count_ = 0;
};

}  // namespace tokenspeed::cache
