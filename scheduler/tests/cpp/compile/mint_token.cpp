// The proof cannot be made out of thin air.
#include "prelude.h"

void mint_token(ForwardResources&& bundle) {
#ifdef REFUSED
    Released token;
#else
    Released token = std::move(bundle).give_back();
#endif
    Finished<Role::Fused> finished(std::move(token));
    (void)finished;
    (void)bundle;
}
