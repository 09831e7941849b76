// What Python hands over: addresses as numbers. Who calls vouches for what lies there.
#pragma once

#include <cstdint>

namespace tokenspeed {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace tokenspeed
