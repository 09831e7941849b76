// What states own: the device bundle, the host image, host pins, and the token that proves a bundle was given back.
//
// The bundle is move-only. A transition moves the whole of it to exactly one successor or gives it back; nothing edits
// half of one, and its destructor gives everything back, so a leak cannot be written.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cache/block_table.h"
#include "cache/host_pins.h"
#include "cache/row_pool.h"
#include "fsm/states.h"

namespace tokenspeed::fsm {

// Access to a bundle that was moved from or given back.
class EmptyBundle : public std::logic_error {
public:
    EmptyBundle() : std::logic_error("a device bundle was used after it was moved or given back") {}
};

template <Role R>
class Submitted;
template <Role R>
  requires(states_of(R).contains(StateId::Bootstrapping))
class Bootstrapping;

// Proof that whatever a request held was given back. Only giving back makes one, and only the states that own nothing
// by construction; Finished and Retracted cannot be built without it.
class Released {
public:
    Released(Released&&) noexcept = default;
    Released& operator=(Released&&) noexcept = default;
    Released(const Released&) = delete;
    Released& operator=(const Released&) = delete;

private:
    friend class ForwardResources;
    friend class HostImage;
    friend class HostPins;
    template <Role R>
    friend class Submitted;
    template <Role R>
      requires(states_of(R).contains(StateId::Bootstrapping))
    friend class Bootstrapping;
    Released() = default;
};

// What an admission acquired, all or nothing: a row for a request that has none, and blocks per group (no table at all
// where none is needed). Dropping it gives everything back.
struct Grant {
    cache::PoolRow row;
    std::vector<cache::BlockTable> blocks;
};

// How far the cache of a request is. Positions count tokens.
struct CacheProgress {
    std::int32_t scheduled = 0;  // keys and values of [0, scheduled) are there or a forward that is out writes them
    std::int32_t committed = 0;  // of [0, committed): the forward that wrote them has landed
    std::int32_t published_pages = 0;
    std::int64_t last_forward = 0;           // the newest forward that touches the blocks
    std::int32_t publish_limit = INT32_MAX;  // a failed forward wrote from here on: never published
};

class ForwardResources {
public:
    // Takes over a grant that has a row and a table for every group; `cached` tokens of it come from the prefix cache.
    ForwardResources(Grant&& grant, std::int32_t cached, std::int32_t published_pages)
        : row_(std::move(grant.row)), tables_(std::move(grant.blocks)) {
        if (!row_) throw EmptyBundle();
        progress_.scheduled = progress_.committed = cached;
        progress_.published_pages = published_pages;
    }
    ForwardResources(ForwardResources&& other) noexcept
        : row_(std::move(other.row_)),
          tables_(std::exchange(other.tables_, {})),
          progress_(other.progress_),
          results_in_flight_(std::exchange(other.results_in_flight_, 0)) {}
    ForwardResources& operator=(ForwardResources&& other) noexcept {
        row_ = std::move(other.row_);
        tables_ = std::exchange(other.tables_, {});
        progress_ = other.progress_;
        results_in_flight_ = std::exchange(other.results_in_flight_, 0);
        return *this;
    }
    ForwardResources(const ForwardResources&) = delete;
    ForwardResources& operator=(const ForwardResources&) = delete;

    bool empty() const noexcept { return !row_; }

    std::int32_t row() const { return checked().row_.number(); }
    std::vector<cache::BlockTable>& tables() { return checked().tables_; }
    const std::vector<cache::BlockTable>& tables() const { return checked().tables_; }
    CacheProgress& progress() { return checked().progress_; }
    const CacheProgress& progress() const { return checked().progress_; }
    int results_in_flight() const { return checked().results_in_flight_; }
    bool quiet() const { return results_in_flight() == 0; }

    // A forward over the next `input_len` tokens is scheduled, with the blocks it needs beyond those held (a state group's
    // new block takes over as the live one). A hand-off to a peer counts as a forward over none.
    void schedule(Grant&& grant, std::int32_t input_len) {
        checked();
        for (cache::BlockTable& table : tables_) {
            if (table.kind() != cache::TableKind::State || table.boundary() >= progress_.scheduled) continue;
            table.retire_input(progress_.last_forward);
        }
        for (std::size_t group = 0; group < grant.blocks.size(); ++group) {
            if (grant.blocks[group].empty()) continue;
            if (tables_[group].kind() == cache::TableKind::State) {
                tables_[group].rotate(std::move(grant.blocks[group]), progress_.scheduled, progress_.last_forward);
            } else {
                tables_[group].append(std::move(grant.blocks[group]));
            }
        }
        progress_.scheduled += input_len;
        ++results_in_flight_;
    }
    void result_landed() {
        checked();
        --results_in_flight_;
    }

    // Gives row and blocks back. Only a quiet bundle may go: a forward may still touch the blocks of another.
    [[nodiscard]] Released give_back() && {
        if (!quiet()) throw std::logic_error("a device bundle was given back while a forward is out against it");
        tables_.clear();
        row_.release();
        return Released{};
    }

private:
    ForwardResources& checked() {
        if (!row_) throw EmptyBundle();
        return *this;
    }
    const ForwardResources& checked() const {
        if (!row_) throw EmptyBundle();
        return *this;
    }

    // Destroyed last to first: the tables' blocks go back before the row they are held under.
    cache::PoolRow row_;
    std::vector<cache::BlockTable> tables_;
    CacheProgress progress_;
    int results_in_flight_ = 0;
};

// What an image has of one group: the host blocks of the table's slots from `first_slot` on, null ones for holes.
struct GroupImage {
    std::int32_t first_slot = 0;
    std::vector<cache::BlockId> blocks;
};

// A retracted request's copy of what it had computed, byte for byte.
class HostImage {
public:
    HostImage(cache::HostPins&& pins, std::vector<GroupImage>&& groups, std::int32_t computed)
        : pins_(std::move(pins)), groups_(std::move(groups)), computed_(computed) {}
    HostImage(HostImage&&) noexcept = default;
    HostImage& operator=(HostImage&&) noexcept = default;

    const std::vector<GroupImage>& groups() const { return groups_; }
    const cache::HostPins& pins() const { return pins_; }
    std::int32_t computed() const { return computed_; }
    [[nodiscard]] Released give_back() && {
        pins_.release();
        return Released{};
    }

private:
    cache::HostPins pins_;
    std::vector<GroupImage> groups_;
    std::int32_t computed_;
};

// Host entries that a storage fetch fills, or has filled, for a request that waits.
class HostPins {
public:
    explicit HostPins(cache::HostPins&& pins) : pins_(std::move(pins)) {}
    HostPins(HostPins&&) noexcept = default;
    HostPins& operator=(HostPins&&) noexcept = default;

    const cache::HostPins& pins() const { return pins_; }
    cache::HostPins& pins() { return pins_; }
    [[nodiscard]] Released give_back() && {
        pins_.release();
        return Released{};
    }

private:
    cache::HostPins pins_;
};

}  // namespace tokenspeed::fsm
