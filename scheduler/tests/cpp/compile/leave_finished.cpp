// Finished is terminal; an end that comes twice while a forward is out is not an error.
#include "prelude.h"

void leave_finished() {
#ifdef REFUSED
    auto next = apply(AbortEvent{}, made<Finished<Role::Fused>>());
#else
    auto next = apply(AbortEvent{}, made<Finishing<Role::Fused>>());
#endif
    (void)next;
}
