// A state is left by a transition, so it must be given away.
#include "prelude.h"

void apply_to_state_that_stays(Decoding<Role::Fused>& state) {
#ifdef REFUSED
    auto next = apply(ScheduleDecodeEvent{}, state);
#else
    auto next = apply(ScheduleDecodeEvent{}, std::move(state));
#endif
    (void)next;
}
