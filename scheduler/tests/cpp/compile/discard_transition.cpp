// The result of a transition owns what the state owned: it must be kept.
#include "prelude.h"

void discard_transition(Decoding<Role::Fused>&& state) {
#ifdef REFUSED
    apply(AbortEvent{}, std::move(state));
#else
    auto next = apply(AbortEvent{}, std::move(state));
    (void)next;
#endif
}
