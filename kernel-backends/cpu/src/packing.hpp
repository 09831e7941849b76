// Packs GGUF blocks into panels (panels.hpp says how those lie), and keeps them.
#pragma once

#include <cstdint>
#include <memory>

#include "panels.hpp"

namespace tokenspeed {

// Packs all of a weight of a format that is packed; its bias is left out. `quants` and `scales` have all_quant_bytes and
// all_scale_bytes.
void pack_panels(const Weight& weight, uint8_t* quants, uint8_t* scales);

// `bytes` of memory for weights, aligned to 64 bytes, on huge pages where the system grants them. Weights share large
// stretches, so that small ones do not take a huge page each; a stretch is given back when its last weight is gone.
// Throws std::bad_alloc.
std::shared_ptr<uint8_t> weight_memory(int64_t bytes);

// Gives back the resident pages that lie wholly in [data, data + bytes), where they are those of a shared mapping: a later
// read fetches them again. Any other memory is left alone. Returns the bytes of the pages given back.
int64_t release_mapped(const uint8_t* data, int64_t bytes);

// Reads `bytes`, a multiple of 64, from `data` on with all threads, and returns their sum as 64-bit words: what the memory
// gives at best, for benchmarks.
uint64_t read_all(const uint8_t* data, int64_t bytes);

}  // namespace tokenspeed
