// Policy apart from mechanism: who comes first, who gives way, what is promised. Pure functions over what they are given;
// nothing here changes a pool, a table or a state.
#pragma once

#include <cstdint>

#include "scheduler/config.h"

namespace tokenspeed {

// Where a request stands when a reserve is decided.
struct RequestProgress {
    std::int32_t prefill_len = 0;
    std::int32_t remaining_new_tokens = 0;  // the one that the prefill samples included
    bool declared = true;
    std::int32_t retractions = 0;
};

// Tokens beyond the prompt that an admission must leave room for.
struct ReserveDecision {
    std::int64_t tokens = 0;
    bool whole_generation = false;
};

// The one place where reserves are decided. A full-history group reserves for the generation: of a declared length
// min(remaining, headroom * (1 + retractions)) tokens, of an undeclared one as many blocks as 1 + retractions, and in any
// case the slot of the first decode. The other kinds do not grow with it. The token sampled last is never written, so it
// needs no slot. The prefill role decodes nothing.
ReserveDecision ReservePrefillDemands(const RequestProgress& progress, const CacheGroup& group,
                                      const SchedulerConfig& config);

// What the order of the waiting line looks at: priority (larger first), then age.
struct Place {
    std::int32_t priority = 0;
    std::int64_t age = 0;
};
bool comes_before(const Place& a, const Place& b);

// What the order of re-admission looks at: those with generated output first, then the oldest retraction.
struct RetractedView {
    bool generated = false;
    std::int64_t epoch = 0;
};
bool restores_before(const RetractedView& a, const RetractedView& b);

// What the order of victims looks at.
struct VictimView {
    bool incomplete = false;  // of its prompt
    bool prepaid = false;     // its reserve covered its whole generation
    bool armed = false;       // since last round
    std::int64_t size = 0;    // tokens of an incomplete prompt, weight that a decode would free
    std::int32_t generated = 0;
    std::int64_t age = 0;
};
// An incomplete prefill first, the largest; then whoever was left out for this already; then the decode that frees most;
// ties by fewest generated tokens, then the youngest. Prepaid generations come last.
bool gives_way_before(const VictimView& a, const VictimView& b);

// How many tokens a chunk that begins at `from` may have.
struct ChunkLimits {
    std::int64_t budget = 0;
    std::int32_t prefill_len = 0;
    std::int32_t junction = 0;                // where the chunk that crosses it ends; 0 for none
    std::int32_t checkpoint_granularity = 0;  // where chunks that do not complete the prompt end; 0 for anywhere
};
std::int32_t chunk_tokens(std::int32_t from, const ChunkLimits& limits);

}  // namespace tokenspeed
