#include "cache/block_table.h"

#include <algorithm>
#include <utility>

namespace tokenspeed::cache {

BlockTable::BlockTable(BlockTable&& other) noexcept
    : cache_(std::exchange(other.cache_, nullptr)),
      holder_(other.holder_),
      changed_from_(std::exchange(other.changed_from_, 0)),
      version_(std::exchange(other.version_, 0)),
      ids_(std::move(other.ids_)),
      duplicates_(std::move(other.duplicates_)) {
    other.ids_.clear();
    other.duplicates_.clear();
}

BlockTable& BlockTable::operator=(BlockTable&& other) noexcept {
    if (this == &other) return *this;
    release();
    cache_ = std::exchange(other.cache_, nullptr);
    holder_ = other.holder_;
    changed_from_ = std::exchange(other.changed_from_, 0);
    version_ = std::exchange(other.version_, 0);
    ids_ = std::exchange(other.ids_, {});
    duplicates_ = std::exchange(other.duplicates_, {});
    return *this;
}

bool BlockTable::append_fresh(int count) {
    const std::size_t before = ids_.size();
    ids_.resize(before + static_cast<std::size_t>(count));
    if (cache_->acquire_fresh(holder_, std::span(ids_).subspan(before))) return true;
    ids_.resize(before);
    return false;
}

void BlockTable::append_hits(std::span<const BlockId> ids) {
    ids_.reserve(ids_.size() + ids.size());
    for (const BlockId id : ids) {
        cache_->acquire_hit(holder_, id);
        ids_.push_back(id);
    }
}

void BlockTable::append(BlockTable&& other) {
    ids_.insert(ids_.end(), other.ids_.begin(), other.ids_.end());
    other.ids_.clear();
}

void BlockTable::publish(int slot, const BlockKey& key, std::int64_t last_forward) {
    BlockId& id = ids_[static_cast<std::size_t>(slot)];
    const BlockId canonical = cache_->publish(id, key);
    if (canonical == id) return;
    cache_->acquire_hit(holder_, canonical);
    duplicates_.push_back({id, last_forward});
    id = canonical;
    changed_from_ = std::min(changed_from_, slot);
}

void BlockTable::forward_landed(std::int64_t landed) noexcept {
    if (duplicates_.empty()) return;
    std::erase_if(duplicates_, [&](const Duplicate& duplicate) {
        if (duplicate.last_forward > landed) return false;
        cache_->release(holder_, duplicate.id);
        return true;
    });
}

void BlockTable::release() noexcept {
    for (const Duplicate& duplicate : duplicates_) cache_->release(holder_, duplicate.id);
    duplicates_.clear();
    for (auto id = ids_.rbegin(); id != ids_.rend(); ++id) cache_->release(holder_, *id);
    ids_.clear();
    changed_from_ = 0;
}

void BlockTable::collect(std::vector<std::pair<HolderId, BlockId>>& held) const {
    for (const BlockId id : ids_) held.emplace_back(holder_, id);
    for (const Duplicate& duplicate : duplicates_) held.emplace_back(holder_, duplicate.id);
}

}  // namespace tokenspeed::cache
