#include "cache/group_cache.h"

#include <cassert>

namespace tokenspeed::cache {

GroupCache::GroupCache(BlockPool& pool, int group, int children_per_parent, int max_holders)
    : pool_(pool), group_(group), total_(static_cast<std::int64_t>(pool.num_parents()) * children_per_parent) {
    pool_.declare(group, children_per_parent);
    meta_.resize(static_cast<std::size_t>(total_ + children_per_parent));
    sole_.resize(static_cast<std::size_t>(max_holders) + 1, 0);
}

BlockId GroupCache::find(const BlockKey& key) const {
    const auto found = index_.find(key);
    return found == index_.end() ? kNullBlock : found->second;
}

bool GroupCache::acquire_fresh(HolderId holder, std::span<BlockId> ids) {
    const auto wanted = static_cast<std::int64_t>(ids.size());
    if (wanted > obtainable()) return false;
    while (pool_.free_blocks(group_) < wanted) evict_oldest();
    if (!pool_.acquire(group_, ids)) return false;
    for (const BlockId id : ids) add_holder(holder, id);
    return true;
}

void GroupCache::acquire_hit(HolderId holder, BlockId id) {
    assert(meta(id).indexed);
    if (meta(id).holders == 0) {
        unlink(id);
        --evictable_;
    }
    add_holder(holder, id);
}

void GroupCache::add_holder(HolderId holder, BlockId id) {
    Meta& block = meta(id);
    if (block.holders == 0) {
        ++held_;
        ++sole_[static_cast<std::size_t>(holder)];
    } else if (block.holders == 1) {
        --sole_[static_cast<std::size_t>(block.holders_xor)];
    }
    ++block.holders;
    block.holders_xor ^= holder;
}

void GroupCache::release(HolderId holder, BlockId id) noexcept {
    Meta& block = meta(id);
    assert(block.holders > 0);
    --block.holders;
    block.holders_xor ^= holder;
    if (block.holders == 1) {
        ++sole_[static_cast<std::size_t>(block.holders_xor)];
    } else if (block.holders == 0) {
        --sole_[static_cast<std::size_t>(holder)];
        --held_;
        if (block.indexed) {
            link_newest(id);
            ++evictable_;
        } else {
            pool_.release(group_, id);
        }
    }
}

BlockId GroupCache::publish(BlockId id, const BlockKey& key) {
    Meta& block = meta(id);
    assert(block.holders > 0);
    if (block.indexed) return id;
    const auto [place, inserted] = index_.try_emplace(key, id);
    if (inserted) {
        block.indexed = true;
        block.key = key;
    }
    return place->second;
}

void GroupCache::link_newest(BlockId id) noexcept {
    Meta& block = meta(id);
    block.older = newest_;
    block.newer = kNullBlock;
    (newest_ == kNullBlock ? oldest_ : meta(newest_).newer) = id;
    newest_ = id;
}

void GroupCache::unlink(BlockId id) noexcept {
    Meta& block = meta(id);
    (block.older == kNullBlock ? oldest_ : meta(block.older).newer) = block.newer;
    (block.newer == kNullBlock ? newest_ : meta(block.newer).older) = block.older;
    block.older = block.newer = kNullBlock;
}

// Tables release suffix first and whoever holds a page holds all before it, so the oldest evictable block never is one
// that another cached block continues: within a chain the suffix goes first.
void GroupCache::evict_oldest() {
    const BlockId id = oldest_;
    unlink(id);
    --evictable_;
    ++evictions_;
    Meta& block = meta(id);
    index_.erase(block.key);
    block.indexed = false;
    pool_.release(group_, id);
}

std::string GroupCache::check(const std::vector<std::pair<HolderId, BlockId>>& held) const {
    std::vector<std::int32_t> holders(meta_.size(), 0);
    std::vector<HolderId> holders_xor(meta_.size(), 0);
    for (const auto& [holder, id] : held) {
        if (!pool_.is_out(group_, id)) return "block " + std::to_string(id) + " is in a table but with the pool";
        ++holders[static_cast<std::size_t>(id)];
        holders_xor[static_cast<std::size_t>(id)] ^= holder;
    }
    std::int64_t held_blocks = 0, evictable = 0, indexed = 0;
    std::vector<std::int64_t> sole(sole_.size(), 0);
    for (std::size_t i = 0; i < meta_.size(); ++i) {
        const auto id = static_cast<BlockId>(i);
        const std::string who = "block " + std::to_string(id) + ": ";
        if (holders[i] != meta_[i].holders || holders_xor[i] != meta_[i].holders_xor) return who + "wrong holders";
        held_blocks += holders[i] > 0 ? 1 : 0;
        if (holders[i] == 1) ++sole[static_cast<std::size_t>(holders_xor[i])];
        if (meta_[i].indexed && find(meta_[i].key) != id) return who + "indexed, but not found under its key";
        indexed += meta_[i].indexed ? 1 : 0;
        evictable += is_evictable(id) ? 1 : 0;
        if (pool_.is_out(group_, id) != (holders[i] > 0 || meta_[i].indexed)) {
            return who + "neither held nor cached nor free";
        }
    }
    std::int64_t linked = 0;
    for (BlockId id = oldest_; id != kNullBlock; id = meta(id).newer, ++linked) {
        if (!is_evictable(id)) return "block " + std::to_string(id) + ": in the order of eviction, but not evictable";
    }
    if (linked != evictable || evictable != evictable_) return "wrong count of evictable blocks";
    if (held_blocks != held_) return "wrong count of held blocks";
    if (static_cast<std::size_t>(indexed) != index_.size()) return "the index has entries without a block";
    if (sole != sole_) return "wrong count of blocks held by one holder alone";
    return {};
}

}  // namespace tokenspeed::cache
