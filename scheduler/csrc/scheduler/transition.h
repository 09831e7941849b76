// Scheduler::transition: the one place where a request changes its state, and the books change with it.
#pragma once

#include <algorithm>

#include "scheduler/scheduler.h"

namespace tokenspeed {

template <typename EventType>
void Scheduler::transition(Request& request, EventType event) {
    const fsm::StateId before = request.life.id();
    // The order of re-admission reads what a transition changes, so the request leaves its lists first.
    if (before == fsm::StateId::Retracted) retracted_.erase(&request);
    const fsm::StateId after = request.life.dispatch(std::move(event), request.handle);
    if (before == after) return;
    --counters_.states[fsm::index_of(before)];
    ++counters_.states[fsm::index_of(after)];
    ++counters_.flows[fsm::index_of(before)][fsm::index_of(after)];
    request.timeline.add({after, round_, time_});
    leave(request, before);
    if (is_resident(before) && !is_resident(after)) {
        capacity_.forgive(request);
        // Whoever walks the residents now goes on undisturbed; plan() closes the gap.
        std::replace(residents_.begin(), residents_.end(), &request, static_cast<Request*>(nullptr));
        --resident_count_;
    }
    if (!is_resident(before) && is_resident(after)) {
        residents_.push_back(&request);
        ++resident_count_;
    }
    enter(request, after);
    if (after == fsm::StateId::Finished) erase(request);
}

}  // namespace tokenspeed
