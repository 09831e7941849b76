// Products in 8 bits compiled for one instruction set; CMakeLists.txt gives this file its flags.
#define TOKENSPEED_ISA int8_avx512

#include "simd/int8_avx512_bw.hpp"
#include "kernels/linear_int8.hpp"
