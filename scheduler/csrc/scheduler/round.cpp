// One round: decodes, resident chunks, new prompts by priority then age; retraction.cpp has its last phase.
#include <algorithm>
#include <string>

#include "scheduler/scheduler.h"
#include "scheduler/transition.h"

namespace tokenspeed {

using fsm::StateId;

namespace {

// New prompts that may fail for capacity, or be skipped because nothing changed since they did, before a round stops
// trying: what bounds a round's work whatever the length of the line.
constexpr int kMaxRefusalsPerRound = 16;

}  // namespace

std::shared_ptr<const Plan> Scheduler::plan() {
    ++round_;
    std::erase(residents_, nullptr);
    Round round;
    round.budget = config_.max_scheduled_tokens;
    end_broken(round);
    if (config_.mixed_batches) {
        schedule_decodes(round);
        schedule_chunks(round);
        schedule_prompts(round);
    } else {
        schedule_chunks(round);
        schedule_prompts(round);
        if (round.prefills.empty()) schedule_decodes(round);
    }
    retract_and_grant(round);
    resume_left_out(round);
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
    std::optional<fsm::Grant> grant = capacity_.extend(bundle, position + 1, shortfall);
    if (!grant) {
        request.reason = WaitReason::Capacity;
        request.figure = shortfall.blocks();
        round.blocked.push_back({&request, Admission::Decode, shortfall});
        return false;
    }
    const bool grew = !grant->blocks.empty();
    transition(request, fsm::ScheduleDecodeEvent{.grant = std::move(*grant)});
    if (grew) capacity_.settle(request);
    ++request.samples_scheduled;
    request.last_decode_round = round_;
    request.reason = WaitReason::None;
    --round.budget;
    round.decodes.push_back({&request, position, 1, true, false});
    return true;
}

// A request of undeclared length can outgrow the whole pool, where no retraction helps and none may be tried: it could
// not be admitted again.
bool Scheduler::outgrown(const Request& request) const {
    const fsm::ForwardResources* bundle = request.life.bundle();
    return bundle != nullptr && !request.generation_scheduled() &&
           bundle->progress().scheduled + 1 > config_.pool_tokens();
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
                                std::to_string(config_.pool_tokens()) +
                                "; give the KV cache more memory, or ask for fewer tokens with max_new_tokens"});
    transition(request, fsm::AbortEvent{});
}

void Scheduler::schedule_chunks(Round& round) {
    for (Request* request : residents_) {
        if (request == nullptr || !request->life.is<StateId::Prefilling>()) continue;
        if (request->life.bundle()->results_in_flight() > config_.overlap_depth) {
            request->reason = WaitReason::ResultInFlight;
        } else if (out_of_turn(*request)) {
            round.left_out.push_back(request);
        } else {
            try_chunk(round, *request);
        }
        if (request->life.is<StateId::Prefilling>()) round.line_holder = request;
    }
}

bool Scheduler::try_chunk(Round& round, Request& request) {
    if (round.budget == 0) {
        request.reason = WaitReason::Budget;
        return false;
    }
    const fsm::ForwardResources& bundle = *request.life.bundle();
    const std::int32_t from = bundle.progress().scheduled;
    const auto chunk = static_cast<std::int32_t>(std::min<std::int64_t>(round.budget, request.prefill_len - from));
    Shortfall shortfall;
    std::optional<fsm::Grant> grant = capacity_.extend(bundle, from + chunk, shortfall);
    if (!grant) {
        request.reason = WaitReason::Capacity;
        request.figure = shortfall.blocks();
        round.blocked.push_back({&request, Admission::Chunk, shortfall});
        return false;
    }
    const bool completes = from + chunk == request.prefill_len;
    transition(request,
               fsm::SchedulePrefillEvent{.grant = std::move(*grant), .input_len = chunk, .completes = completes});
    capacity_.settle(request);
    if (completes) ++request.samples_scheduled;
    request.reason = WaitReason::None;
    round.budget -= chunk;
    round.prefills.push_back({&request, from, chunk, completes, false});
    return true;
}

