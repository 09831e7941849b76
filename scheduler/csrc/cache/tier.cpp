#include "cache/tier.h"

#include <algorithm>
#include <cassert>
#include <numeric>

namespace tokenspeed::cache {
namespace {

std::int64_t parents_for(std::int64_t blocks, int children) {
    return blocks <= 0 ? 0 : (blocks + children - 1) / children;
}

}  // namespace

Tier::Tier(int num_parents, std::span<const int> children_per_parent, int max_holders)
    : pool_(num_parents), parents_(static_cast<std::size_t>(num_parents) + 1), reclaimable_(num_parents) {
    for (const int children : children_per_parent) parent_weight_ = std::lcm(parent_weight_, children);
    least_weight_ = parent_weight_;
    for (std::size_t group = 0; group < children_per_parent.size(); ++group) {
        const int children = children_per_parent[group];
        pool_.declare(static_cast<int>(group), children);
        Group& own = groups_.emplace_back();
        own.children = children;
        own.weight = parent_weight_ / children;
        own.meta.resize((static_cast<std::size_t>(num_parents) + 1) * static_cast<std::size_t>(children));
        // No step ever waits for a larger index.
        own.blocks.reserve(own.meta.size());
        least_weight_ = std::min(least_weight_, own.weight);
    }
    sole_.resize(static_cast<std::size_t>(max_holders) + 1, 0);
}

std::int64_t Tier::spare_parents(std::span<const std::int64_t> needs, const Revival* revival) const {
    std::int64_t spare = reclaimable_ - (revival == nullptr ? 0 : revival->parents);
    for (std::size_t group = 0; group < groups_.size(); ++group) {
        const Group& own = groups_[group];
        const std::int64_t unheld = own.unheld + (revival == nullptr ? 0 : revival->unheld[group]);
        spare -= parents_for(needs[group] - unheld, own.children);
    }
    return spare;
}

std::int64_t Tier::obtainable(int group, std::span<const std::int64_t> promised) const {
    std::int64_t spare = reclaimable_;
    for (std::size_t other = 0; other < groups_.size(); ++other) {
        if (other == index(group)) continue;
        spare -= parents_for(promised[other] - groups_[other].unheld, groups_[other].children);
    }
    const Group& own = groups_[index(group)];
    return own.unheld + spare * own.children - promised[index(group)];
}

std::int64_t Tier::unheld_weight() const {
    std::int64_t weight = reclaimable_ * parent_weight_;
    for (const Group& own : groups_) weight += own.unheld * own.weight;
    return weight;
}

BlockId Tier::find(int group, const BlockKey& key) const {
    const auto& blocks = groups_[index(group)].blocks;
    const auto found = blocks.find(key);
    return found == blocks.end() ? kNullBlock : found->second;
}

void Tier::add_revival(int group, std::span<const BlockId> ids, Revival& revival) const {
    revival.unheld.resize(groups_.size(), 0);
    const Group& own = groups_[index(group)];
    std::vector<int> idle;
    std::int64_t revived = 0;
    for (const BlockId id : ids) {
        if (!is_cached(group, id)) continue;
        ++revived;
        const int parent = pool_.parent_of(group, id);
        if (parents_[static_cast<std::size_t>(parent)].held == 0) idle.push_back(parent);
    }
    std::sort(idle.begin(), idle.end());
    const auto parents = static_cast<std::int64_t>(std::unique(idle.begin(), idle.end()) - idle.begin());
    revival.parents += parents;
    revival.unheld[index(group)] += parents * own.children - revived;
}

bool Tier::acquire(HolderId holder, std::span<const std::span<BlockId>> fresh) {
    std::vector<std::int64_t> needs(groups_.size(), 0);
    for (std::size_t group = 0; group < fresh.size(); ++group) {
        needs[group] = static_cast<std::int64_t>(fresh[group].size());
    }
    if (spare_parents(needs) < 0) return false;
    for (std::size_t group = 0; group < fresh.size(); ++group) {
        for (BlockId& id : fresh[group]) {
            const BlockId obtained = obtain(static_cast<int>(group), needs);
            add_holder(groups_[group], static_cast<int>(group), holder, obtained);
            id = obtained;
            --needs[group];
        }
    }
    return true;
}

// A free block, still unheld: a hole of the group's own, else an empty parent, else whatever was let go longest ago. What
// the other needs of the same admission depend on is not taken where there is a choice.
BlockId Tier::obtain(int group, std::span<const std::int64_t> needs) {
    Group& own = groups_[index(group)];
    if (!own.holes.empty()) return pool_.take(own.holes.begin()->second);
    const bool parent_is_ours = own.loose.empty() || (!own.reuse_own_first && may_take_parent(group, needs));
    if (parent_is_ours && pool_.empty_parents() > 0) return pool_.take(pool_.bind_empty(group));
    const bool idle = parent_is_ours && oldest_idle_ != 0;
    if (!own.loose.empty() &&
        (!idle || own.loose.begin()->first < parents_[static_cast<std::size_t>(oldest_idle_)].stamp)) {
        evict(group, own.loose.begin()->second);
        return pool_.take(own.holes.begin()->second);
    }
    return take_from_idle(group);
}

bool Tier::may_take_parent(int group, std::span<const std::int64_t> needs) const {
    std::int64_t spare = reclaimable_ - 1;
    for (std::size_t other = 0; other < groups_.size(); ++other) {
        const Group& its = groups_[other];
        const std::int64_t unheld = its.unheld + (other == index(group) ? its.children : 0);
        spare -= parents_for(needs[other] - unheld, its.children);
    }
    return spare >= 0;
}

// From the idle parent that was let go longest ago: a child of it where it is the group's own, else the whole of it.
BlockId Tier::take_from_idle(int group) {
    const int parent = oldest_idle_;
    const int owner = pool_.group_of(parent);
    const int children = groups_[index(owner)].children;
    if (owner == group && pool_.free_children(parent) > 0) return pool_.take(parent);
    BlockId oldest = kNullBlock;
    for (BlockId id = parent * children; id < (parent + 1) * children; ++id) {
        if (!is_cached(owner, id)) continue;
        if (owner != group) {
            evict(owner, id);
        } else if (oldest == kNullBlock || meta(group, id).stamp < meta(group, oldest).stamp) {
            oldest = id;
        }
    }
    if (owner != group || children == 1) {
        if (owner == group) evict(group, oldest);
        return pool_.take(pool_.bind_empty(group));
    }
    evict(group, oldest);
    return pool_.take(parent);
}

void Tier::acquire_hit(int group, HolderId holder, BlockId id) {
    assert(meta(group, id).indexed);
    add_holder(groups_[index(group)], group, holder, id);
}

void Tier::add_holder(Group& own, int group, HolderId holder, BlockId id) {
    Meta& block = meta(group, id);
    if (block.holders == 0) {
        becomes_held(own, id);
        sole_[static_cast<std::size_t>(holder)] += own.weight;
    } else if (block.holders == 1) {
        sole_[static_cast<std::size_t>(block.holders_xor)] -= own.weight;
    }
    ++block.holders;
    block.holders_xor ^= holder;
}

void Tier::becomes_held(Group& own, BlockId id) {
    Meta& block = own.meta[static_cast<std::size_t>(id)];
    const int index_of_parent = id / own.children;
    Parent& parent = parents_[static_cast<std::size_t>(index_of_parent)];
    if (block.indexed) {
        if (parent.held > 0) own.loose.erase({block.stamp, id});
        if (parent.held == 0) unlink_idle(index_of_parent);
        --own.cached;
        --parent.cached;
    } else if (parent.held == 0 && parent.cached > 0) {
        unlink_idle(index_of_parent);
    }
    if (parent.held == 0) {
        --reclaimable_;
        own.unheld += own.children;
        for (BlockId child = index_of_parent * own.children;
             parent.cached > 0 && child < (index_of_parent + 1) * own.children; ++child) {
            const Meta& other = own.meta[static_cast<std::size_t>(child)];
            if (child != id && other.indexed && other.holders == 0) own.loose.emplace(other.stamp, child);
        }
    }
    ++parent.held;
    --own.unheld;
    ++own.held;
    refresh_hole(own, index_of_parent);
}

void Tier::release(int group, HolderId holder, BlockId id) noexcept {
    Group& own = groups_[index(group)];
    Meta& block = meta(group, id);
    assert(block.holders > 0);
    --block.holders;
    block.holders_xor ^= holder;
    if (block.holders == 1) {
        sole_[static_cast<std::size_t>(block.holders_xor)] += own.weight;
    } else if (block.holders == 0) {
        sole_[static_cast<std::size_t>(holder)] -= own.weight;
        becomes_unheld(own, group, id);
    }
}

void Tier::becomes_unheld(Group& own, int group, BlockId id) noexcept {
    Meta& block = own.meta[static_cast<std::size_t>(id)];
    const int index_of_parent = id / own.children;
    Parent& parent = parents_[static_cast<std::size_t>(index_of_parent)];
    --own.held;
    ++own.unheld;
    --parent.held;
    block.stamp = next_stamp_++;
    if (block.indexed) {
        ++own.cached;
        ++parent.cached;
    } else {
        pool_.release(group, id);
    }
    if (parent.held > 0) {
        if (block.indexed) own.loose.emplace(block.stamp, id);
    } else {
        ++reclaimable_;
        own.unheld -= own.children;
        for (BlockId child = index_of_parent * own.children;
             parent.cached > 0 && own.children > 1 && child < (index_of_parent + 1) * own.children; ++child) {
            const Meta& other = own.meta[static_cast<std::size_t>(child)];
            if (child != id && other.indexed) own.loose.erase({other.stamp, child});
        }
        if (parent.cached > 0) link_idle(index_of_parent, block.stamp);
    }
    refresh_hole(own, index_of_parent);
}

BlockId Tier::publish(int group, BlockId id, const BlockKey& key) {
    Meta& block = meta(group, id);
    assert(block.holders > 0);
    if (block.indexed) return id;
    const auto [place, inserted] = groups_[index(group)].blocks.try_emplace(key, id);
    if (inserted) {
        block.indexed = true;
        block.key = key;
    }
    return place->second;
}

void Tier::evict(int group, BlockId id) {
    Group& own = groups_[index(group)];
    Meta& block = meta(group, id);
    const int index_of_parent = id / own.children;
    Parent& parent = parents_[static_cast<std::size_t>(index_of_parent)];
    ++evictions_;
    own.blocks.erase(block.key);
    block.indexed = false;
    --own.cached;
    --parent.cached;
    if (parent.held > 0) {
        own.loose.erase({block.stamp, id});
    } else if (parent.cached == 0) {
        unlink_idle(index_of_parent);
    }
    pool_.release(group, id);
    refresh_hole(own, index_of_parent);
}

void Tier::forget_cached() {
    const std::int64_t evictions = evictions_;
    for (int group = 0; group < num_groups(); ++group) {
        const auto blocks = static_cast<BlockId>(groups_[index(group)].meta.size());
        for (BlockId id = 0; id < blocks; ++id) {
            if (is_cached(group, id)) evict(group, id);
        }
    }
    evictions_ = evictions;
}

void Tier::link_idle(int parent, std::int64_t stamp) noexcept {
    Parent& own = parents_[static_cast<std::size_t>(parent)];
    own.stamp = stamp;
    own.older = newest_idle_;
    own.newer = 0;
    (newest_idle_ == 0 ? oldest_idle_ : parents_[static_cast<std::size_t>(newest_idle_)].newer) = parent;
    newest_idle_ = parent;
}

void Tier::unlink_idle(int parent) noexcept {
    Parent& own = parents_[static_cast<std::size_t>(parent)];
    (own.older == 0 ? oldest_idle_ : parents_[static_cast<std::size_t>(own.older)].newer) = own.newer;
    (own.newer == 0 ? newest_idle_ : parents_[static_cast<std::size_t>(own.newer)].older) = own.older;
    own.older = own.newer = 0;
}

void Tier::refresh_hole(Group& own, int parent) {
    if (own.children == 1) return;
    Parent& its = parents_[static_cast<std::size_t>(parent)];
    const int hole = its.held > 0 ? pool_.free_children(parent) : 0;
    if (hole == its.hole) return;
    if (its.hole > 0) own.holes.erase({its.hole, parent});
    if (hole > 0) own.holes.emplace(hole, parent);
    its.hole = hole;
}

std::string Tier::check(const Holdings& held) const {
    if (std::string wrong = pool_.check(); !wrong.empty()) return "pool: " + wrong;
    if (std::string wrong = check_parents(); !wrong.empty()) return wrong;
    std::vector<std::int64_t> sole(sole_.size(), 0);
    for (int group = 0; group < num_groups(); ++group) {
        const std::string wrong = check_group(group, held[index(group)], sole);
        if (!wrong.empty()) return "group " + std::to_string(group) + ": " + wrong;
    }
    if (sole != sole_) return "wrong weight of what one holder alone holds";
    return {};
}

std::string Tier::check_parents() const {
    std::int64_t reclaimable = 0;
    std::size_t idle = 0;
    std::vector<std::int64_t> unheld(groups_.size(), 0);
    std::vector<std::size_t> holes(groups_.size(), 0), loose(groups_.size(), 0);
    for (int parent = 1; parent <= pool_.num_parents(); ++parent) {
        const std::string who = "parent " + std::to_string(parent) + ": ";
        const Parent& books = parents_[static_cast<std::size_t>(parent)];
        const int group = pool_.group_of(parent);
        int held = 0, cached = 0;
        if (group >= 0) {
            const Group& own = groups_[index(group)];
            for (BlockId id = parent * own.children; id < (parent + 1) * own.children; ++id) {
                held += meta(group, id).holders > 0 ? 1 : 0;
                cached += is_cached(group, id) ? 1 : 0;
                if (is_cached(group, id) && books.held > 0) {
                    ++loose[index(group)];
                    if (!own.loose.contains({meta(group, id).stamp, id})) return who + "a cached child is missing among the loose";
                }
            }
            if (held + cached + pool_.free_children(parent) != own.children) return who + "held + cached + free children are not all";
            const int hole = own.children > 1 && held > 0 ? pool_.free_children(parent) : 0;
            if (hole != books.hole) return who + "wrong among the holes";
            holes[index(group)] += hole > 0 ? 1 : 0;
            if (held > 0) unheld[index(group)] += own.children - held;
        }
        if (held != books.held || cached != books.cached) return who + "wrong count of held or cached children";
        reclaimable += held == 0 ? 1 : 0;
        idle += held == 0 && cached > 0 ? 1 : 0;
    }
    if (reclaimable != reclaimable_) return "wrong count of reclaimable parents";
    for (std::size_t group = 0; group < groups_.size(); ++group) {
        const Group& own = groups_[group];
        if (unheld[group] != own.unheld) return "group " + std::to_string(group) + ": wrong count of unheld children";
        if (holes[group] != own.holes.size() || loose[group] != own.loose.size()) {
            return "group " + std::to_string(group) + ": wrong set of holes or of loose blocks";
        }
    }
    std::size_t linked = 0;
    for (int parent = oldest_idle_; parent != 0; parent = parents_[static_cast<std::size_t>(parent)].newer, ++linked) {
        const Parent& books = parents_[static_cast<std::size_t>(parent)];
        if (books.held != 0 || books.cached == 0) return "parent " + std::to_string(parent) + ": listed as idle, but is not";
    }
    if (linked != idle) return "wrong list of idle parents";
    return {};
}

std::string Tier::check_group(int group, const std::vector<std::pair<HolderId, BlockId>>& held,
                              std::vector<std::int64_t>& sole) const {
    const Group& own = groups_[index(group)];
    std::vector<std::int32_t> holders(own.meta.size(), 0);
    std::vector<HolderId> holders_xor(own.meta.size(), 0);
    for (const auto& [holder, id] : held) {
        if (!pool_.is_out(group, id)) return "block " + std::to_string(id) + " is held but with the pool";
        ++holders[static_cast<std::size_t>(id)];
        holders_xor[static_cast<std::size_t>(id)] ^= holder;
    }
    std::int64_t held_blocks = 0, cached = 0, indexed = 0;
    for (std::size_t i = 0; i < own.meta.size(); ++i) {
        const auto id = static_cast<BlockId>(i);
        const Meta& block = own.meta[i];
        const std::string who = "block " + std::to_string(id) + ": ";
        if (holders[i] != block.holders || holders_xor[i] != block.holders_xor) return who + "wrong holders";
        held_blocks += holders[i] > 0 ? 1 : 0;
        if (holders[i] == 1) sole[static_cast<std::size_t>(holders_xor[i])] += own.weight;
        if (block.indexed && find(group, block.key) != id) return who + "indexed, but not found under its key";
        indexed += block.indexed ? 1 : 0;
        cached += is_cached(group, id) ? 1 : 0;
        if (pool_.is_out(group, id) != (holders[i] > 0 || block.indexed)) {
            return who + "neither held nor cached nor free";
        }
    }
    if (cached != own.cached) return "wrong count of cached blocks";
    if (held_blocks != own.held) return "wrong count of held blocks";
    if (static_cast<std::size_t>(indexed) != own.blocks.size()) return "the index has entries without a block";
    return {};
}

}  // namespace tokenspeed::cache
