#include "tiles.hpp"

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/linear_tiles.hpp"
#include "pool.hpp"
#include "threads.hpp"

#if defined(TOKENSPEED_X86) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define TOKENSPEED_AMX
#endif

namespace tokenspeed {

using LinearTiles = void (*)(const Weight&, const uint16_t*, int64_t, int64_t, float*, int64_t, int64_t, uint16_t*);

#ifdef TOKENSPEED_AMX
namespace amx {
extern const LinearTiles kLinear;
}
#endif

namespace {

std::atomic<bool> enabled{false};

// The tile unit in plain C++, for tests of everything but the instructions. The unit adds to each sum the products of the
// even halves of a step's pairs and those of the odd ones apart; here they come one after the other.
class Emulated {
public:
    void clear() { memset(sums_, 0, sizeof sums_); }
    void add(const uint8_t* rows, int64_t row_bytes, const uint16_t* inputs) {
        for (int64_t r = 0; r < kTileSide; ++r)
            for (int64_t t = 0; t < kTileSide; ++t)
                for (int64_t column = 0; column < kTileColumns; ++column) {
                    uint16_t half;
                    memcpy(&half, rows + r * row_bytes + 2 * column, 2);
                    sums_[r * kTileSide + t] +=
                        widened(half) * widened(inputs[(column / 2 * kTileSide + t) * 2 + column % 2]);
                }
    }
    void store(float* sums) const { memcpy(sums, sums_, sizeof sums_); }

private:
    static float widened(uint16_t half) {
        const uint32_t bits = static_cast<uint32_t>(half) << 16;
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }
    float sums_[kTileSide * kTileSide];
};

}  // namespace

void enable_amx() {
#ifdef TOKENSPEED_AMX
    constexpr unsigned kBFloat16Tiles = 1u << 22, kTiles = 1u << 24;  // of leaf 7's edx
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & kBFloat16Tiles) == 0 || (edx & kTiles) == 0)
        throw std::runtime_error("this processor has no AMX with bfloat16 tiles");
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0)
        throw std::runtime_error("the system does not let this process use AMX (arch_prctl ARCH_REQ_XCOMP_PERM failed)");
    enabled.store(true);
#else
    throw std::runtime_error("this build has no AMX: it is for x86-64 on Linux");
#endif
}

void run_tiled_linear(const Weight& weight, const float* x, int64_t tokens, float* out, bool emulated) {
    const RoundedProducts* products = kernels().rounded;
    if (products == nullptr || weight.format != WeightFormat::kBFloat16)
        throw std::logic_error(std::string("instruction set ") + kernels().name +
                               " cannot round activations for tiles, or the weight is not bfloat16");
    LinearTiles linear = emulated ? &linear_tiles<Emulated> : nullptr;
#ifdef TOKENSPEED_AMX
    if (!emulated && enabled.load()) linear = amx::kLinear;
#endif
    if (linear == nullptr) throw std::logic_error("AMX was not enabled");
    if (tokens == 0 || weight.rows == 0) return;
    const int64_t stride = products->stride(weight);
    thread_local std::vector<uint16_t> memory;
    std::vector<uint16_t>& rounded = memory;  // on the other threads the name is another vector's
    rounded.resize(static_cast<std::size_t>(tokens * stride));
    products->round_rows(weight, x, tokens, rounded.data());
    const double work = static_cast<double>(weight.rows * weight.columns) * (0.05 + 0.005 * static_cast<double>(tokens));
    over_ranges(weight.rows, kTileSide, threads_for(work), 2, [&](int64_t begin, int64_t end) {
        const int64_t steps = (weight.columns + kTileColumns - 1) / kTileColumns;
        auto* packed = static_cast<uint16_t*>(scratch(steps * kTileHalves * 2));
        linear(weight, rounded.data(), stride, tokens, out, begin, end, packed);
    });
}

}  // namespace tokenspeed
