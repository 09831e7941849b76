// Words that explanations share. A knob is named as a recipe spells it, for that is where people turn it.
#pragma once

#include <cstdint>
#include <string>

namespace tokenspeed {

inline const std::string kSequencesKnob = "scheduler.max_seqs";
inline const std::string kBudgetKnob = "scheduler.chunk";
inline const std::string kHeadroomKnob = "scheduler.headroom";
inline const std::string kPoolKnob = "kv.bytes";
inline const std::string kHostPoolKnob = "kv.host_bytes";

inline std::string counted(std::int64_t count, const std::string& one) {
    return std::to_string(count) + " " + one + (count == 1 ? "" : "s");
}

}  // namespace tokenspeed
