// What a screen shows: the requests by interest, the pools as pictures, and what could be admitted now.
#include <algorithm>
#include <string>
#include <tuple>

#include "scheduler/scheduler.h"

namespace tokenspeed {

using fsm::StateId;

namespace {

// What a caller may be said to ask for where nobody asks: tokens of a request.
constexpr std::int64_t kTypicalTokens = 32768;

enum class Interest : std::uint8_t { Waits, Prefills, Decodes, Ends };

Interest interest_in(StateId state) {
    switch (state) {
        case StateId::Prefilling:
        case StateId::RemotePrefilling:
        case StateId::PrefillAwaitingResult:
            return Interest::Prefills;
        case StateId::PrefillDone:
        case StateId::Decoding:
            return Interest::Decodes;
        case StateId::Finishing:
        case StateId::Finished:
            return Interest::Ends;
        default:
            return Interest::Waits;
    }
}

std::int64_t blocks_of(const Request& request) {
    std::int64_t blocks = 0;
    if (const fsm::ForwardResources* bundle = request.life.bundle()) {
        for (const cache::BlockTable& table : bundle->tables()) blocks += table.blocks();
    }
    return blocks;
}

// The smaller, the earlier among the rows.
std::tuple<Interest, std::int64_t, std::int64_t> place_of(const Request& request) {
    const Interest interest = interest_in(request.life.id());
    if (interest == Interest::Waits) return {interest, request.timeline.visits.back().round, request.age};
    return {interest, interest == Interest::Decodes ? -blocks_of(request) : 0, request.age};
}

}  // namespace

std::vector<RequestRow> Scheduler::requests(std::size_t limit) const {
    std::vector<std::pair<std::tuple<Interest, std::int64_t, std::int64_t>, const Request*>> placed;
    placed.reserve(requests_.size());
    for (const Request* request = oldest_; request != nullptr; request = request->newer) {
        placed.emplace_back(place_of(*request), request);
    }
    const std::size_t shown = std::min(limit, placed.size());
    std::partial_sort(placed.begin(), placed.begin() + static_cast<std::ptrdiff_t>(shown), placed.end());
    std::vector<RequestRow> rows;
    rows.reserve(shown);
    for (std::size_t i = 0; i < shown; ++i) {
        rows.push_back(row_of(*placed[i].second));
        rows.back().reason = explain(*placed[i].second).text;
    }
    return rows;
}

// All but the reason.
RequestRow Scheduler::row_of(const Request& request) const {
    RequestRow row;
    row.handle = request.handle;
    row.state = request.life.id();
    row.age_rounds = round_ - request.timeline.visits.back().round;
    row.since = request.timeline.visits.back().time;
    row.arrived = request.arrived;
    row.priority = request.priority;
    row.prompt_tokens = request.prompt_tokens;
    row.generated_tokens = request.generated();
    row.max_new_tokens = request.max_new_tokens;
    row.cached_tokens = request.cached_tokens;
    row.retractions = request.retractions;
    row.blocks = blocks_of(request);
    if (const fsm::ForwardResources* bundle = request.life.bundle()) row.computed_tokens = bundle->progress().scheduled;
    if (const fsm::HostImage* image = request.life.image()) {
        if (request.life.is<StateId::Retracted>()) row.computed_tokens = image->computed();
        row.host_blocks = static_cast<std::int64_t>(image->pins().pins().size());
    } else if (const cache::HostPins* pins = request.life.pins()) {
        row.host_blocks = static_cast<std::int64_t>(pins->pins().size());
    }
    return row;
}

bool Scheduler::pinned_by_others(const Request& request) const {
    const StateId state = request.life.id();
    return state == StateId::Restoring || state == StateId::RemotePrefilling ||
           (config_.role == fsm::Role::Prefill && state == StateId::Decoding);
}

// By group, the device blocks that a copy or a peer touches: sorted, each once.
std::vector<std::vector<cache::BlockId>> Scheduler::pinned_blocks() const {
    std::vector<std::vector<cache::BlockId>> pinned(capacity_.num_groups());
    for (const Request* request : residents_) {
        if (request == nullptr || !pinned_by_others(*request)) continue;
        for (std::size_t group = 0; group < pinned.size(); ++group) {
            for (const cache::BlockId id : request->life.bundle()->tables()[group].ids()) {
                if (id != cache::kNullBlock) pinned[group].push_back(id);
            }
        }
    }
    for (std::vector<cache::BlockId>& ids : pinned) {
        std::sort(ids.begin(), ids.end());
        ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    }
    return pinned;
}

PoolMaps Scheduler::maps(int cells) const {
    PoolMaps maps;
    const std::vector<std::vector<cache::BlockId>> pinned = pinned_blocks();
    for (int group = 0; group < capacity_.device().num_groups(); ++group) {
        maps.device.push_back(capacity_.device().map(group, cells, &pinned[static_cast<std::size_t>(group)]));
        if (capacity_.host() != nullptr) maps.host.push_back(capacity_.host()->map(group, cells, nullptr));
    }
    return maps;
}

std::int64_t Scheduler::mean_tokens() const {
    if (requests_.empty()) return std::min(kTypicalTokens, bound_);
    std::int64_t tokens = 0;
    for (const Request* request = oldest_; request != nullptr; request = request->newer) tokens += request->known_tokens();
    return ceil_div(tokens, static_cast<std::int64_t>(requests_.size()));
}

// Whether `copies` requests of so many tokens, one of which is output, could be admitted with their whole prompts.
bool Scheduler::fits_now(std::int64_t tokens, std::int64_t copies) const {
    Request request(0, next_age_, config_.role);
    request.prefill_len = static_cast<std::int32_t>(tokens - 1);
    request.max_new_tokens = 1;
    const Demand demand = capacity_.whole_prompt(request, capacity_.no_prefix());
    return capacity_.fits(demand, copies, resident_count_ == 0 && copies == 1);
}

std::int64_t Scheduler::largest_now() const {
    if (capacity_.rows().free() == 0) return 0;
    // With nothing held at all it is the bound itself, which a window reaches in shorter chunks.
    if (capacity_.rows().free() == capacity_.rows().total()) return bound_;
    std::int64_t fit = 1, above = bound_ + 1;
    while (above - fit > 1) {
        const std::int64_t middle = fit + (above - fit) / 2;
        (fits_now(middle, 1) ? fit : above) = middle;
    }
    return fit > 1 ? fit : 0;
}

Headroom Scheduler::headroom(std::int64_t typical_tokens) const {
    Headroom headroom;
    const std::int64_t typical = typical_tokens > 0 ? typical_tokens : mean_tokens();
    headroom.typical_tokens = std::clamp<std::int64_t>(typical, std::min<std::int64_t>(2, bound_), bound_);
    headroom.largest = largest_now();
    std::int64_t fit = 0, above = capacity_.rows().free() + 1;
    while (above - fit > 1) {
        const std::int64_t middle = fit + (above - fit) / 2;
        (fits_now(headroom.typical_tokens, middle) ? fit : above) = middle;
    }
    headroom.requests = std::max<std::int64_t>(fit, headroom.largest >= headroom.typical_tokens ? 1 : 0);
    // A window passes on, so where there is a full history it is what bounds.
    std::optional<std::int64_t> full, window;
    for (std::size_t group = 0; group < capacity_.num_groups(); ++group) {
        const GroupShape& shape = capacity_.shape(group);
        if (!shape.history()) continue;
        const std::int64_t blocks = capacity_.device().obtainable(static_cast<int>(group), no_promises_);
        std::optional<std::int64_t>& least = shape.attention == Attention::FullHistory ? full : window;
        least = std::min(least.value_or(blocks * shape.granularity), blocks * shape.granularity);
    }
    headroom.tokens = full.value_or(window.value_or(0));
    return headroom;
}

void Scheduler::note(std::string kind, std::int32_t handle, std::string text) {
    if (notes_.size() == kMaxNotes) notes_.erase(notes_.begin());
    notes_.push_back({time_, std::move(kind), handle, std::move(text)});
}

}  // namespace tokenspeed
