// Pool, caches, rows and reserves: can this be admitted, and what does it get?
//
// Probing is read only; admitting is all or nothing. What a refused admission leaves behind is nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cache/block_pool.h"
#include "cache/group_cache.h"
#include "cache/row_pool.h"
#include "scheduler/config.h"
#include "scheduler/request.h"

namespace tokenspeed {

// Where a request stands when a reserve is decided.
struct RequestProgress {
    std::int32_t prefill_len = 0;
    std::int32_t remaining_new_tokens = 0;  // the one that the prefill samples included
    bool declared = true;
    std::int32_t retractions = 0;
};

// What one group must give for a first chunk, in blocks.
struct GroupDemand {
    std::int64_t fresh = 0;    // to be acquired
    std::int64_t revived = 0;  // cached blocks of the hit that nobody holds: as good as acquired
    std::int64_t target = 0;   // what the table may grow to under the reserve
    std::int64_t reserve = 0;  // of the target, what lies beyond the prompt
    bool prepaid = false;      // the reserve covers the whole generation

    std::int64_t now() const { return fresh + revived; }
};

// The one place where reserves are decided. A full-history group reserves for the generation: of a declared length
// min(remaining, headroom * (1 + retractions)) tokens, of an undeclared one as many blocks as 1 + retractions, and in any
// case the slot of the first decode. The token sampled last is never written, so it needs no slot.
struct ReserveDecision {
    std::int64_t tokens = 0;
    bool whole_generation = false;
};
ReserveDecision ReservePrefillDemands(const RequestProgress& progress, const CacheGroup& group,
                                      std::int64_t headroom_tokens);

// What the prefix cache has of a prompt.
struct Prefix {
    std::int32_t tokens = 0;
    std::int32_t pages = 0;
    std::vector<std::vector<cache::BlockId>> hits;  // by group
};

// The first group that is short, and by what.
struct Shortfall {
    std::size_t group = 0;
    std::int64_t need = 0;
    std::int64_t available = 0;
    std::int64_t blocks() const { return need - available; }
};

class Capacity {
public:
    explicit Capacity(const SchedulerConfig& config);
    Capacity(const Capacity&) = delete;
    Capacity& operator=(const Capacity&) = delete;

    std::size_t num_groups() const { return caches_.size(); }
    const cache::GroupCache& cache(std::size_t group) const { return *caches_[group]; }
    const cache::BlockPool& pool() const { return pool_; }
    const cache::RowPool& rows() const { return rows_; }
    std::int64_t publications() const { return publications_; }

    // Blocks of the group that are neither held nor promised to a resident; may be negative.
    std::int64_t available(std::size_t group) const { return caches_[group]->obtainable() - reserved_[group]; }
    std::int64_t reserved(std::size_t group) const { return reserved_[group]; }

    // Looks up how much of the prompt is cached. Changes nothing but the request's memo of digests.
    Prefix probe(Request& request) const;
    std::vector<GroupDemand> first_chunk(const Request& request, const Prefix& prefix, std::int32_t chunk) const;
    // Whether a first chunk fits beside the reserves of the residents; `alone`, the chunk itself is enough.
    std::optional<Shortfall> short_for(const std::vector<GroupDemand>& demands, bool alone) const;
    // Whether the request must be planned again, or is known to be refused as it was.
    bool worth_trying(const Request& request) const;

    // A row, the hits and the fresh blocks; the caller has asked short_for and rows().
    fsm::Grant admit(const Prefix& prefix, const std::vector<GroupDemand>& demands);
    // What the tables lack to hold `tokens` tokens; nullopt, and a shortfall, where the pool cannot give it.
    std::optional<fsm::Grant> extend(const fsm::ForwardResources& bundle, std::int64_t tokens, Shortfall& shortfall);

    // Accounts what the request's reserves still promise, given what its tables hold.
    void promise(Request& request, const std::vector<GroupDemand>& demands);
    void settle(Request& request) noexcept;
    void forgive(Request& request) noexcept;

    // Publishes the pages that committed forwards filled.
    void publish(Request& request, fsm::ForwardResources& bundle);

    std::int64_t blocks_for(std::size_t group, std::int64_t tokens) const {
        return ceil_div(tokens, config_.groups[group].block_granularity);
    }

private:
    const SchedulerConfig& config_;
    cache::BlockPool pool_;
    std::vector<std::unique_ptr<cache::GroupCache>> caches_;
    cache::RowPool rows_;
    std::vector<std::int64_t> reserved_;
    std::int64_t publications_ = 0;
};

}  // namespace tokenspeed
