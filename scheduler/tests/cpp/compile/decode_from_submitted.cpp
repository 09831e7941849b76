// A decode can be scheduled from PrefillDone, PrefillAwaitingResult and Decoding only.
#include "prelude.h"

void decode_from_submitted() {
#ifdef REFUSED
    auto next = apply(ScheduleDecodeEvent{}, made<Submitted<Role::Fused>>());
#else
    auto next = apply(ScheduleDecodeEvent{}, made<PrefillDone<Role::Fused>>());
#endif
    (void)next;
}
