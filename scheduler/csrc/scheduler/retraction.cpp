// Retraction: when an admission failed for capacity and no prefill progressed, somebody gives way.
//
// Here a victim computes again: it goes back to its place in the line with its output as part of the prompt. So it loses
// no token, and every decode row of whoever got its room is progress for good.
#include <algorithm>

#include "scheduler/scheduler.h"
#include "scheduler/transition.h"

namespace tokenspeed {

using fsm::StateId;

namespace {

// What an order of victims looks at, gathered once a round in which somebody has to give way.
struct Candidate {
    Request* request;
    bool incomplete;      // of its prompt
    bool prepaid;
    bool armed;           // since last round
    std::int64_t size;    // tokens of an incomplete prompt, blocks that a decode would free
    std::int32_t generated;
};

// An incomplete prefill first, the largest; then whoever was left out for this already; then the decode that frees most
// blocks; ties by fewest generated tokens, then the youngest. Prepaid generations come last.
bool gives_way_before(const Candidate& a, const Candidate& b) {
    if (a.prepaid != b.prepaid) return b.prepaid;
    if (a.incomplete != b.incomplete) return a.incomplete;
    if (a.armed != b.armed) return a.armed;
    if (a.size != b.size) return a.size > b.size;
    if (a.generated != b.generated) return a.generated < b.generated;
    return a.request->age > b.request->age;
}

bool all_quiet(const std::vector<Request*>& requests) {
    return std::all_of(requests.begin(), requests.end(),
                       [](const Request* request) { return request->life.bundle()->quiet(); });
}

}  // namespace

void Scheduler::retract_and_grant(Round& round) {
    if (round.blocked.empty() || !round.prefills.empty()) return;
    const std::vector<Request*> ranked = rank_victims(round);
    if (ranked.empty()) return;
    // Those who run come before those who wait for their first chunk.
    std::stable_partition(round.blocked.begin(), round.blocked.end(),
                          [](const Blocked& blocked) { return blocked.what != Admission::Prompt; });
    // The room is for the first that was blocked; if it would have to give way itself, or nobody can make it enough
    // room, for the next.
    for (const Blocked& beneficiary : round.blocked) {
        if (beneficiary.request == ranked.front() || !may_benefit(beneficiary)) continue;
        const std::vector<Request*> victims = beneficiary.what == Admission::Prompt
                                                  ? victims_for_prompt(round, ranked, *beneficiary.request)
                                                  : victims_for_resident(ranked, beneficiary);
        if (victims.empty()) continue;
        if (all_quiet(victims)) {
            hand_over(round, victims, beneficiary);
        } else {
            for (Request* victim : victims) arm(*victim);
        }
        return;
    }
}

// Leaves the victim out of the next batch, so that its results land and it can be retracted.
void Scheduler::arm(Request& victim) {
    victim.armed_in_round = round_;
    if (victim.last_decode_round != round_) victim.reason = WaitReason::Armed;
}

// Evicts and grants in the same round: to the beneficiary first, then to the residents that were blocked. New prompts
// beside it wait: the victims are before them.
void Scheduler::hand_over(Round& round, const std::vector<Request*>& victims, const Blocked& beneficiary) {
    std::vector<Blocked> heirs{beneficiary};
    for (const Blocked& blocked : round.blocked) {
        const bool gone = std::find(victims.begin(), victims.end(), blocked.request) != victims.end();
        if (!gone && blocked.request != beneficiary.request && blocked.what != Admission::Prompt) heirs.push_back(blocked);
    }
    for (Request* victim : victims) {
        if (round.line_holder == victim) round.line_holder = nullptr;
        retract(*victim);
    }
    grant(round, heirs);
}

// A prompt that was retracted itself waits for room and makes nobody give way, and while such a one waits no new prompt
// does either: so retractions cannot chase each other. An overfull pool is left to those who run in it.
bool Scheduler::may_benefit(const Blocked& blocked) const {
    return blocked.what != Admission::Prompt || retracted_waiting_ == 0;
}

std::vector<Request*> Scheduler::rank_victims(const Round& round) const {
    // Prepaid generations are a last resort: only where nothing runs and nothing is out.
    const bool last_resort = round.decodes.empty() && outstanding_.empty();
    std::vector<Candidate> candidates;
    for (Request* request : residents_) {
        if (request == nullptr || request->broken || request->generation_scheduled()) continue;
        if (outgrown(*request)) continue;
        const bool incomplete = request->life.is<StateId::Prefilling>();
        if (!incomplete && request->prepaid && !last_resort) continue;
        const fsm::ForwardResources& bundle = *request->life.bundle();
        const std::int64_t frees = capacity_.cache(0).sole_blocks(bundle.row());
        candidates.push_back({.request = request,
                              .incomplete = incomplete,
                              .prepaid = !incomplete && request->prepaid,
                              .armed = out_of_turn(*request),
                              .size = incomplete ? bundle.progress().scheduled : frees,
                              .generated = request->generated()});
    }
    std::sort(candidates.begin(), candidates.end(), gives_way_before);
    std::vector<Request*> ranked;
    ranked.reserve(candidates.size());
    for (const Candidate& candidate : candidates) ranked.push_back(candidate.request);
    return ranked;
}

// The fewest victims, in their order, whose blocks are enough for a resident's next step; none where all together would
// not do.
std::vector<Request*> Scheduler::victims_for_resident(const std::vector<Request*>& ranked,
                                                      const Blocked& beneficiary) const {
    std::int64_t missing = beneficiary.shortfall.blocks();
    std::vector<Request*> victims;
    for (Request* victim : ranked) {
        if (missing <= 0) break;
        if (victim == beneficiary.request) continue;
        missing -= capacity_.cache(beneficiary.shortfall.group).sole_blocks(victim->life.bundle()->row());
        victims.push_back(victim);
    }
    return missing <= 0 ? victims : std::vector<Request*>{};
}

// The same for a first chunk, which must fit beside what is promised to others: a promise taken back is room too, and a
// hit that the victim alone holds is not. Only who stands behind the prompt in the line gives way, of lower priority or
// younger: else a stream of new prompts would make the oldest compute again and again.
std::vector<Request*> Scheduler::victims_for_prompt(const Round& round, const std::vector<Request*>& ranked,
                                                    Request& prompt) const {
    const Prefix prefix = capacity_.probe(prompt);
    const std::optional<Shortfall> shortfall =
        capacity_.short_for(capacity_.first_chunk(prompt, prefix, first_chunk_tokens(round, prompt, prefix)), false);
    if (!shortfall) return {};
    const cache::GroupCache& cache = capacity_.cache(shortfall->group);
    const std::vector<cache::BlockId>& hits = prefix.hits[shortfall->group];
    std::int64_t missing = shortfall->blocks();
    std::vector<Request*> victims;
    for (Request* victim : ranked) {
        if (missing <= 0) break;
        if (!LineOrder{}(&prompt, victim)) continue;
        const std::int32_t row = victim->life.bundle()->row();
        missing += std::count_if(hits.begin(), hits.end(),
                                 [&](cache::BlockId id) { return cache.held_by_alone(row, id); });
        missing -= cache.sole_blocks(row) + victim->reserves[shortfall->group].outstanding;
        victims.push_back(victim);
    }
    return missing <= 0 ? victims : std::vector<Request*>{};
}

void Scheduler::retract(Request& request) {
    ++request.retractions;
    ++counters_.retractions;
    transition(request, fsm::RetractEvent{});
}

void Scheduler::grant(Round& round, const std::vector<Blocked>& blocked) {
    for (const Blocked& one : blocked) {
        if (round.budget == 0) return;
        if (one.what == Admission::Decode) {
            if (config_.mixed_batches || round.prefills.empty()) try_decode(round, *one.request);
            continue;
        }
        // A prefill that may not join this round's decodes is first in the next round anyway.
        if (!config_.mixed_batches && !round.decodes.empty()) continue;
        if (one.what == Admission::Chunk) {
            if (!try_chunk(round, *one.request)) return;
            if (one.request->life.is<StateId::Prefilling>()) return;
        } else if (round.line_holder == nullptr && capacity_.rows().free() > 0) {
            try_prompt(round, *one.request);
        }
    }
}

}  // namespace tokenspeed
