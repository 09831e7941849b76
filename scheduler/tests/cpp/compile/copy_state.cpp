// A state that owns a bundle can be moved, not copied.
#include "prelude.h"

void copy_state(Decoding<Role::Fused>&& state) {
#ifdef REFUSED
    Decoding<Role::Fused> second = state;
#else
    Decoding<Role::Fused> second = std::move(state);
#endif
    (void)second;
}
