// The threads that kernels are spread over.
//
// Not OpenMP's, for one property: the caller never waits for a thread that has not begun. It works on the pieces itself
// and is done when they are, so a core that is taken by another process slows a kernel down by its share and no more,
// where a barrier would wait for the scheduler's next slice, hundreds of times a step. And idle threads spin only as long
// as the gap between two kernels of one step, then sleep.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tokenspeed {

// The most threads a kernel uses, the caller's own included; at least 1. Threads start when they are first needed.
void set_thread_limit(int count);
int thread_limit();

// Has the threads that the pool starts, or started, run on these CPUs, the first on the first and so on, round and round; with
// none, and where a CPU is not this process's, they are left to the system. The caller's own thread is not moved. Linux only.
void set_thread_places(const std::vector<int>& cpus);

// A piece of work: which one, of a count the caller knows.
using Piece = void (*)(const void* context, int64_t index);

// Runs piece(context, 0 … count - 1), each once, in any order, on up to `threads` threads, and returns when all are done.
// Pieces must not throw. A call from within a piece, or beside another thread's, runs alone on its caller's thread.
void run_pieces(int64_t count, int threads, Piece piece, const void* context);

template <class Body>
void parallel_for(int64_t count, int threads, const Body& body) {
    run_pieces(
        count, threads, [](const void* context, int64_t index) { (*static_cast<const Body*>(context))(index); }, &body);
}

// Runs body(begin, end) over [0, count) in pieces of a multiple of `grain`, on `threads` threads; pieces per thread are
// several, because cores are shared with other work and a late one must not hold the others for long.
template <class Body>
void over_ranges(int64_t count, int64_t grain, int threads, int64_t pieces_each, const Body& body) {
    if (threads <= 1) {
        if (count > 0) body(int64_t{0}, count);
        return;
    }
    const int64_t grains = (count + grain - 1) / grain;
    const int64_t piece = std::max<int64_t>(1, grains / (threads * pieces_each)) * grain;
    const int64_t pieces = (count + piece - 1) / piece;
    parallel_for(pieces, threads, [&](int64_t i) { body(i * piece, std::min(count, (i + 1) * piece)); });
}

}  // namespace tokenspeed
