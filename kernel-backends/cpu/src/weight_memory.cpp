#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>

#include "packing.hpp"
#include "pool.hpp"

namespace tokenspeed {

namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kStretch = int64_t{64} << 20;

int64_t rounded_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

// Memory that takes weights one after the other. What was never touched is not resident.
class Stretch {
public:
    explicit Stretch(int64_t bytes) : size_(rounded_up(bytes, kHugePage)), mapped_(size_ + kHugePage) {
        base_ = mmap(nullptr, static_cast<std::size_t>(mapped_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base_ == MAP_FAILED) throw std::bad_alloc();
        const auto address = reinterpret_cast<std::uintptr_t>(base_);
        start_ = reinterpret_cast<uint8_t*>((address + kHugePage - 1) / kHugePage * kHugePage);
#ifdef MADV_HUGEPAGE
        madvise(start_, static_cast<std::size_t>(size_), MADV_HUGEPAGE);  // small pages do the same, more slowly
#endif
    }
    ~Stretch() { munmap(base_, static_cast<std::size_t>(mapped_)); }
    Stretch(const Stretch&) = delete;
    Stretch& operator=(const Stretch&) = delete;

    // The next `bytes`, a multiple of 64; null where they are not left.
    uint8_t* take(int64_t bytes) {
        if (size_ - used_ < bytes) return nullptr;
        used_ += bytes;
        return start_ + used_ - bytes;
    }

private:
    int64_t size_;
    int64_t mapped_;
    int64_t used_ = 0;
    void* base_;
    uint8_t* start_;
};

std::mutex lock;
std::shared_ptr<Stretch> present;

}  // namespace

std::shared_ptr<uint8_t> weight_memory(int64_t bytes) {
    const std::lock_guard<std::mutex> guard(lock);
    const int64_t wanted = rounded_up(std::max<int64_t>(bytes, 1), 64);
    uint8_t* place = present ? present->take(wanted) : nullptr;
    if (place == nullptr) {
        present = std::make_shared<Stretch>(std::max(wanted, kStretch));
        place = present->take(wanted);
    }
    return {present, place};
}

int64_t release_mapped(const uint8_t* data, int64_t bytes) {
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
    const auto end = (reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(bytes)) / page * page;
    int64_t released = 0;
    std::FILE* maps = std::fopen("/proc/self/maps", "r");
    if (maps == nullptr) return 0;  // another system: the pages stay
    char line[4400];                // longer than a path may be
    while (std::fgets(line, sizeof line, maps) != nullptr) {
        unsigned long first = 0, behind = 0;
        char flags[5] = "";
        if (std::sscanf(line, "%lx-%lx %4s", &first, &behind, flags) != 3 || flags[3] != 's') continue;
        const auto from = std::max<std::uintptr_t>(first, begin), to = std::min<std::uintptr_t>(behind, end);
        if (from < to && madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED) == 0)
            released += static_cast<int64_t>(to - from);
    }
    std::fclose(maps);
    return released;
}

uint64_t read_all(const uint8_t* data, int64_t bytes) {
    const int64_t pieces = std::max(1, thread_limit()) * 2;
    const int64_t lines = bytes / 64;
    std::atomic<uint64_t> total{0};
    parallel_for(pieces, thread_limit(), [&](int64_t piece) {
        uint64_t sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        for (int64_t line = lines * piece / pieces; line < lines * (piece + 1) / pieces; ++line) {
            uint64_t words[8];
            std::memcpy(words, data + 64 * line, sizeof words);
            for (int i = 0; i < 8; ++i) sums[i] += words[i];
        }
        uint64_t sum = 0;
        for (uint64_t part : sums) sum += part;
        total.fetch_add(sum, std::memory_order_relaxed);
    });
    return total.load();
}

}  // namespace tokenspeed
