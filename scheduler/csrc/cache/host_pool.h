// Blocks in host memory. Two move-only owners: HostPins keeps entries from being evicted while a fetch fills or reads
// them, HostImage is a retracted request's copy of its device blocks and slot state.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace tokenspeed::cache {

using HostBlockId = std::int32_t;

class HostPool {
public:
    explicit HostPool(int blocks) : total_(blocks) {
        for (int block = blocks; block >= 1; --block) free_.push_back(block);
    }
    HostPool(const HostPool&) = delete;
    HostPool& operator=(const HostPool&) = delete;

    int total() const { return total_; }
    int free() const { return static_cast<int>(free_.size()); }

private:
    friend class HostBlocks;
    int total_;
    std::vector<HostBlockId> free_;
};

// Some blocks of the pool, owned together; all or nothing. An empty one is false.
class HostBlocks {
public:
    HostBlocks() = default;
    HostBlocks(HostPool& pool, int count) {
        if (count > pool.free()) return;
        pool_ = &pool;
        ids_.assign(pool.free_.end() - count, pool.free_.end());
        pool.free_.resize(pool.free_.size() - static_cast<std::size_t>(count));
    }
    HostBlocks(HostBlocks&& other) noexcept
        : pool_(std::exchange(other.pool_, nullptr)), ids_(std::exchange(other.ids_, {})) {}
    HostBlocks& operator=(HostBlocks&& other) noexcept {
        if (this == &other) return *this;
        release();
        pool_ = std::exchange(other.pool_, nullptr);
        ids_ = std::exchange(other.ids_, {});
        return *this;
    }
    HostBlocks(const HostBlocks&) = delete;
    HostBlocks& operator=(const HostBlocks&) = delete;
    ~HostBlocks() { release(); }

    explicit operator bool() const { return pool_ != nullptr; }
    std::span<const HostBlockId> ids() const { return ids_; }

    void release() noexcept {
        // The pool's list never shrank below what it handed out, so this cannot allocate.
        if (pool_ != nullptr) pool_->free_.insert(pool_->free_.end(), ids_.rbegin(), ids_.rend());
        pool_ = nullptr;
        ids_.clear();
    }

private:
    HostPool* pool_ = nullptr;
    std::vector<HostBlockId> ids_;
};

}  // namespace tokenspeed::cache
