// Which kernels run, on how many threads, and with what scratch. The drivers in drivers.hpp build on this.
#pragma once

#include <cstdint>

#include "table.hpp"

namespace tokenspeed {

// The kernels in force: the best instruction set of this machine until `choose_instruction_set` says otherwise.
const KernelTable& kernels();

// Puts the named set ("avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable") in force for the whole process. Returns false, and changes nothing,
// where this build or this machine lacks it. Not to be called while kernels run.
bool choose_instruction_set(const char* name);

// Whether this build and this machine have the named set.
bool has_instruction_set(const char* name);

// Threads for `work` (about one nanosecond a unit on one core), the limit of the pool at most: 1 where spreading it would
// cost more than it saves.
int threads_for(double work);

// Uninitialised memory of this thread, aligned to 64 bytes, kept until the thread ends or asks for more.
// A second call of the same thread may give the same memory. Throws std::bad_alloc, which ends the process where it
// happens on a thread of a parallel region.
void* scratch(int64_t bytes);

}  // namespace tokenspeed
