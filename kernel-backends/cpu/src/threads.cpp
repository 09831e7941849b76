#include "threads.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "panels.hpp"
#include "pool.hpp"

namespace tokenspeed {

namespace portable {
extern const KernelTable kTable;
}
namespace int8_portable {
extern const Int8Products kProducts;
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
extern decltype(KernelTable::attend_rounded) const kAttend;
extern const RoundedExpansion kExpansion;
}
namespace int8_avx2 {
extern const Int8Products kProducts;
}
namespace int8_avx512 {
extern const Int8Products kProducts;
}
namespace int8_avx512_vnni {
extern const Int8Products kProducts;
}
#endif

namespace {

// A set's kernels with the products that are compiled apart, under the set's name.
KernelTable composed(const KernelTable& kernels, const char* name, const Int8Products& int8,
                     const RoundedProducts* rounded = nullptr,
                     decltype(KernelTable::attend_rounded) attend_rounded = nullptr,
                     const RoundedExpansion* rounded_expansion = nullptr) {
    KernelTable table = kernels;
    table.name = name;
    table.rounded = rounded;
    table.attend_rounded = attend_rounded;
    table.rounded_expansion = rounded_expansion;
    table.int8 = &int8;
    return table;
}

// The named table, or null where this build or this machine lacks it.
const KernelTable* find(const char* name) {
    static const KernelTable plain = composed(portable::kTable, "portable", int8_portable::kProducts);
    if (std::strcmp(name, plain.name) == 0) return &plain;
#ifdef TOKENSPEED_X86
    static const KernelTable sets[] = {
        composed(avx2::kTable, "avx2", int8_avx2::kProducts),
        composed(avx512::kTable, "avx512", int8_avx512::kProducts),
        composed(avx512::kTable, "avx512_vnni", int8_avx512_vnni::kProducts),
        composed(avx512::kTable, "avx512_bf16", int8_avx512_vnni::kProducts, &avx512_bf16::kProducts, avx512_bf16::kAttend,
                 &avx512_bf16::kExpansion),
    };
    __builtin_cpu_init();
    // Each set needs what those before it need.
    const bool avx2_works = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512_works = avx2_works && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool vnni_works = avx512_works && __builtin_cpu_supports("avx512vnni");
    const bool works[] = {avx2_works, avx512_works, vnni_works, vnni_works && __builtin_cpu_supports("avx512bf16")};
    for (int i = 0; i < 4; ++i)
        if (works[i] && std::strcmp(name, sets[i].name) == 0) return &sets[i];
#endif
    return nullptr;
}

const KernelTable* best() {
    for (const char* name : {"avx512_bf16", "avx512_vnni", "avx512", "avx2"})
        if (const KernelTable* table = find(name)) return table;
    return find("portable");
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
