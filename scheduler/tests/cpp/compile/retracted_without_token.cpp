// Retracted needs the proof that not one device block is left, beside the image.
#include "prelude.h"

void retracted_without_token(ForwardResources&& bundle, HostImage&& image) {
#ifdef REFUSED
    Retracted<Role::Fused> retracted(std::move(image), StateId::Decoding, 1);
#else
    Retracted<Role::Fused> retracted(std::move(bundle).give_back(), std::move(image), StateId::Decoding, 1);
#endif
    (void)retracted;
    (void)bundle;
}
