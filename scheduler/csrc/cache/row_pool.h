// Rows of the request pool: a request that owns a device bundle owns one row; rows are reused first in, first out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace tokenspeed::cache {

class RowPool {
public:
    explicit RowPool(int rows) : ring_(static_cast<std::size_t>(rows)), free_(ring_.size()) {
        for (std::size_t i = 0; i < ring_.size(); ++i) ring_[i] = static_cast<std::int32_t>(i + 1);
    }
    RowPool(const RowPool&) = delete;
    RowPool& operator=(const RowPool&) = delete;

    int total() const { return static_cast<int>(ring_.size()); }
    int free() const { return static_cast<int>(free_); }

private:
    friend class PoolRow;

    std::int32_t take() {
        const std::int32_t row = ring_[head_];
        head_ = (head_ + 1) % ring_.size();
        --free_;
        return row;
    }
    void put_back(std::int32_t row) noexcept {
        ring_[(head_ + free_) % ring_.size()] = row;
        ++free_;
    }

    std::vector<std::int32_t> ring_;
    std::size_t head_ = 0;
    std::size_t free_;
};

// One row, owned. An empty one (none was free, or it was moved from) is false.
class PoolRow {
public:
    PoolRow() = default;
    explicit PoolRow(RowPool& pool) {
        if (pool.free() == 0) return;
        pool_ = &pool;
        row_ = pool.take();
    }
    PoolRow(PoolRow&& other) noexcept
        : pool_(std::exchange(other.pool_, nullptr)), row_(std::exchange(other.row_, 0)) {}
    PoolRow& operator=(PoolRow&& other) noexcept {
        if (this == &other) return *this;
        release();
        pool_ = std::exchange(other.pool_, nullptr);
        row_ = std::exchange(other.row_, 0);
        return *this;
    }
    PoolRow(const PoolRow&) = delete;
    PoolRow& operator=(const PoolRow&) = delete;
    ~PoolRow() { release(); }

    explicit operator bool() const { return pool_ != nullptr; }
    std::int32_t number() const { return row_; }

    void release() noexcept {
        if (pool_ != nullptr) pool_->put_back(row_);
        pool_ = nullptr;
        row_ = 0;
    }

private:
    RowPool* pool_ = nullptr;
    std::int32_t row_ = 0;
};

}  // namespace tokenspeed::cache
