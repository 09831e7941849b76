// The products that AVX-512 BF16 adds to the kernels of avx512; CMakeLists.txt gives this file its flags.
#include "simd/avx512_bf16.hpp"

#define TOKENSPEED_ISA avx512_bf16

#include "kernels/math.hpp"
#include "kernels/linear_rounded.hpp"
#include "kernels/key_tiles.hpp"
#include "kernels/attention_rounded.hpp"
#include "kernels/attention_expanded_rounded.hpp"

namespace tokenspeed::avx512_bf16 {

extern const RoundedProducts kProducts;
const RoundedProducts kProducts = {rounded_stride, round_rows, linear_rounded};

extern decltype(KernelTable::attend_rounded) const kAttend;
decltype(KernelTable::attend_rounded) const kAttend = attend_rounded;

extern const RoundedExpansion kExpansion;
const RoundedExpansion kExpansion = {turned_halves, row_halves, whole_vectors, round_query, turn_expanded, attend_turned};

}  // namespace tokenspeed::avx512_bf16
