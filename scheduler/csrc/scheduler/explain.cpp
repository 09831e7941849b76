// Why a request does not run: a code, its figures, and the same in words with the knob that changes it.
#include <string>

#include "scheduler/scheduler.h"
#include "scheduler/words.h"

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

std::string text_of(const Request& request, const SchedulerConfig& config) {
    const std::string figure = std::to_string(request.figure);
    switch (request.reason) {
        case WaitReason::None:
            return "";
        case WaitReason::Queued:
            return "its turn has not come";
        case WaitReason::NoRow:
            return "no row: all " + std::to_string(config.max_num_seqs) + " are taken (" + kSequencesKnob + ")";
        case WaitReason::Budget:
            return "budget: the round's " + std::to_string(config.max_scheduled_tokens) +
                   " tokens were spent (" + kBudgetKnob + ")";
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

// Whoever the walk along the line stopped at before it came to this request; nullptr where it came so far.
const Request* Scheduler::line_stop_before(const Request& request) const {
    if (!line_stop_ || !request.life.is<StateId::Submitted>() || request.age == line_stop_->age) return nullptr;
    if (!line_stop_->sealed && comes_before({request.priority, request.age}, line_stop_->place)) return nullptr;
    const auto found = requests_.find(line_stop_->handle);
    const bool waits = found != requests_.end() && found->second->age == line_stop_->age &&
                       found->second->life.is<StateId::Submitted>();
    return waits ? found->second.get() : nullptr;
}

Explanation Scheduler::explain(const Request& request) const {
    Explanation explanation;
    explanation.handle = request.handle;
    explanation.state = request.life.id();
    if (const Request* stop = line_stop_before(request)) {
        // What it was told when it was looked at last may no longer be so.
        explanation.code = line_stop_->sealed ? code_of(WaitReason::Sealed) : code_of(WaitReason::Queued);
        explanation.other = stop->handle;
        explanation.text = "behind request " + std::to_string(stop->handle) + " in the line";
        if (line_stop_->sealed) {
            explanation.text = "the line is sealed by request " + std::to_string(stop->handle) + ", which was passed " +
                               counted(config_.max_overtakes, "time") + " (max_overtakes)";
        }
        explanation.text += ": " + text_of(*stop, config_);
        return explanation;
    }
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
