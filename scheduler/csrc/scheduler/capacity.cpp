#include "scheduler/capacity.h"

#include <algorithm>

namespace tokenspeed {
namespace {

std::vector<int> children_of(const SchedulerConfig& config) {
    std::vector<int> children;
    for (const CacheGroup& group : config.groups) children.push_back(group.children_per_parent);
    return children;
}

}  // namespace

Capacity::Capacity(const SchedulerConfig& config)
    : config_(config),
      device_(config.num_parents, children_of(config), config.max_num_seqs),
      rows_(config.max_num_seqs),
      reserved_(config.groups.size(), 0) {
    if (config.host_parents > 0) {
        host_ = std::make_unique<cache::Tier>(config.host_parents, children_of(config), cache::kPinHolder);
    }
    for (const CacheGroup& group : config.groups) {
        GroupShape& shape = shapes_.emplace_back();
        shape.attention = group.attention();
        shape.window = group.sliding_window_tokens;
        shape.children = group.children_per_parent;
        if (shape.attention == Attention::SlidingWindow) device_.reuse_own_first(static_cast<int>(shapes_.size()) - 1);
        open_groups_ = open_groups_ || shape.attention != Attention::FullHistory;
        if (shape.history()) {
            shape.granularity = group.block_granularity;
            shape.blocks_per_page = config.prefix_granularity / group.block_granularity;
        } else {
            shape.granularity = group.checkpoint_granularity;
            if (config.prefix_cache) {
                checkpoint_granularity_ = std::max(checkpoint_granularity_, group.checkpoint_granularity);
            }
        }
    }
}

std::int64_t Capacity::room() const {
    std::int64_t room = device_.unheld_weight();
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        room -= reserved_[group] * device_.weight(static_cast<int>(group));
    }
    return room;
}

void Capacity::add_reserves(const Request& request, Demand& demand) const {
    const RequestProgress progress{.prefill_len = request.prefill_len,
                                   .remaining_new_tokens = request.max_new_tokens - request.generated(),
                                   .declared = request.declared,
                                   .retractions = request.retractions};
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        const ReserveDecision reserve = ReservePrefillDemands(progress, config_.groups[group], config_);
        GroupDemand& its = demand.groups[group];
        its.target_tokens = request.prefill_len + reserve.tokens;
        its.prepaid = reserve.whole_generation;
        // A state has its live block from the first chunk on. A checkpoint takes another one only until the forward that
        // reads it has landed, and only where there is one: nothing is promised for it.
        if (shapes_[group].history()) {
            its.reserve = blocks_for(group, its.target_tokens) - blocks_for(group, request.prefill_len);
        }
    }
}

Demand Capacity::first_chunk(const Request& request, const Prefix& prefix, std::int32_t chunk) const {
    Demand demand{.groups = std::vector<GroupDemand>(shapes_.size()), .revival = {}};
    demand.revival.unheld.resize(shapes_.size(), 0);
    std::vector<cache::BlockId> hits;
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        const GroupPrefix& its = prefix.groups[group];
        hits.clear();
        for (const Source& source : its.blocks) {
            if (source.device != cache::kNullBlock) hits.push_back(source.device);
        }
        const std::int64_t slots = shapes_[group].history() ? blocks_for(group, prefix.tokens + chunk) - its.first_slot
                                                            : static_cast<std::int64_t>(its.blocks.size()) + 1;
        demand.groups[group].fresh = slots - static_cast<std::int64_t>(hits.size());
        device_.add_revival(static_cast<int>(group), hits, demand.revival);
    }
    add_reserves(request, demand);
    return demand;
}

Demand Capacity::whole_prompt(const Request& request, const Prefix& prefix) const {
    Demand demand = first_chunk(request, prefix, request.prefill_len - prefix.tokens);
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        if (shapes_[group].attention != Attention::SlidingWindow) continue;
        demand.groups[group].fresh = std::min(demand.groups[group].fresh, prefilling_window(group));
    }
    return demand;
}

// The most blocks a window and the chunks that are out behind it span.
std::int64_t Capacity::prefilling_window(std::size_t group) const noexcept {
    const std::int64_t chunks = static_cast<std::int64_t>(config_.max_scheduled_tokens) * (1 + config_.overlap_depth);
    return config_.window_blocks(config_.groups[group], chunks);
}

