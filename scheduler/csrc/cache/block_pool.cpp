#include "cache/block_pool.h"

#include <cassert>
#include <stdexcept>

namespace tokenspeed::cache {

BlockPool::BlockPool(int num_parents) : num_parents_(num_parents) {
    if (num_parents < 1) {
        throw std::invalid_argument("num_parents is " + std::to_string(num_parents) +
                                    ": the pool needs at least one parent beside the null parent");
    }
    parents_.resize(static_cast<std::size_t>(num_parents) + 1);
    empty_ring_.resize(static_cast<std::size_t>(num_parents));
    for (int parent = 1; parent <= num_parents; ++parent) push_empty(parent);
}

void BlockPool::declare(int group, int children_per_parent) {
    if (children_per_parent < 1) {
        throw std::invalid_argument("group " + std::to_string(group) + ": children_per_parent is " +
                                    std::to_string(children_per_parent) + ", at least 1 is needed");
    }
    const auto index = static_cast<std::size_t>(group);
    if (index >= groups_.size()) groups_.resize(index + 1);
    int& children = groups_[index].children;
    if (children != 0 && children != children_per_parent) {
        throw std::invalid_argument("group " + std::to_string(group) + " has " + std::to_string(children) +
                                    " children a parent since its first use; it cannot change to " +
                                    std::to_string(children_per_parent));
    }
    children = children_per_parent;
}

bool BlockPool::can_acquire(int group, std::int64_t count) const { return count <= free_blocks(group); }

bool BlockPool::acquire(int group, std::span<BlockId> ids) {
    if (!can_acquire(group, static_cast<std::int64_t>(ids.size()))) return false;
    Group& own = groups_[static_cast<std::size_t>(group)];
    for (BlockId& id : ids) {
        const int parent = own.partly.empty() ? take_empty_parent(group) : own.partly.begin()->second;
        id = take_child(own, parent);
    }
    return true;
}

int BlockPool::take_empty_parent(int group) {
    const int index = empty_ring_[empty_head_];
    empty_head_ = (empty_head_ + 1) % empty_ring_.size();
    --empty_count_;
    Group& own = groups_[static_cast<std::size_t>(group)];
    Parent& parent = parents_[static_cast<std::size_t>(index)];
    parent.group = group;
    parent.free_children = own.children;
    parent.out.assign(static_cast<std::size_t>(own.children), false);
    own.holes += own.children;
    if (own.children > 1) own.partly.emplace(own.children, index);
    return index;
}

BlockId BlockPool::take_child(Group& own, int parent_index) {
    Parent& parent = parents_[static_cast<std::size_t>(parent_index)];
    int child = 0;
    while (parent.out[static_cast<std::size_t>(child)]) ++child;
    parent.out[static_cast<std::size_t>(child)] = true;
    if (own.children > 1) {
        own.partly.erase({parent.free_children, parent_index});
        if (parent.free_children > 1) own.partly.emplace(parent.free_children - 1, parent_index);
    }
    --parent.free_children;
    --own.holes;
    return parent_index * own.children + child;
}

void BlockPool::release(int group, BlockId id) noexcept {
    assert(is_out(group, id));
    Group& own = groups_[static_cast<std::size_t>(group)];
    const int index = id / own.children;
    Parent& parent = parents_[static_cast<std::size_t>(index)];
    parent.out[static_cast<std::size_t>(id % own.children)] = false;
    if (own.children > 1 && parent.free_children > 0) own.partly.erase({parent.free_children, index});
    ++parent.free_children;
    ++own.holes;
    if (parent.free_children == own.children) {
        own.holes -= own.children;
        parent.group = -1;
        push_empty(index);
    } else {
        own.partly.emplace(parent.free_children, index);
    }
}

void BlockPool::push_empty(int parent_index) noexcept {
    const std::size_t tail = (empty_head_ + static_cast<std::size_t>(empty_count_)) % empty_ring_.size();
    empty_ring_[tail] = parent_index;
    ++empty_count_;
}

bool BlockPool::is_out(int group, BlockId id) const {
    const int children = groups_[static_cast<std::size_t>(group)].children;
    const int index = id / children;
    if (id < children || index > num_parents_) return false;
    const Parent& parent = parents_[static_cast<std::size_t>(index)];
    return parent.group == group && parent.out[static_cast<std::size_t>(id % children)];
}

std::string BlockPool::check() const {
    int bound = 0;
    std::vector<std::int64_t> holes(groups_.size(), 0);
    std::vector<std::size_t> partly(groups_.size(), 0);
    for (int index = 1; index <= num_parents_; ++index) {
        const Parent& parent = parents_[static_cast<std::size_t>(index)];
        if (parent.group < 0) continue;
        ++bound;
        const auto group = static_cast<std::size_t>(parent.group);
        int free_children = 0;
        for (const bool out : parent.out) free_children += out ? 0 : 1;
        const std::string who = "parent " + std::to_string(index) + ": ";
        if (free_children != parent.free_children) return who + "its count of free children is wrong";
        if (free_children == groups_[group].children) return who + "bound to a group but empty";
        holes[group] += free_children;
        if (free_children == 0) continue;
        ++partly[group];
        if (!groups_[group].partly.contains({free_children, index})) return who + "missing among the partly filled";
    }
    if (bound + empty_count_ != num_parents_) {
        return std::to_string(bound) + " bound + " + std::to_string(empty_count_) + " empty parents are not " +
               std::to_string(num_parents_);
    }
    for (std::size_t group = 0; group < groups_.size(); ++group) {
        if (holes[group] != groups_[group].holes) return "group " + std::to_string(group) + ": wrong count of holes";
        if (partly[group] != groups_[group].partly.size()) {
            return "group " + std::to_string(group) + ": wrong set of partly filled parents";
        }
    }
    return {};
}

}  // namespace tokenspeed::cache
