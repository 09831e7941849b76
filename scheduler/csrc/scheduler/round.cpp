// One round: decodes, resident chunks, new prompts by priority then age; retraction.cpp has its last phase.
#include <algorithm>
#include <string>

#include "scheduler/scheduler.h"
#include "scheduler/transition.h"

namespace tokenspeed {

using fsm::StateId;

std::shared_ptr<const Plan> Scheduler::plan() {
    ++round_;
    std::erase(residents_, nullptr);
    Round round;
    round.budget = config_.max_scheduled_tokens;
    round.aborts = std::exchange(aborts_, {});
    round.operations = std::exchange(outbox_, {});
    end_broken(round);
    // Before anything can be evicted: what is copied must still be there.
    write_back(round);
    put(round);
    look_up(round);
    switch (config_.role) {
        case fsm::Role::Fused:
            restore_one(round);
            if (config_.mixed_batches) schedule_decodes(round);
            schedule_prefills(round);
            if (!config_.mixed_batches && round.prefills.empty()) schedule_decodes(round);
            break;
        case fsm::Role::Prefill:
            hand_off(round);
            schedule_prefills(round);
            break;
        case fsm::Role::Decode:
            restore_one(round);
            schedule_decodes(round);
            schedule_remote(round);
            break;
    }
    // What the peer reads stays where it is: the prefill role makes nobody give way.
    const bool gives_way = config_.role != fsm::Role::Prefill;
    if (gives_way) retract_and_grant(round);
    resume_left_out(round);
    // Whoever was left out may be blocked in turn, and then nobody would have had the room.
    if (gives_way && round.is_idle()) retract_and_grant(round);
    if (round.is_idle()) compact(round);
    return emit(std::move(round));
}

// A request whose row failed, and which nobody ended meanwhile, has unknown tokens or spoilt blocks: it cannot go on.
void Scheduler::end_broken(Round& round) {
    const std::vector<Request*> broken = std::exchange(broken_, {});
    for (Request* request : broken) {
        if (!is_resident(request->life.id())) continue;
        round.aborts.push_back({request->handle, "failed",
                                "a forward failed in round " + std::to_string(round_ - 1) +
                                    " or earlier and brought no token for request " +
                                    std::to_string(request->handle)});
        transition(*request, fsm::AbortEvent{});
    }
}

// Whether it was armed last round: left out, so that it becomes quiet, unless the round finds that it need not be.
bool Scheduler::out_of_turn(const Request& request) const { return request.armed_in_round == round_ - 1; }

void Scheduler::schedule_decodes(Round& round) {
    std::vector<Request*> ready;
    ready.reserve(residents_.size());
    for (Request* request : residents_) {
        if (request == nullptr || !may_decode(round, *request)) continue;
        if (outgrown(*request)) {
            end_outgrown(round, *request);
        } else {
            ready.push_back(request);
        }
    }
    if (static_cast<std::int64_t>(ready.size()) > round.budget) {
        // Too many for one round: those that waited longest go first.
        std::stable_sort(ready.begin(), ready.end(), [](const Request* a, const Request* b) {
            return a->last_decode_round < b->last_decode_round;
        });
    }
    for (Request* request : ready) {
        if (round.budget == 0) {
            request->reason = WaitReason::Budget;
        } else {
            try_decode(round, *request);
        }
    }
}

// Whether the request is one that decodes and could take a step now, room and budget aside; notes why not.
bool Scheduler::may_decode(Round& round, Request& request) const {
    if (!request.life.is<StateId::Decoding>() && !request.life.is<StateId::PrefillDone>()) return false;
    if (request.generation_scheduled()) {
        request.reason = WaitReason::GenerationDone;
    } else if (request.life.bundle()->results_in_flight() > config_.overlap_depth) {
        request.reason = WaitReason::ResultInFlight;
    } else if (out_of_turn(request) && !outgrown(request)) {
        round.left_out.push_back(&request);
    } else {
        return true;
    }
    return false;
}

bool Scheduler::try_decode(Round& round, Request& request) {
    const fsm::ForwardResources& bundle = *request.life.bundle();
    const std::int32_t position = bundle.progress().scheduled;
    Shortfall shortfall;
    std::optional<fsm::Grant> grant = capacity_.extend(request, position + 1, shortfall);
    if (!grant) {
        refuse(request, shortfall);
        round.blocked.push_back({&request, Step::Decode, shortfall});
        return false;
    }
    const bool grew = !grant->blocks.empty();
    transition(request, fsm::ScheduleDecodeEvent{.grant = std::move(*grant)});
    if (grew || capacity_.has_open_groups()) capacity_.settle(request);
    ++request.samples_scheduled;
    request.last_decode_round = round_;
    request.reason = WaitReason::None;
    --round.budget;
    round.decodes.push_back({&request, position, 1, true, std::exchange(request.begins, false)});
    return true;
}

// A request of undeclared length can outgrow the whole pool, where no retraction helps and none may be tried: it could
// not be admitted again.
bool Scheduler::outgrown(const Request& request) const {
    const fsm::ForwardResources* bundle = request.life.bundle();
    return bundle != nullptr && !request.generation_scheduled() &&
           bundle->progress().scheduled + 1 > pool_tokens_;
}

// Ends it, once its last token has landed.
void Scheduler::end_outgrown(Round& round, Request& request) {
    if (!request.life.bundle()->quiet()) {
        request.reason = WaitReason::ResultInFlight;
        return;
    }
    round.aborts.push_back({request.handle, "capacity",
                            "request " + std::to_string(request.handle) + " has grown to " +
                                std::to_string(request.known_tokens()) + " tokens, and the KV cache holds " +
                                std::to_string(pool_tokens_) +
                                "; give the KV cache more memory, or ask for fewer tokens with max_new_tokens"});
    transition(request, fsm::AbortEvent{});
}

// Chunks of resident prompts come first. But where the budget cut one in the round before, and others wait, it is their
// turn: a short prompt waits a round or two for a long one, and a long one takes at most twice its time.
void Scheduler::schedule_prefills(Round& round) {
    const bool prompts_first = std::exchange(prompts_turn_, false) && !waiting_.empty();
    if (prompts_first) {
        schedule_prompts(round);
        schedule_chunks(round);
        return;
    }
    schedule_chunks(round);
    prompts_turn_ = round.line_holder != nullptr && !round.prefills.empty();
    schedule_prompts(round);
}

// Prompts that are resident and not complete.
const Request* Scheduler::first_incomplete() const {
    const auto found = std::find_if(residents_.begin(), residents_.end(), [](const Request* request) {
        return request != nullptr && request->life.is<StateId::Prefilling>();
    });
    return found == residents_.end() ? nullptr : *found;
}

int Scheduler::incomplete_prompts() const {
    return static_cast<int>(std::count_if(residents_.begin(), residents_.end(), [](const Request* request) {
        return request != nullptr && request->life.is<StateId::Prefilling>();
    }));
}

void Scheduler::schedule_chunks(Round& round) {
    std::vector<Request*> incomplete;
    for (Request* request : residents_) {
        if (request == nullptr || !request->life.is<StateId::Prefilling>()) continue;
        if (request->last_chunk_round < round_) incomplete.push_back(request);
    }
    // Several take turns.
    std::stable_sort(incomplete.begin(), incomplete.end(), [](const Request* a, const Request* b) {
        return a->last_chunk_round < b->last_chunk_round;
    });
    for (Request* request : incomplete) {
        if (request->life.bundle()->results_in_flight() > config_.overlap_depth) {
            request->reason = WaitReason::ResultInFlight;
        } else if (out_of_turn(*request)) {
            round.left_out.push_back(request);
        } else if (try_chunk(round, *request)) {
            continue;
        }
        if (round.line_holder == nullptr) round.line_holder = request;
    }
}

std::int32_t Scheduler::chunk_for(const Round& round, const Request& request, std::int32_t from,
                                  std::int32_t junction) const {
    return chunk_tokens(from, {.budget = round.budget,
                               .prefill_len = request.prefill_len,
                               .junction = junction,
                               .checkpoint_granularity = capacity_.checkpoint_granularity()});
}

bool Scheduler::try_chunk(Round& round, Request& request) {
    if (round.budget == 0) {
        request.reason = WaitReason::Budget;
        return false;
    }
    const fsm::ForwardResources& bundle = *request.life.bundle();
    const std::int32_t from = bundle.progress().scheduled;
    std::int32_t chunk = chunk_for(round, request, from, request.junction);
    Shortfall shortfall;
    std::optional<fsm::Grant> grant = capacity_.extend(request, from + chunk, shortfall);
    // A window needs less room for a shorter chunk; who has the pool alone takes what fits.
    while (!grant && capacity_.has_open_groups() && resident_count_ == 1 && bundle.quiet() && chunk > 1) {
        chunk = (chunk + 1) / 2;
        grant = capacity_.extend(request, from + chunk, shortfall);
    }
    if (!grant) {
        refuse(request, shortfall);
        round.blocked.push_back({&request, Step::Chunk, shortfall});
        return false;
    }
    const bool completes = from + chunk == request.prefill_len;
    transition(request,
               fsm::SchedulePrefillEvent{.grant = std::move(*grant), .input_len = chunk, .completes = completes});
    capacity_.settle(request);
    if (completes) ++request.samples_scheduled;
    request.last_chunk_round = round_;
    request.reason = WaitReason::None;
    round.budget -= chunk;
    round.prefills.push_back({&request, from, chunk, completes, std::exchange(request.begins, false)});
    // A prompt that was cut for a checkpoint and not by the budget leaves the round open.
    if (!completes && from + chunk != request.junction) round.line_holder = &request;
    return true;
}

// The oldest prompt refused for capacity, once it was overtaken as often as may be: new prompts wait behind it.
Request* Scheduler::sealing() const {
    if (refused_.empty() || (*refused_.begin())->overtaken < config_.max_overtakes) return nullptr;
    return *refused_.begin();
}

void Scheduler::schedule_prompts(Round& round) { stop_line(walk_line(round)); }

void Scheduler::stop_line(const Request* last) {
    line_stop_.reset();
    if (last == nullptr) return;
    line_stop_ = {.handle = last->handle,
                  .age = last->age,
                  .place = {last->priority, last->age},
                  .sealed = last == sealing()};
}

// Returns at whom it stopped, or nullptr where it came to the end of the line.
Request* Scheduler::walk_line(Round& round) {
    int refusals = 0;
    const bool may_not_be_cut = incomplete_prompts() >= kMaxIncompletePrompts;
    for (auto place = waiting_.begin(); place != waiting_.end();) {
        Request* seal = sealing();
        // A sealed line has one candidate: whoever sealed it.
        Request& request = seal != nullptr ? *seal : **place;
        if (seal != nullptr && *place != seal) {
            (*place)->reason = WaitReason::Sealed;
            (*place)->figure = seal->handle;
        }
        if (Request* holder = round.line_holder != nullptr ? round.line_holder : round.sealed_by) {
            request.reason = WaitReason::LineHeld;
            request.figure = holder->handle;
            return &request;
        }
        if (round.budget == 0 || capacity_.rows().free() == 0) {
            request.reason = round.budget == 0 ? WaitReason::Budget : WaitReason::NoRow;
            return &request;
        }
        if (may_not_be_cut && !completes_now(round, request)) {
            request.reason = WaitReason::LineHeld;
            request.figure = first_incomplete()->handle;
            if (seal != nullptr || request.retractions > 0 || ++refusals == kMaxRefusalsPerRound) return &request;
            ++place;
            continue;
        }
        bool admitted = false;
        if (resident_count_ == 0 || capacity_.worth_trying(request)) {
            admitted = try_prompt(round, request);
        } else {
            round.blocked.push_back({&request, Step::Prompt, {}});
        }
        if (admitted) {
            // Everything before `place` is refused still; after a sealed line opened, begin anew.
            place = seal != nullptr ? waiting_.begin() : waiting_.upper_bound(&request);
            continue;
        }
        // Nobody passes one that was retracted: its client waits in mid-stream, and the pool is overfull.
        if (seal != nullptr || request.retractions > 0 || ++refusals == kMaxRefusalsPerRound) return &request;
        ++place;
    }
    return nullptr;
}

// Whether the whole of a prompt fits this round's budget.
bool Scheduler::completes_now(const Round& round, Request& request) const {
    if (request.prefill_len <= round.budget) return true;
    const Prefix prefix = capacity_.probe(request);
    return prefix.tokens + chunk_for(round, request, prefix.tokens, prefix.junction) == request.prefill_len;
}

bool Scheduler::try_prompt(Round& round, Request& request) {
    Prefix prefix = capacity_.probe(request);
    const bool alone = resident_count_ == 0;
    std::int32_t chunk = chunk_for(round, request, prefix.tokens, prefix.junction);
    Demand demand = capacity_.first_chunk(request, prefix, chunk);
    std::optional<Shortfall> shortfall = capacity_.short_for(demand, alone);
    if (shortfall && alone && prefix.tokens > 0) {
        // What is cached lies strewn over too many parents; anew it fits.
        prefix = capacity_.no_prefix();
        chunk = chunk_for(round, request, 0, 0);
        demand = capacity_.first_chunk(request, prefix, chunk);
        shortfall = capacity_.short_for(demand, alone);
    }
    while (shortfall && capacity_.has_open_groups() && alone && chunk > 1) {
        chunk = (chunk + 1) / 2;
        demand = capacity_.first_chunk(request, prefix, chunk);
        shortfall = capacity_.short_for(demand, alone);
    }
    const bool completes = prefix.tokens + chunk == request.prefill_len;
    if (!shortfall && !completes && first_incomplete() != nullptr) {
        // Beside another prompt that is not complete it must fit whole: else they would take each other's room in turns.
        shortfall = capacity_.short_for(capacity_.whole_prompt(request, prefix), false);
    }
    if (shortfall) {
        refuse(request, *shortfall);
        refused_.insert(&request);
        round.blocked.push_back({&request, Step::Prompt, *shortfall});
        return false;
    }
    count_overtaking(request);
    Admission admission = capacity_.admit(prefix, demand);
    send_loads(round, OperationKind::LoadBack, request, admission.loads);
    request.junction = prefix.junction;
    transition(request, fsm::SchedulePrefillEvent{.grant = std::move(admission.grant),
                                                  .input_len = chunk,
                                                  .completes = completes,
                                                  .cached = prefix.tokens,
                                                  .cached_pages = prefix.published_pages});
    capacity_.promise(request, demand);
    if (request.retractions == 0) {
        request.cached_tokens = prefix.tokens;
        counters_.prefix_query_tokens += request.prefill_len;
        counters_.prefix_hit_tokens += prefix.tokens;
        const std::int32_t loaded = prefix.tokens - prefix.device_tokens;
        const std::int32_t stored = std::min(request.storage_tokens, loaded);
        counters_.storage_hit_tokens += stored;
        counters_.host_hit_tokens += loaded - stored;
    }
    if (completes) {
        ++request.samples_scheduled;
    } else if (prefix.tokens + chunk != prefix.junction) {
        round.line_holder = &request;
    }
    request.begins = false;
    request.last_chunk_round = round_;
    request.reason = WaitReason::None;
    round.budget -= chunk;
    round.prefills.push_back({&request, prefix.tokens, chunk, completes, true});
    return true;
}

// Remembers why there was no room, and for those who wait for their first chunk or to be restored what there was.
void Scheduler::refuse(Request& request, const Shortfall& shortfall) {
    request.reason = WaitReason::Capacity;
    request.figure = shortfall.blocks;
    request.short_group = shortfall.group;
    if (request.life.bundle() == nullptr) request.refusal = capacity_.refusal(shortfall);
}

void Scheduler::count_overtaking(const Request& admitted) {
    if (refused_.empty()) return;
    Request& oldest = **refused_.begin();
    if (oldest.age >= admitted.age) return;
    ++oldest.overtaken;
    ++counters_.overtakes;
}

// Whoever was armed and is not needed as a victim after all gets its step in the same round.
void Scheduler::resume_left_out(Round& round) {
    for (Request* request : round.left_out) {
        if (request->armed_in_round == round_ || !is_resident(request->life.id())) continue;
        if (request->life.is<StateId::Prefilling>()) {
            if (config_.mixed_batches || round.decodes.empty()) try_chunk(round, *request);
        } else if (round.budget > 0 && (config_.mixed_batches || round.prefills.empty())) {
            try_decode(round, *request);
        }
    }
}

}  // namespace tokenspeed
