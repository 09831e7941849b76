// Prefill and decode apart. What a peer still reads or writes is pinned by the state itself: the prefill role's request is
// Decoding (nothing here decodes it) until the peer has read its blocks, the decode role's RemotePrefilling until the peer
// has written them. Of a full history all blocks cross, of a window what it still needs, of a state the live block.
#include "scheduler/scheduler.h"
#include "scheduler/transition.h"

namespace tokenspeed {

using cache::kNullBlock;
using fsm::StateId;

// Prefill role: hands the blocks of every completed prompt whose first token is known to the peer.
void Scheduler::hand_off(Round& round) {
    for (std::size_t place = 0; place < residents_.size(); ++place) {
        Request* request = residents_[place];
        if (request == nullptr || !request->life.is<StateId::PrefillDone>() || request->broken) continue;
        const fsm::ForwardResources& bundle = *request->life.bundle();
        if (!bundle.quiet()) continue;
        CacheOperation operation = make_operation(OperationKind::HandOff, request->handle);
        for (std::size_t group = 0; group < capacity_.num_groups(); ++group) {
            const cache::BlockTable& table = bundle.tables()[group];
            const bool history = capacity_.shape(group).history();
            const std::int32_t first = history ? capacity_.first_needed_slot(group, request->prefill_len) : 1;
            for (std::int32_t slot = first; slot < table.size(); ++slot) {
                if (table.at(slot) == kNullBlock) continue;
                operation.group.push_back(static_cast<std::int32_t>(group));
                operation.source.push_back(table.at(slot));
                operation.target.push_back(kNullBlock);
                operation.offsets.push_back(slot);
            }
        }
        pend(operation, request, cache::HostPins());
        request->operation = operation.op_id;
        round.operations.push_back(std::move(operation));
        // Counted as a forward over no tokens: the peer reads the blocks until it reports.
        transition(*request, fsm::ScheduleDecodeEvent{.grant = {}, .input_len = 0});
        capacity_.settle(*request);
        request->reason = WaitReason::Peer;
    }
}

// The peer has what it needs, or gave up; either way nothing outside touches the blocks any more.
void Scheduler::handed_off(Request& request) {
    request.operation = 0;
    const bool ending = request.life.is<StateId::Finishing>();
    transition(request, fsm::ResultLandedEvent{});
    if (!ending) transition(request, fsm::FinishEvent{});
}

// Decode role: at most one whole prompt a round is left to the peer.
void Scheduler::schedule_remote(Round& round) {
    int refusals = 0;
    for (auto place = waiting_.begin(); place != waiting_.end(); ++place) {
        Request* seal = sealing();
        Request& request = seal != nullptr ? *seal : **place;
        if (round.sealed_by != nullptr) {
            request.reason = WaitReason::LineHeld;
            request.figure = round.sealed_by->handle;
            return;
        }
        if (capacity_.rows().free() == 0) {
            request.reason = WaitReason::NoRow;
            return;
        }
        if (resident_count_ == 0 || capacity_.worth_trying(request)) {
            if (try_remote(round, request)) return;
        } else {
            round.blocked.push_back({&request, Step::Prompt, {}});
        }
        if (seal != nullptr || request.retractions > 0 || ++refusals == kMaxRefusalsPerRound) return;
    }
}

bool Scheduler::try_remote(Round& round, Request& request) {
    const bool alone = resident_count_ == 0;
    Prefix prefix = capacity_.remote_prefix(request);
    Demand demand = capacity_.first_chunk(request, prefix, request.prefill_len - prefix.tokens);
    std::optional<Shortfall> shortfall = capacity_.short_for(demand, alone);
    if (shortfall && alone && prefix.tokens > 0) {
        // What is cached lies strewn over too many parents; anew it fits.
        prefix = capacity_.remote_prefix(request, false);
        demand = capacity_.first_chunk(request, prefix, request.prefill_len);
        shortfall = capacity_.short_for(demand, alone);
    }
    if (shortfall) {
        refuse(request, *shortfall);
        refused_.insert(&request);
        round.blocked.push_back({&request, Step::Prompt, *shortfall});
        return false;
    }
    count_overtaking(request);
    Admission admission = capacity_.admit(prefix, demand);
    CacheOperation operation = make_operation(OperationKind::RemotePrefill, request.handle);
    for (std::size_t group = 0; group < capacity_.num_groups(); ++group) {
        const cache::BlockTable& table = admission.grant.blocks[group];
        const GroupPrefix& its = prefix.groups[group];
        const bool history = capacity_.shape(group).history();
        const auto first = history ? its.first_slot + static_cast<std::int32_t>(its.blocks.size()) : 1;
        for (std::int32_t slot = first; slot < table.size(); ++slot) {
            operation.group.push_back(static_cast<std::int32_t>(group));
            operation.source.push_back(kNullBlock);
            operation.target.push_back(table.at(slot));
            operation.offsets.push_back(slot);
        }
    }
    counters_.prefix_query_tokens += request.prefill_len;
    counters_.prefix_hit_tokens += prefix.tokens;
    request.cached_tokens = prefix.tokens;
    request.begins = true;
    request.remote = true;
    transition(request, fsm::ScheduleRemotePrefillEvent{.grant = std::move(admission.grant),
                                                        .prompt_len = request.prefill_len,
                                                        .cached_pages = prefix.published_pages});
    capacity_.promise(request, demand);
    request.reason = WaitReason::Peer;
    round.operations.push_back(std::move(operation));
    return true;
}

void Scheduler::remote_prefill_done(const RemotePrefillDone& event) {
    const auto found = requests_.find(event.handle);
    if (found == requests_.end() || !found->second->remote) {
        ++counters_.ignored_results;
        return;
    }
    Request& request = *found->second;
    request.remote = false;
    if (event.first_token < 0 && request.life.is<StateId::RemotePrefilling>()) {
        aborts_.push_back({request.handle, "failed",
                           "the prefill peer could not compute the prompt of request " + std::to_string(request.handle)});
        transition(request, fsm::AbortEvent{});
    }
    if (request.life.is<StateId::Finishing>()) {
        transition(request, fsm::RemotePrefillDoneEvent{});
        return;
    }
    request.tokens.push_back(event.first_token);
    ++request.samples_scheduled;
    transition(request, fsm::RemotePrefillDoneEvent{});
    request.reason = WaitReason::Queued;
    capacity_.publish(request);
    // No forward is out that could read what was replaced by equal content.
    fsm::ForwardResources& bundle = *request.life.bundle();
    for (cache::BlockTable& table : bundle.tables()) table.forward_landed(bundle.progress().last_forward);
    capacity_.settle(request);
}

}  // namespace tokenspeed