// The oldest prompt refused for capacity, once it was overtaken as often as may be: new prompts wait behind it.
const Request* Scheduler::sealing() const {
    if (refused_.empty() || (*refused_.begin())->overtaken < config_.max_overtakes) return nullptr;
    return *refused_.begin();
}

void Scheduler::schedule_prompts(Round& round) {
    int refusals = 0;
    for (auto place = waiting_.begin(); place != waiting_.end();) {
        Request& first_in_line = **place;
        const Request* seal = sealing();
        // A sealed line has one candidate: whoever sealed it.
        Request& request = seal != nullptr ? **refused_.begin() : first_in_line;
        if (round.line_holder != nullptr) {
            first_in_line.reason = WaitReason::LineHeld;
            first_in_line.figure = round.line_holder->handle;
            return;
        }
        if (round.budget == 0 || capacity_.rows().free() == 0) {
            request.reason = round.budget == 0 ? WaitReason::Budget : WaitReason::NoRow;
            return;
        }
        const bool alone = resident_count_ == 0;
        bool admitted = false;
        if (alone || capacity_.worth_trying(request)) {
            admitted = try_prompt(round, request);
        } else {
            round.blocked.push_back({&request, Admission::Prompt, {}});
        }
        if (admitted) {
            // Everything before `place` is refused still; after a sealed line opened, begin anew.
            place = seal != nullptr ? waiting_.begin() : waiting_.upper_bound(&request);
            continue;
        }
        // Nobody passes one that was retracted: its client waits in mid-stream, and the pool is overfull.
        if (seal != nullptr || request.retractions > 0 || ++refusals == kMaxRefusalsPerRound) return;
        ++place;
    }
}

std::int32_t Scheduler::first_chunk_tokens(const Round& round, const Request& request, const Prefix& prefix) {
    return static_cast<std::int32_t>(std::min<std::int64_t>(round.budget, request.prefill_len - prefix.tokens));
}

bool Scheduler::try_prompt(Round& round, Request& request) {
    const Prefix prefix = capacity_.probe(request);
    const std::int32_t chunk = first_chunk_tokens(round, request, prefix);
    const std::vector<GroupDemand> demands = capacity_.first_chunk(request, prefix, chunk);
    if (const auto shortfall = capacity_.short_for(demands, resident_count_ == 0)) {
        refuse_prompt(round, request, *shortfall);
        return false;
    }
    count_overtaking(request);
    const bool completes = prefix.tokens + chunk == request.prefill_len;
    transition(request, fsm::SchedulePrefillEvent{.grant = capacity_.admit(prefix, demands),
                                                  .input_len = chunk,
                                                  .completes = completes,
                                                  .cached = prefix.tokens,
                                                  .cached_pages = prefix.pages});
    capacity_.promise(request, demands);
    if (request.retractions == 0) {
        request.cached_tokens = prefix.tokens;
        counters_.prefix_query_tokens += request.prefill_len;
        counters_.prefix_hit_tokens += prefix.tokens;
    }
    if (completes) {
        ++request.samples_scheduled;
    } else {
        round.line_holder = &request;
    }
    request.reason = WaitReason::None;
    round.budget -= chunk;
    round.prefills.push_back({&request, prefix.tokens, chunk, completes, true});
    return true;
}

void Scheduler::refuse_prompt(Round& round, Request& request, const Shortfall& shortfall) {
    request.refusal = Request::Refusal{.group = shortfall.group,
                                       .need = shortfall.need,
                                       .available = shortfall.available,
                                       .publications = capacity_.publications()};
    request.reason = WaitReason::Capacity;
    request.figure = shortfall.blocks();
    refused_.insert(&request);
    round.blocked.push_back({&request, Admission::Prompt, shortfall});
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
