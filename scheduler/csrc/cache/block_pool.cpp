#include "cache/block_pool.h"

#include <algorithm>
#include <cassert>
#include <stdexcept>

namespace tokenspeed::cache {

BlockPool::BlockPool(int num_parents) : num_parents_(num_parents) {
    if (num_parents < 1) {
        throw std::invalid_argument("num_parents is " + std::to_string(num_parents) + ", at least 1 is needed");
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
    if (index >= children_.size()) {
        children_.resize(index + 1, 0);
        holes_.resize(index + 1, 0);
    }
    int& children = children_[index];
    if (children != 0 && children != children_per_parent) {
        throw std::invalid_argument("group " + std::to_string(group) + " has " + std::to_string(children) +
                                    " children a parent since its first use; it cannot change to " +
                                    std::to_string(children_per_parent));
    }
    children = children_per_parent;
}

int BlockPool::bind_empty(int group) {
    assert(empty_count_ > 0);
    const int index = empty_ring_[empty_head_];
    empty_head_ = (empty_head_ + 1) % empty_ring_.size();
    --empty_count_;
    const int children = children_[static_cast<std::size_t>(group)];
    Parent& parent = parents_[static_cast<std::size_t>(index)];
    parent.group = group;
    parent.free_children = children;
    parent.out.assign(static_cast<std::size_t>(children), false);
    holes_[static_cast<std::size_t>(group)] += children;
    return index;
}

BlockId BlockPool::take(int parent_index) {
    Parent& parent = parents_[static_cast<std::size_t>(parent_index)];
    assert(parent.free_children > 0);
    const auto child = std::find(parent.out.begin(), parent.out.end(), false);
    *child = true;
    --parent.free_children;
    --holes_[static_cast<std::size_t>(parent.group)];
    return parent_index * children_[static_cast<std::size_t>(parent.group)] +
           static_cast<int>(child - parent.out.begin());
}

void BlockPool::release(int group, BlockId id) noexcept {
    assert(is_out(group, id));
    const auto own = static_cast<std::size_t>(group);
    const int index = id / children_[own];
    Parent& parent = parents_[static_cast<std::size_t>(index)];
    parent.out[static_cast<std::size_t>(id % children_[own])] = false;
    ++parent.free_children;
    ++holes_[own];
    if (parent.free_children < children_[own]) return;
    holes_[own] -= children_[own];
    parent.group = -1;
    push_empty(index);
}

void BlockPool::push_empty(int parent_index) noexcept {
    const std::size_t tail = (empty_head_ + static_cast<std::size_t>(empty_count_)) % empty_ring_.size();
    empty_ring_[tail] = parent_index;
    ++empty_count_;
}

bool BlockPool::is_out(int group, BlockId id) const {
    const int children = children_[static_cast<std::size_t>(group)];
    const int index = id / children;
    if (id < children || index > num_parents_) return false;
    const Parent& parent = parents_[static_cast<std::size_t>(index)];
    return parent.group == group && parent.out[static_cast<std::size_t>(id % children)];
}

std::string BlockPool::check() const {
    int bound = 0;
    std::vector<std::int64_t> holes(children_.size(), 0);
    for (int index = 1; index <= num_parents_; ++index) {
        const Parent& parent = parents_[static_cast<std::size_t>(index)];
        if (parent.group < 0) continue;
        ++bound;
        const auto group = static_cast<std::size_t>(parent.group);
        const auto free_children = static_cast<int>(std::count(parent.out.begin(), parent.out.end(), false));
        const std::string who = "parent " + std::to_string(index) + ": ";
        if (free_children != parent.free_children) return who + "its count of free children is wrong";
        if (free_children == children_[group]) return who + "bound to a group but empty";
        holes[group] += free_children;
    }
    if (bound + empty_count_ != num_parents_) {
        return std::to_string(bound) + " bound + " + std::to_string(empty_count_) + " empty parents are not " +
               std::to_string(num_parents_);
    }
    for (std::size_t group = 0; group < children_.size(); ++group) {
        if (holes[group] != holes_[group]) return "group " + std::to_string(group) + ": wrong count of holes";
    }
    return {};
}

}  // namespace tokenspeed::cache
