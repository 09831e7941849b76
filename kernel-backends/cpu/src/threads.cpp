#include "threads.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "pool.hpp"

namespace tokenspeed {

namespace portable {
extern const KernelTable kTable;
}
#ifdef TOKENSPEED_X86
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
namespace avx512_bf16 {
extern const RoundedProducts kProducts;
}
#endif

namespace {

#ifdef TOKENSPEED_X86
// The kernels of avx512, and the products that AVX-512 BF16 adds to them.
const KernelTable& avx512_bf16_table() {
    static const KernelTable table = [] {
        KernelTable extended = avx512::kTable;
        extended.name = "avx512_bf16";
        extended.rounded = &avx512_bf16::kProducts;
        return extended;
    }();
    return table;
}
#endif

// The named table, or null where this build or this machine lacks it.
const KernelTable* find(const char* name) {
    if (std::strcmp(name, "portable") == 0) return &portable::kTable;
#ifdef TOKENSPEED_X86
    __builtin_cpu_init();
    const bool avx2_works = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (std::strcmp(name, "avx2") == 0 && avx2_works) return &avx2::kTable;
    const bool avx512_works = avx2_works && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (std::strcmp(name, "avx512") == 0 && avx512_works) return &avx512::kTable;
    const bool bf16_works = avx512_works && __builtin_cpu_supports("avx512bf16");
    if (std::strcmp(name, "avx512_bf16") == 0 && bf16_works) return &avx512_bf16_table();
#endif
    return nullptr;
}

const KernelTable* best() {
    for (const char* name : {"avx512_bf16", "avx512", "avx2"})
        if (const KernelTable* table = find(name)) return table;
    return &portable::kTable;
}

std::atomic<const KernelTable*> chosen{best()};

// Handing pieces to another thread costs about a microsecond, more where it has to be woken.
constexpr double kParallelWork = 12'000;

}  // namespace

const KernelTable& kernels() { return *chosen.load(std::memory_order_relaxed); }

bool has_instruction_set(const char* name) { return find(name) != nullptr; }

bool choose_instruction_set(const char* name) {
    const KernelTable* table = find(name);
    if (table) chosen.store(table);
    return table != nullptr;
}

int threads_for(double work) {
    if (work < kParallelWork) return 1;
    return static_cast<int>(std::clamp(work / (kParallelWork / 2), 1.0, static_cast<double>(thread_limit())));
}

void* scratch(int64_t bytes) {
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    thread_local std::unique_ptr<void, Free> memory;
    thread_local int64_t size = 0;
    if (bytes > size) {
        memory.reset();
        size = 0;
        const int64_t rounded = (bytes + 4095) / 4096 * 4096;
        memory.reset(std::aligned_alloc(64, static_cast<std::size_t>(rounded)));
        if (!memory) throw std::bad_alloc();
        size = rounded;
    }
    return memory.get();
}

}  // namespace tokenspeed
