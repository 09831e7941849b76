// A fused deployment has no peer, hence none of the peer's states.
#include "prelude.h"

#ifdef REFUSED
using Remote = RemotePrefilling<Role::Fused>;
#else
using Remote = RemotePrefilling<Role::Decode>;
#endif

void peer_state_in_fused_role(ForwardResources&& bundle) {
    Remote remote(std::move(bundle));
    (void)remote;
}
