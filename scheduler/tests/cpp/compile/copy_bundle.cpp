// A device bundle can be moved, not copied.
#include "prelude.h"

void copy_bundle(ForwardResources&& bundle) {
#ifdef REFUSED
    ForwardResources second = bundle;
#else
    ForwardResources second = std::move(bundle);
#endif
    (void)second;
}