std::optional<Shortfall> Capacity::short_for(const Demand& demand, bool alone) const {
    std::vector<std::int64_t> needs(shapes_.size());
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        needs[group] = demand.groups[group].fresh + (alone ? 0 : demand.groups[group].reserve + reserved_[group]);
    }
    const std::int64_t spare = device_.spare_parents(needs, &demand.revival);
    if (spare >= 0) return std::nullopt;
    return shortfall_of(needs, -spare);
}

bool Capacity::fits(const Demand& demand, std::int64_t copies, bool alone) const {
    std::vector<std::int64_t> needs(shapes_.size());
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        const GroupDemand& its = demand.groups[group];
        needs[group] = copies * (its.fresh + (alone ? 0 : its.reserve)) + (alone ? 0 : reserved_[group]);
    }
    return device_.spare_parents(needs) >= 0;
}

// Blames the group that asks for most, in parents.
Shortfall Capacity::shortfall_of(const std::vector<std::int64_t>& needs, std::int64_t missing_parents) const {
    Shortfall shortfall;
    std::int64_t most = -1;
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        const std::int64_t parents = ceil_div(needs[group], shapes_[group].children);
        if (parents > most) shortfall.group = group;
        most = std::max(most, parents);
    }
    shortfall.blocks = missing_parents * shapes_[shortfall.group].children;
    shortfall.weight = (missing_parents - 1) * device_.weight_of_parent() + device_.least_weight();
    return shortfall;
}

Request::Refusal Capacity::refusal(const Shortfall& shortfall) const {
    const std::int64_t now = room();
    return {.room = now, .needed = now + shortfall.weight, .publications = publications_};
}

bool Capacity::worth_trying(const Request& request) const {
    if (!request.refusal) return true;
    const Request::Refusal& refusal = *request.refusal;
    const std::int64_t now = room();
    if (now <= refusal.room) return false;
    // Its need can only have fallen by pages that others published since.
    return now >= refusal.needed || publications_ != refusal.publications;
}

Admission Capacity::admit(const Prefix& prefix, const Demand& demand) {
    Admission admission;
    admission.grant.row = cache::PoolRow(rows_);
    const cache::HolderId holder = admission.grant.row.number();
    std::vector<std::vector<cache::BlockId>> fresh(shapes_.size());
    std::vector<std::span<cache::BlockId>> spans;
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        const GroupPrefix& its = prefix.groups[group];
        const GroupShape& shape = shapes_[group];
        cache::BlockTable& table = admission.grant.blocks.emplace_back(
            device_, static_cast<int>(group), holder,
            shape.history() ? cache::TableKind::History : cache::TableKind::State);
        fresh[group].resize(static_cast<std::size_t>(demand.groups[group].fresh));
        spans.emplace_back(fresh[group]);
        const auto hits = static_cast<std::size_t>(
            std::count_if(its.blocks.begin(), its.blocks.end(), [](const Source& s) { return s.device != 0; }));
        table.append_nulls(shape.history() ? its.first_slot + static_cast<int>(hits + fresh[group].size()) : 2);
        // Hits first: once held they cannot be evicted for the fresh ones.
        for (std::size_t i = 0; i < its.blocks.size(); ++i) {
            if (its.blocks[i].device != cache::kNullBlock) {
                table.hit(its.first_slot + static_cast<int>(i), its.blocks[i].device);
            }
        }
        if (!shape.history() && !its.blocks.empty()) table.set_boundary(prefix.tokens);
    }
    if (!device_.acquire(holder, spans)) throw std::logic_error("an admission that was found to fit did not");
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        const GroupPrefix& its = prefix.groups[group];
        cache::BlockTable& table = admission.grant.blocks[group];
        // A state's input may stay null; its live block is the last slot.
        int slot = shapes_[group].history() || !its.blocks.empty() ? its.first_slot : 1;
        for (const cache::BlockId id : fresh[group]) {
            while (table.at(slot) != cache::kNullBlock) ++slot;
            table.fill(slot, id);
            const auto place = static_cast<std::size_t>(slot - its.first_slot);
            if (place < its.blocks.size()) {
                admission.loads.push_back({static_cast<std::int32_t>(group), its.blocks[place].host, id});
            }
        }
    }
    return admission;
}

