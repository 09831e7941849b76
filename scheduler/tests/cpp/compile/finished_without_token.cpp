// Finished needs the proof that the bundle was given back.
#include "prelude.h"

void finished_without_token(ForwardResources&& bundle) {
#ifdef REFUSED
    Finished<Role::Fused> finished;
#else
    Finished<Role::Fused> finished(std::move(bundle).give_back());
#endif
    (void)finished;
    (void)bundle;
}
