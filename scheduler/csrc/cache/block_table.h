// The owner of a request's blocks in one cache group. Move-only; its end gives every block back, suffix first.
//
// Of a history group, slot s holds the block of tokens [s * block_granularity, (s + 1) * block_granularity); slots that a
// sliding window has left behind are null. A state group has two slots: *input*, the state a forward begins with, and
// *live*, the one it writes; where the input is null it goes on from the live one.
//
// The device keeps a copy of each table and is told what changed: the table remembers from which slot on the copy is out
// of date.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "cache/tier.h"

namespace tokenspeed::cache {

enum class TableKind : std::uint8_t { History, State };

class BlockTable {
public:
    BlockTable() = default;
    BlockTable(Tier& tier, int group, HolderId holder, TableKind kind = TableKind::History)
        : tier_(&tier), group_(group), holder_(holder), kind_(kind) {}
    BlockTable(BlockTable&& other) noexcept;
    BlockTable& operator=(BlockTable&& other) noexcept;
    BlockTable(const BlockTable&) = delete;
    BlockTable& operator=(const BlockTable&) = delete;
    ~BlockTable() { release(); }

    TableKind kind() const { return kind_; }
    bool empty() const { return ids_.empty(); }
    int size() const { return static_cast<int>(ids_.size()); }
    // Slots that are not null; what a retraction would copy.
    int blocks() const { return size() - nulls_; }
    std::span<const BlockId> ids() const { return ids_; }
    BlockId at(int slot) const { return ids_[static_cast<std::size_t>(slot)]; }

    // Appends null slots: what lies before a sliding window, a state group's missing input, or what hit() and fill() set.
    void append_nulls(int count);
    // Sets a null slot to a block that is indexed, which it shares.
    void hit(int slot, BlockId id);
    // Sets a null slot to a block that was acquired for this holder.
    void fill(int slot, BlockId id);
    // Appends blocks that were acquired for this holder.
    void append_acquired(std::span<const BlockId> ids) { ids_.insert(ids_.end(), ids.begin(), ids.end()); }
    // Appends another table's blocks of the same holder, which is empty afterwards.
    void append(BlockTable&& other);

    // History: lets go of the blocks before `slot`, which nothing will read any more.
    void expire(int slot);
    // State: the live block becomes the input, holding the state after `boundary` tokens; the other table's only block
    // becomes the live one. The old input stays held until the forwards up to `last_forward` have landed.
    void rotate(BlockTable&& fresh, std::int32_t boundary, std::int64_t last_forward);
    // State: the forward that read the input is scheduled, the next one goes on from the live block: lets go of the input
    // once the forwards up to `last_forward` have landed.
    void retire_input(std::int64_t last_forward);
    // State: tokens whose state the newest checkpoint holds, which is the input until it is retired; 0 for none.
    std::int32_t boundary() const { return boundary_; }
    void set_boundary(std::int32_t boundary) { boundary_ = boundary; }

    // Publishes the block of a slot under its content. Where that content has a canonical block already, the slot is
    // redirected to it; the duplicate stays held until the forwards up to `last_forward`, which may still read it, have
    // landed. Returns whether the content is new.
    bool publish(int slot, const BlockKey& key, std::int64_t last_forward);
    // Lets go of what no forward after `landed` can read.
    void forward_landed(std::int64_t landed) noexcept;

    // Gives every block back, suffix first.
    void release() noexcept;

    // The device's copy: from which slot on it is out of date (size() where it is not), and its version.
    int changed_from() const { return changed_from_; }
    bool changed() const { return changed_from_ < size(); }
    int version() const { return version_; }
    void mark_sent() {
        changed_from_ = size();
        ++version_;
    }

    // For check_invariants(): appends (holder, block) for everything this table holds.
    void collect(std::vector<std::pair<HolderId, BlockId>>& held) const;

private:
    struct Late {
        BlockId id;
        std::int64_t last_forward;
    };

    Tier* tier_ = nullptr;
    int group_ = 0;
    HolderId holder_ = 0;
    TableKind kind_ = TableKind::History;
    int changed_from_ = 0;
    int version_ = 0;
    int nulls_ = 0;
    int expired_ = 0;  // slots before it were let go
    std::int32_t boundary_ = 0;
    std::vector<BlockId> ids_;
    std::vector<Late> late_;  // held for forwards that may still read them
};

}  // namespace tokenspeed::cache