// Whether the state at the bundle's frontier is one to keep: the forward that comes reads it and writes another block.
bool Capacity::checkpoint_due(const Request& request, const fsm::ForwardResources& bundle, std::size_t group) const {
    const std::int32_t at = bundle.progress().scheduled;
    if (!config_.prefix_cache || at == 0 || bundle.tables()[group].boundary() == at) return false;
    if (at > bundle.progress().publish_limit || at % config_.prefix_granularity != 0) return false;
    return at % shapes_[group].granularity == 0 || at == request.junction;
}

std::optional<fsm::Grant> Capacity::extend(const Request& request, std::int64_t tokens, Shortfall& shortfall) {
    const fsm::ForwardResources& bundle = *request.life.bundle();
    bool wanted = false, checkpoint = false;
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        if (shapes_[group].history()) {
            wanted = wanted || blocks_for(group, tokens) > bundle.tables()[group].size();
        } else {
            checkpoint = checkpoint || checkpoint_due(request, bundle, group);
        }
    }
    if (!wanted && !checkpoint) return fsm::Grant{};
    std::vector<std::int64_t> needs(shapes_.size(), 0);
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        if (shapes_[group].history()) {
            needs[group] = std::max<std::int64_t>(blocks_for(group, tokens) - bundle.tables()[group].size(), 0);
        } else {
            needs[group] = checkpoint_due(request, bundle, group) ? 1 : 0;
        }
    }
    std::optional<fsm::Grant> grant = acquire(bundle, needs, shortfall);
    if (grant || !checkpoint) return grant;
    // A checkpoint is worth a block, but no request waits for one.
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        if (!shapes_[group].history()) needs[group] = 0;
    }
    return wanted ? acquire(bundle, needs, shortfall) : fsm::Grant{};
}

std::optional<fsm::Grant> Capacity::acquire(const fsm::ForwardResources& bundle, const std::vector<std::int64_t>& needs,
                                            Shortfall& shortfall) {
    std::vector<std::vector<cache::BlockId>> fresh(shapes_.size());
    std::vector<std::span<cache::BlockId>> spans;
    fsm::Grant grant;
    grant.blocks.resize(shapes_.size());
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        fresh[group].resize(static_cast<std::size_t>(needs[group]));
        spans.emplace_back(fresh[group]);
    }
    if (!device_.acquire(bundle.row(), spans)) {
        shortfall = shortfall_of(needs, -device_.spare_parents(needs));
        return std::nullopt;
    }
    for (std::size_t group = 0; group < shapes_.size(); ++group) {
        if (fresh[group].empty()) continue;
        grant.blocks[group] = cache::BlockTable(device_, static_cast<int>(group), bundle.row());
        grant.blocks[group].append_acquired(fresh[group]);
    }
    return grant;
}

void Capacity::promise(Request& request, const Demand& demand) {
    request.reserves.assign(demand.groups.size(), {});
    request.prepaid = true;
    for (std::size_t group = 0; group < demand.groups.size(); ++group) {
        request.reserves[group].target_tokens = demand.groups[group].target_tokens;
        request.prepaid = request.prepaid && demand.groups[group].prepaid;
    }
    settle(request);
}

// What the reserve of a group promises beyond what its table holds.
std::int64_t Capacity::outstanding(const Request& request, std::size_t group) const noexcept {
    const cache::BlockTable& table = request.life.bundle()->tables()[group];
    const GroupShape& shape = shapes_[group];
    if (!shape.history()) return 0;
    std::int64_t target = blocks_for(group, request.reserves[group].target_tokens);
    if (shape.attention == Attention::SlidingWindow) {
        // While the prompt is computed a window and the chunks that are out; afterwards a window.
        const bool prefilling = request.life.bundle()->progress().scheduled < request.prefill_len;
        target = std::min(target, prefilling ? prefilling_window(group) : config_.window_blocks(config_.groups[group], 0));
    }
    return std::max<std::int64_t>(target - table.blocks(), 0);
}

void Capacity::settle(Request& request) noexcept {
    for (std::size_t group = 0; group < request.reserves.size(); ++group) {
        Request::Reserve& reserve = request.reserves[group];
        const std::int64_t now = outstanding(request, group);
        reserved_[group] += now - reserve.outstanding;
        reserve.outstanding = now;
    }
}

void Capacity::forgive(Request& request) noexcept {
    for (std::size_t group = 0; group < request.reserves.size(); ++group) {
        reserved_[group] -= request.reserves[group].outstanding;
    }
    request.reserves.clear();
}

}  // namespace tokenspeed
