// What the scheduler tells about itself, and the walk that checks it.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "scheduler/scheduler.h"

namespace tokenspeed {

using fsm::StateId;

namespace {

constexpr std::size_t kDecisionsKept = 1024;
constexpr std::size_t kBlockedPerDecision = 8;

}  // namespace

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
    const auto count = [&](const cache::Tier& tier, std::vector<GroupCounts>& groups, bool pinned) {
        for (int group = 0; group < tier.num_groups(); ++group) {
            groups.push_back({.group_id = config_.groups[static_cast<std::size_t>(group)].group_id,
                              .total = tier.total(group),
                              .held = tier.held(group),
                              .cached = tier.cached(group),
                              .free = tier.free(group),
                              .pinned = pinned ? tier.held(group) : 0,
                              .elsewhere =
                                  tier.total(group) - tier.held(group) - tier.cached(group) - tier.free(group)});
        }
    };
    count(capacity_.device(), snapshot.groups, false);
    snapshot.evictions = capacity_.device().evictions();
    if (const cache::Tier* host = capacity_.host()) {
        // Whatever is held on the host is pinned: an image, or under a copy.
        count(*host, snapshot.host, true);
        snapshot.host_evictions = host->evictions();
    }
    const std::vector<std::vector<cache::BlockId>> pinned = pinned_blocks();
    for (std::size_t group = 0; group < snapshot.groups.size(); ++group) {
        snapshot.groups[group].pinned = static_cast<std::int64_t>(pinned[group].size());
    }
    static_cast<Totals&>(snapshot) = counters_;
    snapshot.pending_operations = static_cast<std::int64_t>(pending_.size());
    return snapshot;
}

void Scheduler::record(const Round& round) {
    Decision decision;
    decision.round = round_;
    decision.prefill_rows = static_cast<std::int64_t>(round.prefills.size());
    for (const PlannedRow& row : round.prefills) decision.prefill_tokens += row.input_len;
    decision.decode_rows = static_cast<std::int64_t>(round.decodes.size());
    for (const Blocked& blocked : round.blocked) {
        if (decision.blocked.size() == kBlockedPerDecision) break;
        const Request& request = *blocked.request;
        decision.blocked.emplace_back(request.handle, code_of(request.reason), request.figure);
    }
    decision.retracted = round.retracted;
    decision.restored = round.restored;
    for (const PlanAbort& abort : round.aborts) decision.aborted.push_back(abort.handle);
    decision.evictions = capacity_.device().evictions() - std::exchange(evictions_seen_, capacity_.device().evictions());
    if (decision.quiet()) return;
    for (std::size_t group = 0; group < capacity_.num_groups(); ++group) {
        decision.free_blocks.push_back(capacity_.device().obtainable(static_cast<int>(group), no_promises_));
    }
    if (decisions_.size() == kDecisionsKept) decisions_.pop_front();
    decisions_.push_back(std::move(decision));
}

std::vector<Decision> Scheduler::decisions(std::size_t last) const {
    const std::size_t count = std::min(last, decisions_.size());
    return {decisions_.end() - static_cast<std::ptrdiff_t>(count), decisions_.end()};
}

void Scheduler::check_request(const Request& request) const {
    const std::string who = "request " + std::to_string(request.handle) + ": ";
    const StateId state = request.life.id();
    const fsm::ForwardResources* bundle = request.life.bundle();
    const auto fail = [&](const std::string& what) {
        throw std::runtime_error(who + what + " (state " + std::string(fsm::name_of(state)) + ")");
    };
    if (!fsm::states_of(config_.role).contains(state) || state == StateId::Finished) fail("impossible state");
    if (request.timeline.visits.empty() || request.timeline.visits.back().state != state) fail("its timeline ends elsewhere");
    auto* self = const_cast<Request*>(&request);
    const auto times = std::count(residents_.begin(), residents_.end(), self);
    if (times != (is_resident(state) ? 1 : 0)) fail("wrong in the list of residents");
    if (waiting_.contains(self) != (state == StateId::Submitted)) fail("wrong in the waiting line");
    if (prefetching_.contains(self) != (state == StateId::Prefetching)) fail("wrong among the prefetching");
    if (retracted_.contains(self) != (state == StateId::Retracted)) fail("wrong among the retracted");
    if (refused_.contains(self) != (state == StateId::Submitted && request.refusal.has_value())) {
        fail("wrong among the refused");
    }
    if ((request.life.image() != nullptr) != (state == StateId::Retracted || state == StateId::Restoring) &&
        state != StateId::Finishing) {
        fail("its image and its state disagree");
    }
    if (bundle == nullptr) {
        if (!request.reserves.empty()) fail("promised blocks without a bundle");
        return;
    }
    const fsm::CacheProgress& progress = bundle->progress();
    std::int64_t out = 0;
    for (const Outstanding& outstanding : outstanding_) {
        out += std::count(outstanding.requests.begin(), outstanding.requests.end(), self);
    }
    for (const auto& [op_id, pending] : pending_) {
        if (pending.kind == OperationKind::HandOff && pending.age == request.age) ++out;
    }
    if (out != bundle->results_in_flight()) fail("wrong count of results in flight");
    if (progress.committed > progress.scheduled) fail("more is committed than was scheduled");
    if (bundle->quiet() && !request.broken && progress.committed != progress.scheduled) fail("quiet, but not committed");
    if (progress.published_pages * config_.prefix_granularity > progress.committed) fail("published before it landed");
    for (std::size_t group = 0; group < bundle->tables().size(); ++group) {
        const cache::BlockTable& table = bundle->tables()[group];
        const GroupShape& shape = capacity_.shape(group);
        const std::int64_t size = shape.history() ? capacity_.blocks_for(group, progress.scheduled) : 2;
        if (table.size() != size) fail("its table does not fit its tokens");
        const std::int64_t nulls = std::count(table.ids().begin(), table.ids().end(), cache::kNullBlock);
        if (table.blocks() != size - nulls) fail("wrong count of null slots");
        // A hole is legal before the window (of what a peer computes, behind the whole prompt), and as a state's input.
        const std::int32_t needed = shape.history() ? capacity_.first_needed_slot(group, progress.committed) : 1;
        for (std::int32_t slot = needed; slot < table.size(); ++slot) {
            if (table.at(slot) == cache::kNullBlock) fail("a block that is needed is missing");
        }
        if (shape.attention == Attention::FullHistory && nulls > 0) fail("a hole in a full history");
        if (request.reserves.empty()) continue;
        if (request.reserves[group].outstanding != capacity_.outstanding(request, group)) fail("wrong reserve");
    }
    if (request.reserves.empty() != (state == StateId::Finishing)) fail("its reserve and its state disagree");
}

