// The kernels compiled for one instruction set; CMakeLists.txt gives this file its flags.
#include "simd/portable.hpp"

#define TOKENSPEED_ISA portable
#define TOKENSPEED_ISA_NAME "portable"

#include "kernels/math.hpp"
#include "kernels/k_quants.hpp"
#include "kernels/five_bits.hpp"
#include "kernels/small_floats.hpp"
#include "kernels/linear.hpp"
#include "kernels/elementwise.hpp"
#include "kernels/recurrent.hpp"
#include "kernels/prologue.hpp"
#include "kernels/key_tiles.hpp"
#include "kernels/attention.hpp"
#include "kernels/attention_expanded.hpp"
#include "kernels/index.hpp"
#include "kernels/fill_table.hpp"
