// What the scheduler tells about itself, and the walk that checks it.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "scheduler/scheduler.h"

namespace tokenspeed {

using fsm::StateId;

Snapshot Scheduler::snapshot() const {
    Snapshot snapshot;
    snapshot.round = round_;
    const fsm::StateSet exist = fsm::states_of(config_.role);
    for (std::size_t state = 0; state < fsm::kStateCount; ++state) {
        const auto id = static_cast<StateId>(state);
        const std::int64_t count = counters_.states[state];
        snapshot.states.push_back(exist.contains(id) ? count : -1);
        if (id != StateId::Finished) snapshot.live += count;
        if (is_resident(id)) {
            snapshot.running += count;
        } else if (id != StateId::Finishing && id != StateId::Finished) {
            snapshot.waiting += count;
        }
        for (std::size_t target = 0; target < fsm::kStateCount; ++target) {
            const std::int64_t flow = counters_.flows[state][target];
            if (flow > 0) snapshot.flows.emplace_back(static_cast<int>(state), static_cast<int>(target), flow);
        }
    }
    for (std::size_t group = 0; group < capacity_.num_groups(); ++group) {
        const cache::GroupCache& cache = capacity_.cache(group);
        snapshot.groups.push_back({.group_id = config_.groups[group].group_id,
                                   .total = cache.total(),
                                   .held = cache.held(),
                                   .cached = cache.cached(),
                                   .free = cache.free(),
                                   .pinned = 0});
        snapshot.evictions += cache.evictions();
    }
    snapshot.retractions = counters_.retractions;
    snapshot.ignored_results = counters_.ignored_results;
    snapshot.prefix_query_tokens = counters_.prefix_query_tokens;
    snapshot.prefix_hit_tokens = counters_.prefix_hit_tokens;
    snapshot.prefill_tokens = counters_.prefill_tokens;
    snapshot.decode_tokens = counters_.decode_tokens;
    snapshot.overtakes = counters_.overtakes;
    return snapshot;
}

std::vector<RequestRow> Scheduler::requests(std::size_t limit) const {
    std::vector<RequestRow> rows;
    rows.reserve(std::min(limit, requests_.size()));
    for (const Request* request = oldest_; request != nullptr && rows.size() < limit; request = request->newer) {
        RequestRow row;
        row.handle = request->handle;
        row.state = request->life.id();
        row.age_rounds = round_ - request->state_since;
        row.priority = request->priority;
        row.prompt_tokens = request->prompt_tokens;
        row.generated_tokens = request->generated();
        row.cached_tokens = request->cached_tokens;
        row.retractions = request->retractions;
        row.reason = reason_of(*request);
        if (const fsm::ForwardResources* bundle = request->life.bundle()) {
            row.computed_tokens = bundle->progress().scheduled;
            for (const cache::BlockTable& table : bundle->tables()) row.blocks += table.size();
        }
        rows.push_back(std::move(row));
    }
    return rows;
}

std::string Scheduler::reason_of(const Request& request) const {
    if (request.life.is<StateId::Finishing>()) return "its last result is out";
    switch (request.reason) {
        case WaitReason::None:
            return "";
        case WaitReason::Queued:
            return "its turn has not come";
        case WaitReason::NoRow:
            return "no row: all " + std::to_string(config_.max_num_seqs) + " are taken (max_num_seqs)";
        case WaitReason::Budget:
            return "budget: the round's " + std::to_string(config_.max_scheduled_tokens) +
                   " tokens were spent (max_scheduled_tokens)";
        case WaitReason::Capacity:
            return "capacity: short by " + std::to_string(request.figure) + (request.figure == 1 ? " block" : " blocks");
        case WaitReason::LineHeld:
            return "the line is held by request " + std::to_string(request.figure);
        case WaitReason::ResultInFlight:
            return "its last result must land first";
        case WaitReason::Armed:
            return "about to be retracted: left out until its last result lands";
        case WaitReason::GenerationDone:
            return "all its tokens are scheduled";
    }
    return "";
}

void Scheduler::check_request(const Request& request) const {
    const std::string who = "request " + std::to_string(request.handle) + ": ";
    const StateId state = request.life.id();
    const fsm::ForwardResources* bundle = request.life.bundle();
    const auto fail = [&](const std::string& what) {
        throw std::runtime_error(who + what + " (state " + std::string(fsm::name_of(state)) + ")");
    };
    if (!fsm::states_of(config_.role).contains(state) || state == StateId::Finished) fail("impossible state");
    auto* self = const_cast<Request*>(&request);
    const auto times = std::count(residents_.begin(), residents_.end(), self);
    if (times != (is_resident(state) ? 1 : 0)) fail("wrong in the list of residents");
    if (waiting_.contains(self) != (state == StateId::Submitted)) fail("wrong in the waiting line");
    if (refused_.contains(self) != request.refusal.has_value()) fail("wrong among the refused");
    if (bundle == nullptr) {
        if (!request.reserves.empty()) fail("promised blocks without a bundle");
        return;
    }
    const fsm::CacheProgress& progress = bundle->progress();
    std::int64_t out = 0;
    for (const Outstanding& outstanding : outstanding_) {
        out += std::count(outstanding.requests.begin(), outstanding.requests.end(), self);
    }
    if (out != bundle->results_in_flight()) fail("wrong count of results in flight");
    if (progress.committed > progress.scheduled) fail("more is committed than was scheduled");
    if (bundle->quiet() && !request.broken && progress.committed != progress.scheduled) fail("quiet, but not committed");
    if (progress.published_pages * config_.prefix_granularity > progress.committed) fail("published before it landed");
    for (std::size_t group = 0; group < bundle->tables().size(); ++group) {
        const std::int64_t size = bundle->tables()[group].size();
        if (size != capacity_.blocks_for(group, progress.scheduled)) fail("its table does not fit its tokens");
        if (request.reserves.empty()) continue;
        const Request::Reserve& reserve = request.reserves[group];
        if (reserve.outstanding != std::max<std::int64_t>(reserve.target_blocks - size, 0)) fail("wrong reserve");
    }
    if (request.reserves.empty() != (state == StateId::Finishing)) fail("its reserve and its state disagree");
}

void Scheduler::check_invariants() const {
    std::vector<std::vector<std::pair<cache::HolderId, cache::BlockId>>> held(capacity_.num_groups());
    std::vector<std::int64_t> reserved(capacity_.num_groups(), 0);
    std::array<std::int64_t, fsm::kStateCount> states{};
    std::size_t live = 0;
    int rows = 0;
    for (const Request* request = oldest_; request != nullptr; request = request->newer) {
        check_request(*request);
        ++live;
        ++states[fsm::index_of(request->life.id())];
        const fsm::ForwardResources* bundle = request->life.bundle();
        rows += bundle != nullptr ? 1 : 0;
        for (std::size_t group = 0; group < capacity_.num_groups(); ++group) {
            if (bundle != nullptr) bundle->tables()[group].collect(held[group]);
            if (!request->reserves.empty()) reserved[group] += request->reserves[group].outstanding;
        }
    }
    const auto gaps = std::count(residents_.begin(), residents_.end(), nullptr);
    if (resident_count_ + gaps != static_cast<std::int64_t>(residents_.size())) {
        throw std::runtime_error("wrong count of residents");
    }
    if (live != requests_.size()) throw std::runtime_error("the list of the living and the handles disagree");
    for (std::size_t state = 0; state < fsm::kStateCount; ++state) {
        if (static_cast<StateId>(state) != StateId::Finished && states[state] != counters_.states[state]) {
            throw std::runtime_error("wrong count of requests in state " + std::string(fsm::kStateNames[state]));
        }
    }
    if (rows + capacity_.rows().free() != capacity_.rows().total()) {
        throw std::runtime_error(std::to_string(rows) + " rows owned + " + std::to_string(capacity_.rows().free()) +
                                 " free are not " + std::to_string(capacity_.rows().total()));
    }
    if (const std::string wrong = capacity_.pool().check(); !wrong.empty()) throw std::runtime_error("pool: " + wrong);
    for (std::size_t group = 0; group < capacity_.num_groups(); ++group) {
        const std::string who = "cache group '" + config_.groups[group].group_id + "': ";
        const std::string wrong = capacity_.cache(group).check(held[group]);
        if (!wrong.empty()) throw std::runtime_error(who + wrong);
        if (reserved[group] != capacity_.reserved(group)) throw std::runtime_error(who + "wrong sum of reserves");
    }
}

}  // namespace tokenspeed
