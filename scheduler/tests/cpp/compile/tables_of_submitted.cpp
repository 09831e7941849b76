// Only a state that owns a bundle has tables.
#include "prelude.h"

void tables_of_submitted() {
#ifdef REFUSED
    auto state = made<Submitted<Role::Fused>>();
#else
    auto state = made<Prefilling<Role::Fused>>();
#endif
    (void)state.resources().tables();
}
