// Pool, tiers, rows and reserves: can this be admitted, and what does it get?
//
// Probing is read only; admitting is all or nothing. What a refused admission leaves behind is nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cache/row_pool.h"
#include "cache/tier.h"
#include "scheduler/config.h"
#include "scheduler/policy.h"
#include "scheduler/request.h"

namespace tokenspeed {

// What one group must give for an admission, in blocks.
struct GroupDemand {
    std::int64_t fresh = 0;          // to be acquired
    std::int64_t reserve = 0;        // to be left beside
    std::int64_t target_tokens = 0;  // what the table may grow to under the reserve
    bool prepaid = false;            // the reserve covers the whole generation
};

struct Demand {
    std::vector<GroupDemand> groups;
    cache::Revival revival;  // cached blocks of a hit that nobody holds: as good as acquired
};

// Where a block of a prefix is: on the device, else on the host, else in the storage.
struct Source {
    cache::BlockId device = cache::kNullBlock;
    cache::BlockId host = cache::kNullBlock;
    bool stored = false;
    bool found() const { return device != cache::kNullBlock || host != cache::kNullBlock || stored; }
};

struct GroupPrefix {
    std::int32_t first_slot = 0;  // history: slots before it are not needed
    std::vector<Source> blocks;   // history: the slots from there on; state: the checkpoint
};

// What the tiers have of a prompt.
struct Prefix {
    std::int32_t tokens = 0;
    std::int32_t pages = 0;
    std::int32_t device_tokens = 0;    // up to where no other tier is needed
    std::int32_t published_pages = 0;  // leading ones whose every block is on the device
    std::int32_t junction = 0;         // what closed groups have beyond, where others have no checkpoint; 0 for nothing
    std::vector<GroupPrefix> groups;
};

// A block that goes from the host to the device.
struct Load {
    std::int32_t group;
    cache::BlockId host;
    cache::BlockId device;
};

struct Admission {
    fsm::Grant grant;
    std::vector<Load> loads;
};

// A group that is short, and by how much.
struct Shortfall {
    std::size_t group = 0;
    std::int64_t blocks = 0;
    std::int64_t weight = 0;  // the least by which what nobody holds must grow before it can fit
};

// A block whose content became known.
struct Publication {
    std::int32_t group;
    cache::BlockId id;
    cache::BlockKey key;
};

// A cache group as the hot paths see it.
struct GroupShape {
    Attention attention = Attention::FullHistory;
    std::int32_t granularity = 1;  // tokens of a block; of a state group, of a checkpoint
    std::int32_t window = 0;
    std::int32_t blocks_per_page = 1;
    int children = 1;
    bool history() const { return attention != Attention::State; }
};

class Capacity {
public:
    explicit Capacity(const SchedulerConfig& config);
    Capacity(const Capacity&) = delete;
    Capacity& operator=(const Capacity&) = delete;

    std::size_t num_groups() const { return shapes_.size(); }
    const GroupShape& shape(std::size_t group) const { return shapes_[group]; }
    const cache::Tier& device() const { return device_; }
    cache::Tier* host() { return host_.get(); }
    void forget_cached() {
        device_.forget_cached();
        if (host_ != nullptr) host_->forget_cached();
    }
    const cache::Tier* host() const { return host_.get(); }
    const cache::RowPool& rows() const { return rows_; }
    std::int64_t publications() const { return publications_; }
    // Whether some group is not a full history.
    bool has_open_groups() const { return open_groups_; }
    // Where chunks that do not complete a prompt end; 0 for anywhere.
    std::int32_t checkpoint_granularity() const { return checkpoint_granularity_; }

    // What nobody holds and nobody was promised, as weight (cache/tier.h); may be negative.
    std::int64_t room() const;
    const std::vector<std::int64_t>& reserved() const { return reserved_; }

    // Looks up how much of the prompt the tiers have; `stored` answers for the storage. Changes nothing but the request's
    // memo of digests.
    using StoredBlocks = std::vector<std::vector<std::uint8_t>>;  // by group, by slot (state: by page)
    Prefix probe(Request& request, const StoredBlocks* stored = nullptr) const;
    // A prefix of nothing.
    Prefix no_prefix() const;
    // What a decode role need not have sent: the closed groups' blocks that are here.
    Prefix remote_prefix(Request& request, bool use_cache = true) const;
    // Pages of the prompt that a hit may cover: the last token is always computed.
    std::int32_t pages_to_match(const Request& request) const;

