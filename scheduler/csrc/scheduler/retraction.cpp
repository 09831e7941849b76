// Retraction: when an admission failed for capacity and no prefill progressed, somebody gives way.
#include <algorithm>

#include "scheduler/scheduler.h"
#include "scheduler/transition.h"

namespace tokenspeed {

using fsm::StateId;

namespace {

bool all_quiet(const std::vector<Request*>& requests) {
    return std::all_of(requests.begin(), requests.end(),
                       [](const Request* request) { return request->life.bundle()->quiet(); });
}

}  // namespace

void Scheduler::retract_and_grant(Round& round) {
    if (round.blocked.empty() || !round.prefills.empty()) return;
    const std::vector<Request*> ranked = rank_victims(round);
    // Those who run come before those who wait for their first chunk.
    std::stable_partition(round.blocked.begin(), round.blocked.end(),
                          [](const Blocked& blocked) { return blocked.what != Step::Prompt; });
    // The room is for the first that was blocked; if it would have to give way itself, or nobody can make it enough
    // room, for the next.
    for (const Blocked& beneficiary : round.blocked) {
        if (ranked.empty() || beneficiary.request == ranked.front() || !may_benefit(beneficiary)) continue;
        const std::vector<Request*> victims = beneficiary.what == Step::Prompt
                                                  ? victims_for_prompt(round, ranked, *beneficiary.request)
                                                  : victims_for_resident(ranked, beneficiary);
        if (victims.empty()) continue;
        if (all_quiet(victims)) {
            hand_over(round, victims, beneficiary);
        } else {
            for (Request* victim : victims) arm(*victim, *beneficiary.request);
        }
        return;
    }
}

// Who is alone with the pool and blocked all the same has its blocks strewn over parents that other groups cannot have
// beside them. It gives them all back and takes them anew, close together, as the bound of one request promises.
void Scheduler::compact(Round& round) {
    if (!outstanding_.empty()) return;
    if (counters_.states[fsm::index_of(StateId::Finishing)] > 0) return;
    const auto found = std::find_if(round.blocked.begin(), round.blocked.end(),
                                    [](const Blocked& blocked) { return blocked.what != Step::Prompt; });
    if (found == round.blocked.end()) return;
    Request& request = *found->request;
    if (resident_count_ > 1) {
        // In the other roles somebody gave way already, or a copy is out. In the prefill role nobody does before no peer is
        // left that could make room.
        if (config_.role != fsm::Role::Prefill || !pending_.empty()) return;
        const auto youngest = std::find_if(residents_.rbegin(), residents_.rend(), [](const Request* resident) {
            return resident != nullptr && resident->life.is<StateId::Prefilling>();
        });
        if (youngest == residents_.rend() || *youngest == &request) return;
        retract(round, **youngest, request);
        try_chunk(round, request);
        return;
    }
    retract(round, request, request);
    if (round.line_holder == &request) round.line_holder = nullptr;
    if (!request.life.is<StateId::Submitted>()) return;  // its image is on the way
    if (config_.role == fsm::Role::Decode) {
        try_remote(round, request);
    } else {
        try_prompt(round, request);
    }
}

// Leaves the victim out of the next batch, so that its results land and it can be retracted.
void Scheduler::arm(Request& victim, const Request& beneficiary) {
    victim.armed_in_round = round_;
    if (victim.last_decode_round == round_) return;
    victim.reason = WaitReason::Armed;
    victim.figure = beneficiary.handle;
}

// Evicts and grants in the same round: to the beneficiary first, then to the residents that were blocked. New prompts
// beside it wait: the victims are before them.
void Scheduler::hand_over(Round& round, const std::vector<Request*>& victims, const Blocked& beneficiary) {
    std::vector<Blocked> heirs{beneficiary};
    for (const Blocked& blocked : round.blocked) {
        const bool gone = std::find(victims.begin(), victims.end(), blocked.request) != victims.end();
        if (!gone && blocked.request != beneficiary.request && blocked.what != Step::Prompt) heirs.push_back(blocked);
    }
    for (Request* victim : victims) {
        if (round.line_holder == victim) round.line_holder = nullptr;
        retract(round, *victim, *beneficiary.request);
    }
    grant(round, heirs);
}

// A prompt that was retracted itself waits for room and makes nobody give way, and while such a one waits no new prompt
// does either: so retractions cannot chase each other. An overfull pool is left to those who run in it.
bool Scheduler::may_benefit(const Blocked& blocked) const {
    return blocked.what != Step::Prompt || retracted_waiting_ == 0;
}

std::vector<Request*> Scheduler::rank_victims(const Round& round) const {
    // Prepaid generations are a last resort: only where nothing runs and nothing is out.
    const bool last_resort = round.decodes.empty() && outstanding_.empty();
    std::vector<std::pair<VictimView, Request*>> candidates;
    for (Request* request : residents_) {
        if (request == nullptr || request->broken || request->generation_scheduled()) continue;
        const bool incomplete = request->life.is<StateId::Prefilling>();
        // Not one that is being restored, or that a peer writes.
        if (!incomplete && !request->life.is<StateId::PrefillDone>() && !request->life.is<StateId::Decoding>()) continue;
        if (outgrown(*request)) continue;
        if (!incomplete && request->prepaid && !last_resort) continue;
        const fsm::ForwardResources& bundle = *request->life.bundle();
        const std::int64_t frees = capacity_.device().sole_weight(bundle.row());
        candidates.push_back({{.incomplete = incomplete,
                               .prepaid = !incomplete && request->prepaid,
                               .armed = out_of_turn(*request),
                               .size = incomplete ? bundle.progress().scheduled : frees,
                               .generated = request->generated(),
                               .age = request->age},
                              request});
    }
    std::sort(candidates.begin(), candidates.end(),
              [](const auto& a, const auto& b) { return gives_way_before(a.first, b.first); });
    std::vector<Request*> ranked;
    ranked.reserve(candidates.size());
    for (const auto& [view, request] : candidates) ranked.push_back(request);
    return ranked;
}

// The fewest victims, in their order, whose blocks are enough for a resident's next step; none where all together would
// not do.
std::vector<Request*> Scheduler::victims_for_resident(const std::vector<Request*>& ranked,
                                                      const Blocked& beneficiary) const {
    std::int64_t missing = beneficiary.shortfall.weight;
    std::vector<Request*> victims;
    for (Request* victim : ranked) {
        if (missing <= 0) break;
        if (victim == beneficiary.request) continue;
        missing -= capacity_.device().sole_weight(victim->life.bundle()->row());
        victims.push_back(victim);
    }
    return missing <= 0 ? victims : std::vector<Request*>{};
}

// The same for a first chunk, which must fit beside what is promised to others: a promise taken back is room too, and a
// hit that the victim alone holds is not. Only who stands behind the prompt in the line gives way, of lower priority or
// younger: else a stream of new prompts would make the oldest compute again and again.
std::vector<Request*> Scheduler::victims_for_prompt(const Round& round, const std::vector<Request*>& ranked,
                                                    Request& prompt) const {
    const Prefix prefix =
        config_.role == fsm::Role::Decode ? capacity_.remote_prefix(prompt) : capacity_.probe(prompt);
    const std::int32_t chunk = config_.role == fsm::Role::Decode
                                   ? prompt.prefill_len - prefix.tokens
                                   : chunk_for(round, prompt, prefix.tokens, prefix.junction);
    const std::optional<Shortfall> shortfall = capacity_.short_for(capacity_.first_chunk(prompt, prefix, chunk), false);
    if (!shortfall) return {};
    std::int64_t missing = shortfall->weight;
    std::vector<Request*> victims;
    for (Request* victim : ranked) {
        if (missing <= 0) break;
        if (!LineOrder{}(&prompt, victim)) continue;
        missing += shared_with(prefix, *victim);
        missing -= capacity_.device().sole_weight(victim->life.bundle()->row());
        for (std::size_t group = 0; group < victim->reserves.size(); ++group) {
            missing -= victim->reserves[group].outstanding * capacity_.device().weight(static_cast<int>(group));
        }
        victims.push_back(victim);
    }
    return missing <= 0 ? victims : std::vector<Request*>{};
}

// The weight of the blocks of a hit that this resident alone holds.
std::int64_t Scheduler::shared_with(const Prefix& prefix, const Request& resident) const {
    const cache::Tier& device = capacity_.device();
    const std::int32_t row = resident.life.bundle()->row();
    std::int64_t weight = 0;
    for (std::size_t group = 0; group < prefix.groups.size(); ++group) {
        const int index = static_cast<int>(group);
        for (const Source& source : prefix.groups[group].blocks) {
            if (source.device != cache::kNullBlock && device.held_by_alone(index, row, source.device)) {
                weight += device.weight(index);
            }
        }
    }
    return weight;
}

void Scheduler::grant(Round& round, const std::vector<Blocked>& blocked) {
    for (const Blocked& one : blocked) {
        if (round.budget == 0) return;
        if (one.what == Step::Decode) {
            if (config_.mixed_batches || round.prefills.empty()) try_decode(round, *one.request);
            continue;
        }
        // A prefill that may not join this round's decodes is first in the next round anyway.
        if (!config_.mixed_batches && !round.decodes.empty()) continue;
        if (one.what == Step::Chunk) {
            if (!try_chunk(round, *one.request)) return;
            if (round.line_holder != nullptr) return;
        } else if (round.line_holder == nullptr && round.sealed_by == nullptr && capacity_.rows().free() > 0) {
            if (config_.role == fsm::Role::Decode) {
                try_remote(round, *one.request);
            } else {
                try_prompt(round, *one.request);
            }
        }
    }
}

}  // namespace tokenspeed
