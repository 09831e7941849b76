// Why a request does not run: a code, its figures, and the same in words with the knob that changes it.
#include <string>

#include "scheduler/scheduler.h"

namespace tokenspeed {

using fsm::StateId;

const char* code_of(WaitReason reason) {
    switch (reason) {
        case WaitReason::None:
            return "running";
        case WaitReason::Queued:
            return "queued";
        case WaitReason::NoRow:
            return "no_row";
        case WaitReason::Budget:
            return "budget";
        case WaitReason::Capacity:
            return "capacity";
        case WaitReason::LineHeld:
        case WaitReason::Sealed:
            return "line_held";
        case WaitReason::ResultInFlight:
            return "result_in_flight";
        case WaitReason::Armed:
            return "armed";
        case WaitReason::GenerationDone:
            return "generation_done";
        case WaitReason::Operation:
        case WaitReason::Peer:
            return "operation";
        case WaitReason::Retracted:
            return "retracted";
        case WaitReason::Bootstrapping:
            return "bootstrapping";
    }
    return "";
}

namespace {

std::string counted(std::int64_t count, const std::string& one) {
    return std::to_string(count) + " " + one + (count == 1 ? "" : "s");
}

std::string text_of(const Request& request, const SchedulerConfig& config) {
    const std::string figure = std::to_string(request.figure);
    switch (request.reason) {
        case WaitReason::None:
            return "";
        case WaitReason::Queued:
            return "its turn has not come";
        case WaitReason::NoRow:
            return "no row: all " + std::to_string(config.max_num_seqs) + " are taken (max_num_seqs)";
        case WaitReason::Budget:
            return "budget: the round's " + std::to_string(config.max_scheduled_tokens) +
                   " tokens were spent (max_scheduled_tokens)";
        case WaitReason::Capacity: {
            const std::string group =
                config.groups.size() > 1 ? " of group " + config.groups[request.short_group].group_id : "";
            return "capacity: short by " + counted(request.figure, "block") + group;
        }
        case WaitReason::LineHeld:
            return "the line is held by request " + figure;
        case WaitReason::Sealed:
            return "the line is sealed by request " + figure + ", which was passed " +
                   counted(config.max_overtakes, "time") + " (max_overtakes)";
        case WaitReason::ResultInFlight:
            return "its last result must land first";
        case WaitReason::Armed:
            return "about to be retracted for request " + figure + ": left out until its last result lands";
        case WaitReason::GenerationDone:
            return "all its tokens are scheduled";
        case WaitReason::Operation:
            return "waits for cache operation " + figure;
        case WaitReason::Retracted:
            return "gave way to request " + figure + "; it comes back when there is room";
        case WaitReason::Bootstrapping:
            return "the handshake with the peer is pending";
        case WaitReason::Peer:
            return config.role == fsm::Role::Prefill ? "the peer reads its blocks" : "the peer computes its prompt";
    }
    return "";
}

}  // namespace

Explanation Scheduler::explain(const Request& request) const {
    Explanation explanation;
    explanation.handle = request.handle;
    explanation.state = request.life.id();
    explanation.code = code_of(request.reason);
    explanation.text = text_of(request, config_);
    switch (request.reason) {
        case WaitReason::Capacity:
            explanation.short_by = request.figure;
            explanation.group_id = config_.groups[request.short_group].group_id;
            break;
        case WaitReason::LineHeld:
        case WaitReason::Sealed:
        case WaitReason::Armed:
        case WaitReason::Retracted:
            explanation.other = static_cast<std::int32_t>(request.figure);
            break;
        default:
            break;
    }
    explanation.op_id = request.operation;
    if (request.life.is<StateId::Finishing>()) {
        explanation.code = "ending";
        explanation.text = "its last result is out";
    }
    return explanation;
}

Explanation Scheduler::explain(std::int32_t handle) const {
    const auto found = requests_.find(handle);
    if (found != requests_.end()) return explain(*found->second);
    Explanation ended;
    ended.handle = handle;
    ended.code = "ended";
    ended.text = "no request with handle " + std::to_string(handle) + " is alive";
    return ended;
}

}  // namespace tokenspeed
