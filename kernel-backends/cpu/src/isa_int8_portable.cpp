// Products in 8 bits compiled for one instruction set; CMakeLists.txt gives this file its flags.
#define TOKENSPEED_ISA int8_portable

#include "simd/int8_portable.hpp"
#include "kernels/linear_int8.hpp"
