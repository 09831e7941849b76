// Giving a bundle back returns the token that its next state needs.
#include "prelude.h"

void discard_give_back(ForwardResources&& bundle) {
#ifdef REFUSED
    std::move(bundle).give_back();
#else
    Finished<Role::Fused> finished(std::move(bundle).give_back());
    (void)finished;
#endif
}
