// What comes from outside: results of plans, and the end of requests.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

namespace tokenspeed {

// The result of one plan; `tokens` by row (-1: none), `failed` by row or empty.
struct ForwardResult {
    std::int64_t forward_id = 0;
    std::vector<std::int32_t> tokens;
    std::vector<std::uint8_t> failed;
};

struct Finish {
    std::int32_t handle = 0;
};

struct Abort {
    std::int32_t handle = 0;
};

using Event = std::variant<ForwardResult, Finish, Abort>;

}  // namespace tokenspeed
