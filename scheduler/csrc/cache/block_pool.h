// The physical pool all cache groups share: parents of equal size, each cut into the children (blocks) of one group.
//
// A parent is bound to a group by its first child and free for any group again when its last child is released.
// Block ids: id = parent * children_per_parent + child with parents 1 .. num_parents, so that the ids of parent 0 are
// the null blocks. Nothing here knows tokens, requests or hashes, or who holds a block: tier.h does.
#pragma once

#include <cstdint>
#include <string>
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

    // Binds the longest-empty parent to the group; there must be one.
    int bind_empty(int group);
    // Takes the lowest free child of a bound parent; there must be one.
    BlockId take(int parent);
    // Gives a block back; a parent whose children are all free is empty again. Releasing one that is not out is a broken
    // invariant and ends the process in debug builds only; check() finds it in all.
    void release(int group, BlockId id) noexcept;

    int num_parents() const { return num_parents_; }
    int num_groups() const { return static_cast<int>(children_.size()); }
    int children_per_parent(int group) const { return children_.at(static_cast<std::size_t>(group)); }
    int empty_parents() const { return empty_count_; }
    int parent_of(int group, BlockId id) const { return id / children_[static_cast<std::size_t>(group)]; }
    // The group a parent is bound to, -1 for none.
    int group_of(int parent) const { return parents_[static_cast<std::size_t>(parent)].group; }
    int free_children(int parent) const { return parents_[static_cast<std::size_t>(parent)].free_children; }
    // Blocks the group can get without anything being evicted: O(1).
    std::int64_t free_blocks(int group) const {
        const auto index = static_cast<std::size_t>(group);
        return holes_[index] + static_cast<std::int64_t>(empty_count_) * children_[index];
    }
    bool is_out(int group, BlockId id) const;

    // Returns what is wrong with the pool's own books, or an empty string.
    [[nodiscard]] std::string check() const;

private:
    struct Parent {
        int group = -1;
        int free_children = 0;
        std::vector<bool> out;  // by child; sized when bound
    };

    void push_empty(int parent_index) noexcept;

    int num_parents_;
    std::vector<int> children_;         // by group
    std::vector<std::int64_t> holes_;   // by group: free children of its parents
    std::vector<Parent> parents_;       // by index; 0 is null and never used
    std::vector<int> empty_ring_;       // FIFO of empty parents
    std::size_t empty_head_ = 0;
    int empty_count_ = 0;
};

}  // namespace tokenspeed::cache
