#include "scheduler/capacity.h"

#include <algorithm>

namespace tokenspeed {

ReserveDecision ReservePrefillDemands(const RequestProgress& progress, const CacheGroup& group,
                                      std::int64_t headroom_tokens) {
    const std::int64_t written = std::max(progress.remaining_new_tokens - 1, 0);
    const std::int64_t unit = progress.declared ? headroom_tokens : group.block_granularity;
    const std::int64_t headroom = std::max<std::int64_t>(unit * (1 + progress.retractions), 1);
    return {.tokens = std::min(written, headroom), .whole_generation = written <= headroom};
}

Capacity::Capacity(const SchedulerConfig& config)
    : config_(config), pool_(config.num_parents), rows_(config.max_num_seqs), reserved_(config.groups.size(), 0) {
    for (std::size_t group = 0; group < config.groups.size(); ++group) {
        caches_.push_back(std::make_unique<cache::GroupCache>(
            pool_, static_cast<int>(group), config.groups[group].children_per_parent, config.max_num_seqs));
    }
}

Prefix Capacity::probe(Request& request) const {
    Prefix prefix;
    prefix.hits.resize(caches_.size());
    if (!config_.prefix_cache) return prefix;
    const std::int32_t page_tokens = config_.prefix_granularity;
    std::int32_t bound = request.prefill_len - 1;  // the last token is always computed
    if (request.max_cached_prefix_tokens >= 0) bound = std::min(bound, request.max_cached_prefix_tokens);
    for (std::int32_t page = 0; (page + 1) * page_tokens <= bound; ++page) {
        const cache::Digest& digest = request.digest(page, page_tokens);
        for (std::size_t group = 0; group < caches_.size(); ++group) {
            const std::int32_t blocks = page_tokens / config_.groups[group].block_granularity;
            for (std::int32_t offset = 0; offset < blocks; ++offset) {
                const cache::BlockId id = caches_[group]->find({digest, offset});
                if (id == cache::kNullBlock) {
                    // Only whole pages are hits: drop what this page had before its first missing block.
                    prefix.hits[group].resize(static_cast<std::size_t>(page * blocks));
                    return prefix;
                }
                prefix.hits[group].push_back(id);
            }
        }
        prefix.pages = page + 1;
        prefix.tokens = prefix.pages * page_tokens;
    }
    return prefix;
}

std::vector<GroupDemand> Capacity::first_chunk(const Request& request, const Prefix& prefix,
                                               std::int32_t chunk) const {
    const RequestProgress progress{.prefill_len = request.prefill_len,
                                   .remaining_new_tokens = request.max_new_tokens - request.generated(),
                                   .declared = request.declared,
                                   .retractions = request.retractions};
    std::vector<GroupDemand> demands(caches_.size());
    for (std::size_t group = 0; group < caches_.size(); ++group) {
        const auto& hits = prefix.hits[group];
        const ReserveDecision reserve =
            ReservePrefillDemands(progress, config_.groups[group], config_.headroom_tokens);
        GroupDemand& demand = demands[group];
        demand.fresh = blocks_for(group, prefix.tokens + chunk) - static_cast<std::int64_t>(hits.size());
        demand.revived = std::count_if(hits.begin(), hits.end(),
                                       [&](cache::BlockId id) { return caches_[group]->is_evictable(id); });
        demand.target = blocks_for(group, request.prefill_len + reserve.tokens);
        demand.reserve = demand.target - blocks_for(group, request.prefill_len);
        demand.prepaid = reserve.whole_generation;
    }
    return demands;
}

std::optional<Shortfall> Capacity::short_for(const std::vector<GroupDemand>& demands, bool alone) const {
    for (std::size_t group = 0; group < demands.size(); ++group) {
        const std::int64_t need = demands[group].now() + (alone ? 0 : demands[group].reserve);
        const std::int64_t have = alone ? caches_[group]->obtainable() : available(group);
        if (need > have) return Shortfall{group, need, have};
    }
    return std::nullopt;
}

bool Capacity::worth_trying(const Request& request) const {
    if (!request.refusal) return true;
    const Request::Refusal& refusal = *request.refusal;
    const std::int64_t now = available(refusal.group);
    if (now <= refusal.available) return false;
    // Its need can only have fallen by pages that others published since.
    return now >= refusal.need || publications_ != refusal.publications;
}

fsm::Grant Capacity::admit(const Prefix& prefix, const std::vector<GroupDemand>& demands) {
    fsm::Grant grant{.row = cache::PoolRow(rows_), .blocks = {}};
    for (std::size_t group = 0; group < caches_.size(); ++group) {
        cache::BlockTable& table = grant.blocks.emplace_back(*caches_[group], grant.row.number());
        // Hits first: once held they cannot be evicted for the fresh ones.
        table.append_hits(prefix.hits[group]);
        if (!table.append_fresh(static_cast<int>(demands[group].fresh))) {
            throw std::logic_error("an admission that was found to fit did not");
        }
    }
    return grant;
}

std::optional<fsm::Grant> Capacity::extend(const fsm::ForwardResources& bundle, std::int64_t tokens,
                                           Shortfall& shortfall) {
    fsm::Grant grant;
    for (std::size_t group = 0; group < caches_.size(); ++group) {
        const std::int64_t lack = blocks_for(group, tokens) - bundle.tables()[group].size();
        if (lack <= 0) continue;
        grant.blocks.resize(caches_.size());
        grant.blocks[group] = cache::BlockTable(*caches_[group], bundle.row());
        if (!grant.blocks[group].append_fresh(static_cast<int>(lack))) {
            shortfall = {group, lack, caches_[group]->obtainable()};
            return std::nullopt;
        }
    }
    return grant;
}

void Capacity::promise(Request& request, const std::vector<GroupDemand>& demands) {
    request.reserves.assign(demands.size(), {});
    for (std::size_t group = 0; group < demands.size(); ++group) {
        request.reserves[group].target_blocks = demands[group].target;
    }
    request.prepaid =
        std::all_of(demands.begin(), demands.end(), [](const GroupDemand& demand) { return demand.prepaid; });
    settle(request);
}

void Capacity::settle(Request& request) noexcept {
    const fsm::ForwardResources* bundle = request.life.bundle();
    for (std::size_t group = 0; group < request.reserves.size(); ++group) {
        Request::Reserve& reserve = request.reserves[group];
        const std::int64_t held = bundle->tables()[group].size();
        const std::int64_t outstanding = std::max<std::int64_t>(reserve.target_blocks - held, 0);
        reserved_[group] += outstanding - reserve.outstanding;
        reserve.outstanding = outstanding;
    }
}

void Capacity::forgive(Request& request) noexcept {
    for (std::size_t group = 0; group < request.reserves.size(); ++group) {
        reserved_[group] -= request.reserves[group].outstanding;
    }
    request.reserves.clear();
}

void Capacity::publish(Request& request, fsm::ForwardResources& bundle) {
    if (!config_.prefix_cache) return;
    fsm::CacheProgress& progress = bundle.progress();
    const std::int32_t page_tokens = config_.prefix_granularity;
    const std::int32_t limit = std::min({progress.committed, progress.publish_limit, request.known_tokens()});
    for (; (progress.published_pages + 1) * page_tokens <= limit; ++progress.published_pages) {
        const std::int32_t page = progress.published_pages;
        const cache::Digest& digest = request.digest(page, page_tokens);
        for (std::size_t group = 0; group < caches_.size(); ++group) {
            const std::int32_t blocks = page_tokens / config_.groups[group].block_granularity;
            for (std::int32_t offset = 0; offset < blocks; ++offset) {
                bundle.tables()[group].publish(page * blocks + offset, {digest, offset}, request.last_forward);
            }
        }
        ++publications_;
    }
}

}  // namespace tokenspeed
