#include "pool.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace tokenspeed {

namespace {

// Longer than the serial work between two kernels of a step, shorter than what another process would miss.
constexpr auto kIdleSpin = std::chrono::microseconds(60);

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits until `ready` says so: spinning for `limit`, then giving the core away between looks. False at the limit, where
// `yield` is false.
template <class Ready>
bool spin_until(const Ready& ready, std::chrono::steady_clock::duration limit, bool yield) {
    const auto begin = std::chrono::steady_clock::now();
    for (;;) {
        for (int i = 0; i < 64; ++i) {
            if (ready()) return true;
            pause();
        }
        if (std::chrono::steady_clock::now() - begin < limit) continue;
        if (!yield) return false;
        std::this_thread::yield();
    }
}

// One job at a time. A job is open while pieces are left to claim; a claim is one compare-and-swap of the word that holds
// both the job's number and what is left of it, so a late thread can claim a piece of the present job or none. The fields
// of a job cannot change under a claimed piece, because its caller waits for every piece.
class Pool {
public:
    void run(int64_t count, int threads, Piece piece, const void* context) {
        std::unique_lock<std::mutex> lock(busy_, std::defer_lock);
        threads = static_cast<int>(std::min<int64_t>({threads, count, kMostThreads}));
        if (threads <= 1 || inside_ || !lock.try_lock()) {
            for (int64_t i = 0; i < count; ++i) piece(context, i);
            return;
        }
        start(threads - 1);
        piece_ = piece;
        context_ = context;
        count_ = count;
        helpers_.store(threads - 1, std::memory_order_relaxed);
        unfinished_.store(count, std::memory_order_relaxed);
        const uint64_t number = (state_.load(std::memory_order_relaxed) >> kLeftBits) + 1;
        state_.store(number << kLeftBits | static_cast<uint64_t>(count), std::memory_order_release);
        number_.store(static_cast<uint32_t>(number), std::memory_order_seq_cst);
        number_.notify_all();
        work();
        spin_until([&] { return unfinished_.load(std::memory_order_acquire) == 0; }, kIdleSpin, true);
    }

    void place(const std::vector<int>& cpus) {
        const std::lock_guard<std::mutex> lock(busy_);
        places_ = cpus;
        for (std::size_t rank = 0; rank < threads_.size(); ++rank) move(rank);
    }

private:
    static constexpr int kLeftBits = 32;
    static constexpr int kMostThreads = 256;

    // Where the system gives no more threads, those there are, or the caller alone, do the work.
    void start(int helpers) {
        try {
            for (int rank = static_cast<int>(threads_.size()); rank < helpers; ++rank) {
                std::thread thread([this, rank] { help(rank); });
                threads_.push_back(thread.native_handle());
                thread.detach();
                move(static_cast<std::size_t>(rank));
            }
        } catch (const std::system_error&) {
        }
    }

    // Puts a thread where it belongs. It inherited its starter's places, which may be fewer than the pool's.
    void move([[maybe_unused]] std::size_t rank) {
#if defined(__linux__)
        if (places_.empty()) return;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(static_cast<std::size_t>(places_[rank % places_.size()]), &set);
        pthread_setaffinity_np(threads_[rank], sizeof set, &set);
#endif
    }

    // Claims and runs pieces of the present job until none is left.
    void work() {
        inside_ = true;
        uint64_t state = state_.load(std::memory_order_acquire);
        for (;;) {
            const auto left = static_cast<uint32_t>(state);
            if (left == 0) break;
            if (!state_.compare_exchange_weak(state, state - 1, std::memory_order_acq_rel, std::memory_order_acquire))
                continue;
            piece_(context_, count_ - left);
            unfinished_.fetch_sub(1, std::memory_order_release);
            state = state_.load(std::memory_order_acquire);
        }
        inside_ = false;
    }

    void help(int rank) {
        uint32_t seen = 0;
        for (;;) {
            const auto changed = [&] { return number_.load(std::memory_order_acquire) != seen; };
            if (!spin_until(changed, kIdleSpin, false)) number_.wait(seen, std::memory_order_acquire);
            seen = number_.load(std::memory_order_acquire);
            if (rank < helpers_.load(std::memory_order_relaxed)) work();
        }
    }

    std::mutex busy_;
    std::vector<std::thread::native_handle_type> threads_;
    std::vector<int> places_;
    Piece piece_ = nullptr;
    const void* context_ = nullptr;
    int64_t count_ = 0;
    // Each on a line of its own: threads poll one while others write the next.
    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<int64_t> unfinished_{0};
    alignas(64) std::atomic<int> helpers_{0};
    alignas(64) std::atomic<uint32_t> number_{0};
    static thread_local bool inside_;
};

thread_local bool Pool::inside_ = false;

// Never destroyed: its threads are detached and end with the process.
Pool& pool() {
    static Pool* const instance = new Pool;
    return *instance;
}

std::atomic<int> limit{static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))};

}  // namespace

void set_thread_limit(int count) { limit.store(std::max(1, count)); }

int thread_limit() { return limit.load(std::memory_order_relaxed); }

void set_thread_places(const std::vector<int>& cpus) { pool().place(cpus); }

void run_pieces(int64_t count, int threads, Piece piece, const void* context) {
    if (count <= 0) return;
    pool().run(count, threads, piece, context);
}

}  // namespace tokenspeed
