#include "cache/block_table.h"

#include <algorithm>

namespace tokenspeed::cache {

BlockTable::BlockTable(BlockTable&& other) noexcept
    : tier_(std::exchange(other.tier_, nullptr)),
      group_(other.group_),
      holder_(other.holder_),
      kind_(other.kind_),
      changed_from_(std::exchange(other.changed_from_, 0)),
      version_(std::exchange(other.version_, 0)),
      nulls_(std::exchange(other.nulls_, 0)),
      expired_(std::exchange(other.expired_, 0)),
      boundary_(std::exchange(other.boundary_, 0)),
      ids_(std::exchange(other.ids_, {})),
      late_(std::exchange(other.late_, {})) {}

BlockTable& BlockTable::operator=(BlockTable&& other) noexcept {
    if (this == &other) return *this;
    release();
    tier_ = std::exchange(other.tier_, nullptr);
    group_ = other.group_;
    holder_ = other.holder_;
    kind_ = other.kind_;
    changed_from_ = std::exchange(other.changed_from_, 0);
    version_ = std::exchange(other.version_, 0);
    nulls_ = std::exchange(other.nulls_, 0);
    expired_ = std::exchange(other.expired_, 0);
    boundary_ = std::exchange(other.boundary_, 0);
    ids_ = std::exchange(other.ids_, {});
    late_ = std::exchange(other.late_, {});
    return *this;
}

void BlockTable::append_nulls(int count) {
    ids_.resize(ids_.size() + static_cast<std::size_t>(count), kNullBlock);
    nulls_ += count;
}

void BlockTable::hit(int slot, BlockId id) {
    tier_->acquire_hit(group_, holder_, id);
    fill(slot, id);
}

void BlockTable::fill(int slot, BlockId id) {
    ids_[static_cast<std::size_t>(slot)] = id;
    --nulls_;
}

void BlockTable::append(BlockTable&& other) {
    ids_.insert(ids_.end(), other.ids_.begin(), other.ids_.end());
    nulls_ += other.nulls_;
    other.ids_.clear();
    other.nulls_ = 0;
}

void BlockTable::expire(int slot) {
    const int end = std::min(slot, size());
    if (end <= expired_) return;
    // Oldest first: what lies nearest before the window is the likeliest to be asked for again.
    for (int place = expired_; place < end; ++place) {
        BlockId& id = ids_[static_cast<std::size_t>(place)];
        if (id == kNullBlock) continue;
        tier_->release(group_, holder_, id);
        id = kNullBlock;
        ++nulls_;
        changed_from_ = std::min(changed_from_, place);
    }
    expired_ = end;
}

void BlockTable::rotate(BlockTable&& fresh, std::int32_t boundary, std::int64_t last_forward) {
    late_.reserve(late_.size() + 1);
    if (ids_[0] != kNullBlock) late_.push_back({ids_[0], last_forward});
    ids_[0] = ids_[1];
    ids_[1] = fresh.ids_.at(0);
    fresh.ids_.clear();
    nulls_ = ids_[0] == kNullBlock ? 1 : 0;
    boundary_ = boundary;
    changed_from_ = 0;
}

void BlockTable::retire_input(std::int64_t last_forward) {
    if (ids_[0] == kNullBlock) return;
    late_.push_back({ids_[0], last_forward});
    ids_[0] = kNullBlock;
    ++nulls_;
    changed_from_ = 0;
}

bool BlockTable::publish(int slot, const BlockKey& key, std::int64_t last_forward) {
    BlockId& id = ids_[static_cast<std::size_t>(slot)];
    if (tier_->is_indexed(group_, id)) return false;
    late_.reserve(late_.size() + 1);
    const BlockId canonical = tier_->publish(group_, id, key);
    if (canonical == id) return true;
    tier_->acquire_hit(group_, holder_, canonical);
    late_.push_back({id, last_forward});
    id = canonical;
    changed_from_ = std::min(changed_from_, slot);
    return false;
}

void BlockTable::forward_landed(std::int64_t landed) noexcept {
    if (late_.empty()) return;
    std::erase_if(late_, [&](const Late& late) {
        if (late.last_forward > landed) return false;
        tier_->release(group_, holder_, late.id);
        return true;
    });
}

void BlockTable::release() noexcept {
    for (const Late& late : late_) tier_->release(group_, holder_, late.id);
    late_.clear();
    for (auto id = ids_.rbegin(); id != ids_.rend(); ++id) {
        if (*id != kNullBlock) tier_->release(group_, holder_, *id);
    }
    ids_.clear();
    changed_from_ = nulls_ = expired_ = 0;
}

void BlockTable::collect(std::vector<std::pair<HolderId, BlockId>>& held) const {
    for (const BlockId id : ids_) {
        if (id != kNullBlock) held.emplace_back(holder_, id);
    }
    for (const Late& late : late_) held.emplace_back(holder_, late.id);
}

}  // namespace tokenspeed::cache
