// Blocks of the host tier that must stay as they are: a move-only owner. An image, a fetch from storage and every copy
// under way hold their own; the last to let go makes a block evictable (or, without known content, free).
#pragma once

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "cache/tier.h"

namespace tokenspeed::cache {

// All pins are one holder: nobody asks what one of them alone holds.
inline constexpr HolderId kPinHolder = 1;

class HostPins {
public:
    struct Pin {
        int group;
        BlockId id;
    };

    HostPins() = default;
    explicit HostPins(Tier& tier) : tier_(&tier) {}
    HostPins(HostPins&& other) noexcept
        : tier_(std::exchange(other.tier_, nullptr)), pins_(std::exchange(other.pins_, {})) {}
    HostPins& operator=(HostPins&& other) noexcept {
        if (this == &other) return *this;
        release();
        tier_ = std::exchange(other.tier_, nullptr);
        pins_ = std::exchange(other.pins_, {});
        return *this;
    }
    HostPins(const HostPins&) = delete;
    HostPins& operator=(const HostPins&) = delete;
    ~HostPins() { release(); }

    std::span<const Pin> pins() const { return pins_; }
    bool empty() const { return pins_.empty(); }

    // Pins a block that is indexed, or that somebody holds.
    void add(int group, BlockId id) {
        pins_.reserve(pins_.size() + 1);
        tier_->share(group, kPinHolder, id);
        pins_.push_back({group, id});
    }
    // Fresh blocks, counts by group, all or nothing: their ids in the order of the groups, or nothing.
    [[nodiscard]] bool add_fresh(std::span<const std::int64_t> counts, std::vector<std::vector<BlockId>>& ids) {
        ids.assign(counts.size(), {});
        std::vector<std::span<BlockId>> spans;
        std::size_t total = pins_.size();
        for (std::size_t group = 0; group < counts.size(); ++group) {
            ids[group].resize(static_cast<std::size_t>(counts[group]));
            spans.emplace_back(ids[group]);
            total += ids[group].size();
        }
        pins_.reserve(total);
        if (!tier_->acquire(kPinHolder, spans)) return false;
        for (std::size_t group = 0; group < ids.size(); ++group) {
            for (const BlockId id : ids[group]) pins_.push_back({static_cast<int>(group), id});
        }
        return true;
    }
    void release() noexcept {
        for (auto pin = pins_.rbegin(); pin != pins_.rend(); ++pin) tier_->release(pin->group, kPinHolder, pin->id);
        pins_.clear();
    }

    // For check_invariants().
    void collect(Tier::Holdings& held) const {
        for (const Pin& pin : pins_) held[static_cast<std::size_t>(pin.group)].emplace_back(kPinHolder, pin.id);
    }

private:
    Tier* tier_ = nullptr;
    std::vector<Pin> pins_;
};

}  // namespace tokenspeed::cache