    // What computing `chunk` tokens behind the prefix takes (0: only having it, as an image comes back).
    Demand first_chunk(const Request& request, const Prefix& prefix, std::int32_t chunk) const;
    // What the whole prompt takes at once: of a window only what it spans.
    Demand whole_prompt(const Request& request, const Prefix& prefix) const;
    // Whether an admission fits beside the reserves of the residents; `alone`, what it takes now is enough.
    std::optional<Shortfall> short_for(const Demand& demand, bool alone) const;
    // The same for so many admissions alike, which hit nothing.
    bool fits(const Demand& demand, std::int64_t copies, bool alone) const;
    // Whether a refused request must be planned again, or is known to be refused as it was.
    bool worth_trying(const Request& request) const;
    Request::Refusal refusal(const Shortfall& shortfall) const;

    // A row, the hits and the fresh blocks; the caller has asked short_for and rows().
    Admission admit(const Prefix& prefix, const Demand& demand);
    // What the tables lack for a forward over the next tokens up to `tokens`, and a checkpoint of the state where one is
    // due and there is room; nullopt, and a shortfall, where the pool cannot give it.
    std::optional<fsm::Grant> extend(const Request& request, std::int64_t tokens, Shortfall& shortfall);

    // Accounts what the request's reserves still promise, given what its tables hold.
    void promise(Request& request, const Demand& demand);
    void settle(Request& request) noexcept;
    void forgive(Request& request) noexcept;
    std::int64_t outstanding(const Request& request, std::size_t group) const noexcept;

    // Publishes what committed forwards filled, then lets go of what the windows have left behind.
    void publish(Request& request);
    // Of a request that ends or gives way: the state it leaves, if it lies on a page boundary.
    void publish_last_state(Request& request);
    bool has_publications() const { return !published_.empty(); }
    std::vector<Publication> take_publications() { return std::exchange(published_, {}); }

    std::int64_t blocks_for(std::size_t group, std::int64_t tokens) const {
        return ceil_div(tokens, shapes_[group].granularity);
    }
    // The first slot a window behind `position` (the next token's) still needs.
    std::int32_t first_needed_slot(std::size_t group, std::int64_t position) const {
        const GroupShape& shape = shapes_[group];
        if (shape.attention != Attention::SlidingWindow) return 0;
        return static_cast<std::int32_t>(std::max<std::int64_t>(position - shape.window + 1, 0) / shape.granularity);
    }

private:
    Source find(std::size_t group, const cache::BlockKey& key, std::size_t slot, const StoredBlocks* stored) const;
    Source find_slot(Request& request, std::size_t group, std::int32_t slot, const StoredBlocks* stored) const;
    std::int32_t closed_pages(Request& request, std::size_t group, std::int32_t pages, const StoredBlocks* stored) const;
    std::int32_t open_pages(Request& request, std::size_t group, std::int32_t pages, const StoredBlocks* stored) const;
    void fill_sources(Request& request, Prefix& prefix, const StoredBlocks* stored) const;
    std::int64_t prefilling_window(std::size_t group) const noexcept;
    void add_reserves(const Request& request, Demand& demand) const;
    bool checkpoint_due(const Request& request, const fsm::ForwardResources& bundle, std::size_t group) const;
    std::optional<fsm::Grant> acquire(const fsm::ForwardResources& bundle, const std::vector<std::int64_t>& needs,
                                      Shortfall& shortfall);
    Shortfall shortfall_of(const std::vector<std::int64_t>& needs, std::int64_t missing_parents) const;
    void publish_slot(Request& request, std::size_t group, int slot, const cache::BlockKey& key);
    void publish_page(Request& request, std::int32_t page, std::int32_t boundary);

    const SchedulerConfig& config_;
    std::vector<GroupShape> shapes_;
    cache::Tier device_;
    std::unique_ptr<cache::Tier> host_;
    cache::RowPool rows_;
    std::vector<std::int64_t> reserved_;
    std::vector<Publication> published_;
    std::int64_t publications_ = 0;
    std::int32_t checkpoint_granularity_ = 0;
    bool open_groups_ = false;  // whether a hit needs more than the closed groups have
};

}  // namespace tokenspeed