void Scheduler::check_invariants() const {
    const std::size_t groups = capacity_.num_groups();
    cache::Tier::Holdings held(groups), pinned(groups);
    std::vector<std::int64_t> reserved(groups, 0);
    std::array<std::int64_t, fsm::kStateCount> states{};
    std::size_t live = 0;
    int rows = 0;
    for (const Request* request = oldest_; request != nullptr; request = request->newer) {
        check_request(*request);
        ++live;
        ++states[fsm::index_of(request->life.id())];
        const fsm::ForwardResources* bundle = request->life.bundle();
        rows += bundle != nullptr ? 1 : 0;
        for (std::size_t group = 0; group < groups; ++group) {
            if (bundle != nullptr) bundle->tables()[group].collect(held[group]);
            if (!request->reserves.empty()) reserved[group] += request->reserves[group].outstanding;
        }
        if (const fsm::HostImage* image = request->life.image()) image->pins().collect(pinned);
        if (const cache::HostPins* pins = request->life.pins()) pins->collect(pinned);
    }
    for (const auto& [op_id, pending] : pending_) pending.pins.collect(pinned);
    for (std::size_t state = 0; state < fsm::kStateCount; ++state) {
        if (static_cast<StateId>(state) != StateId::Finished && states[state] != counters_.states[state]) {
            throw std::runtime_error("wrong count of requests in state " + std::string(fsm::kStateNames[state]));
        }
    }
    if (live != requests_.size()) throw std::runtime_error("the list of the living and the handles disagree");
    if (rows + capacity_.rows().free() != capacity_.rows().total()) {
        throw std::runtime_error(std::to_string(rows) + " rows owned + " + std::to_string(capacity_.rows().free()) +
                                 " free are not " + std::to_string(capacity_.rows().total()));
    }
    if (reserved != capacity_.reserved()) throw std::runtime_error("wrong sum of reserves");
    if (const std::string wrong = capacity_.device().check(held); !wrong.empty()) {
        throw std::runtime_error("device: " + wrong);
    }
    if (capacity_.host() != nullptr) {
        const std::string wrong = capacity_.host()->check(pinned);
        if (!wrong.empty()) throw std::runtime_error("host: " + wrong);
    }
    check_books();
}

void Scheduler::check_books() const {
    const auto gaps = std::count(residents_.begin(), residents_.end(), nullptr);
    if (resident_count_ + gaps != static_cast<std::int64_t>(residents_.size())) {
        throw std::runtime_error("wrong count of residents");
    }
    std::int64_t retracted = static_cast<std::int64_t>(retracted_.size());
    for (const Request* request : waiting_) retracted += request->retractions > 0 ? 1 : 0;
    if (retracted != retracted_waiting_) throw std::runtime_error("wrong count of retracted requests that wait");
    std::int32_t storage = 0;
    for (const auto& [op_id, pending] : pending_) {
        storage += pending.kind == OperationKind::StorageQuery || pending.kind == OperationKind::StorageFetch ||
                           pending.kind == OperationKind::StoragePut
                       ? 1
                       : 0;
    }
    if (storage != storage_operations_) throw std::runtime_error("wrong count of storage operations");
}

}  // namespace tokenspeed
