// What comes from outside: results of plans, the end of requests and of operations, the time, and the peer.
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

// A cache operation ended; `succeeded` by block, or empty where all did.
struct OperationDone {
    std::int64_t op_id = 0;
    std::vector<std::uint8_t> succeeded;
};

// The time, in ticks of the caller's choice.
struct Tick {
    std::int64_t now = 0;
};

// Prefixes that nobody holds are not to be hit any more, on the device and on the host.
struct ForgetCache {};

// The handshake with the peer is done.
struct Bootstrapped {
    std::int32_t handle = 0;
};

// Decode role: the peer wrote its last block and sampled `first_token`; -1 where it failed.
struct RemotePrefillDone {
    std::int32_t handle = 0;
    std::int32_t first_token = -1;
};

using Event = std::variant<ForwardResult, Finish, Abort, OperationDone, Tick, ForgetCache, Bootstrapped, RemotePrefillDone>;

}  // namespace tokenspeed
