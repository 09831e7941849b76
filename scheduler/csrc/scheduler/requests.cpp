// The life of requests: submission, events from outside, and the books that follow every change of state.
#include <algorithm>
#include <string>

#include "scheduler/scheduler.h"
#include "scheduler/transition.h"

namespace tokenspeed {

using fsm::StateId;

namespace {

SchedulerConfig validated(SchedulerConfig config) {
    config.validate();
    return config;
}

}  // namespace

Scheduler::Scheduler(SchedulerConfig config)
    : config_(validated(std::move(config))),
      pool_tokens_(config_.pool_tokens()),
      bound_(config_.single_request_bound()),
      capacity_(config_),
      no_promises_(config_.groups.size(), 0) {}

Scheduler::~Scheduler() = default;

void Scheduler::submit(std::int32_t handle, std::span<const std::int32_t> prompt, const SubmitOptions& options) {
    const std::string who = "request " + std::to_string(handle) + ": ";
    if (requests_.contains(handle)) throw std::invalid_argument(who + "a request with this handle is alive");
    if (prompt.empty()) throw std::invalid_argument(who + "the prompt is empty; it needs at least one token");
    if (options.max_new_tokens < 1) {
        throw std::invalid_argument(who + "max_new_tokens is " + std::to_string(options.max_new_tokens) +
                                    "; at least 1 is needed");
    }
    const auto negative = std::find_if(prompt.begin(), prompt.end(), [](std::int32_t token) { return token < 0; });
    if (negative != prompt.end()) {
        throw std::invalid_argument(who + "token " + std::to_string(*negative) + " at position " +
                                    std::to_string(negative - prompt.begin()) + " of the prompt is negative");
    }
    const auto length = static_cast<std::int64_t>(prompt.size());
    // The prefill role computes the prompt and its first token, which it never writes.
    const bool generates = options.declared && config_.role != fsm::Role::Prefill;
    const std::int64_t new_tokens = generates ? options.max_new_tokens : 1;
    const std::int64_t bound = max_single_request_tokens();
    if (length + new_tokens > bound) {
        const bool model = bound == config_.max_model_len;
        throw RequestRefused(
            "prompt (" + std::to_string(length) + " tokens) + max_new_tokens (" + std::to_string(new_tokens) +
            ") = " + std::to_string(length + new_tokens) + " tokens, more than the " + std::to_string(bound) +
            (model ? " of max_model_len" : " that the KV cache can hold for one request; give it more memory") +
            (model ? "" : ", or ask for less"));
    }

    auto owned = std::make_unique<Request>(handle, next_age_++, config_.role);
    Request& request = *owned;
    request.priority = options.priority;
    request.declared = options.declared;
    request.max_new_tokens = static_cast<std::int32_t>(
        std::min<std::int64_t>(options.max_new_tokens, config_.max_model_len - length));
    request.max_cached_prefix_tokens = options.max_cached_prefix_tokens;
    request.prompt_tokens = static_cast<std::int32_t>(length);
    request.tokens.reserve(prompt.size() + static_cast<std::size_t>(std::min(request.max_new_tokens, 1024)));
    request.tokens.assign(prompt.begin(), prompt.end());
    if (config_.prefix_cache) request.root = cache::root_digest(options.name_space);
    request.arrived = time_;
    request.timeline.visits.reserve(8);
    request.timeline.add({request.life.id(), round_, time_});
    request.older = newest_;
    (newest_ == nullptr ? oldest_ : newest_->newer) = &request;
    newest_ = &request;
    requests_.emplace(handle, std::move(owned));
    ++counters_.states[fsm::index_of(request.life.id())];
    enter(request, request.life.id());
}

void Scheduler::leave(Request& request, StateId state) {
    if (state == StateId::Submitted) {
        waiting_.erase(&request);
        refused_.erase(&request);
        to_look_up_.erase(&request);
        if (request.retractions > 0) --retracted_waiting_;
    } else if (state == StateId::Prefetching) {
        prefetching_.erase(&request);
        request.operation = 0;
    } else if (state == StateId::Retracted) {
        --retracted_waiting_;
    }
    request.refusal.reset();
}

void Scheduler::enter(Request& request, StateId state) {
    switch (state) {
        case StateId::Submitted:
            request.prefill_len = request.known_tokens();
            request.overtaken = 0;
            request.reason = WaitReason::Queued;
            if (request.retractions > 0) ++retracted_waiting_;
            waiting_.insert(&request);
            if (config_.storage && !request.looked_up) to_look_up_.insert(&request);
            break;
        case StateId::Bootstrapping:
            request.reason = WaitReason::Bootstrapping;
            break;
        case StateId::Prefetching:
            prefetching_.insert(&request);
            break;
        case StateId::Retracted:
            ++retracted_waiting_;
            retracted_.insert(&request);
            break;
        default:
            break;
    }
}

// The caller has taken the request out of every list that its state put it in.
void Scheduler::erase(Request& request) {
    if (ended_.size() == kMaxEnded) ended_.pop_front();
    ended_.push_back({row_of(request), std::move(request.timeline)});
    (request.older == nullptr ? oldest_ : request.older->newer) = request.newer;
    (request.newer == nullptr ? newest_ : request.newer->older) = request.older;
    std::erase(broken_, &request);
    requests_.erase(request.handle);
}

void Scheduler::advance(const std::vector<Event>& events) {
    validate(events);
    // A copy that failed must be known before the result of the forward that read it is believed.
    for (const Event& event : events) {
        if (const auto* operation = std::get_if<OperationDone>(&event)) done(*operation);
    }
    for (const Event& event : events) {
        if (const auto* result = std::get_if<ForwardResult>(&event)) {
            land(*result);
        } else if (const auto* finish = std::get_if<Finish>(&event)) {
            end<fsm::FinishEvent>(finish->handle);
        } else if (const auto* abort = std::get_if<Abort>(&event)) {
            end<fsm::AbortEvent>(abort->handle);
        } else if (const auto* tick = std::get_if<Tick>(&event)) {
            now_ = std::max(now_, tick->now);
        } else if (std::holds_alternative<ForgetCache>(event)) {
            capacity_.forget_cached();
        } else if (const auto* bootstrapped = std::get_if<Bootstrapped>(&event)) {
            const auto found = requests_.find(bootstrapped->handle);
            if (found != requests_.end() && found->second->life.is<StateId::Bootstrapping>()) {
                transition(*found->second, fsm::BootstrappedEvent{});
            } else {
                ++counters_.ignored_results;
            }
        } else if (const auto* remote = std::get_if<RemotePrefillDone>(&event)) {
            remote_prefill_done(*remote);
        }
    }
}

void Scheduler::validate(const std::vector<Event>& events) const {
    std::size_t next = 0;  // the oldest plan whose result is still out, as the batch goes on
    for (const Event& event : events) {
        if (const auto* result = std::get_if<ForwardResult>(&event)) {
            validate_result(*result, next);
        } else if (const auto* operation = std::get_if<OperationDone>(&event)) {
            const auto found = pending_.find(operation->op_id);
            if (found == pending_.end() || operation->succeeded.empty()) continue;
            if (operation->succeeded.size() != found->second.group.size()) {
                throw std::invalid_argument("OperationDone of operation " + std::to_string(operation->op_id) + ": " +
                                            std::to_string(operation->succeeded.size()) +
                                            " entries in succeeded for an operation of " +
                                            std::to_string(found->second.group.size()) + " blocks");
            }
        }
    }
}

void Scheduler::validate_result(const ForwardResult& result, std::size_t& next) const {
    if (next >= outstanding_.size()) return;
    const std::int64_t expected = outstanding_[next].plan->forward_id;
    const std::string who = "ForwardResult of forward " + std::to_string(result.forward_id) + ": ";
    if (result.forward_id < expected || result.forward_id > last_forward_id_) return;  // repeated or unknown
    if (result.forward_id > expected) {
        throw std::invalid_argument(who + "forward " + std::to_string(expected) +
                                    " has not reported yet; results land in the order of their plans");
    }
    const auto rows = static_cast<std::size_t>(outstanding_[next].plan->num_rows());
    if (result.tokens.size() != rows) {
        throw std::invalid_argument(who + std::to_string(result.tokens.size()) + " tokens for a plan of " +
                                    std::to_string(rows) + " rows");
    }
    if (!result.failed.empty() && result.failed.size() != rows) {
        throw std::invalid_argument(who + std::to_string(result.failed.size()) +
                                    " entries in failed for a plan of " + std::to_string(rows) + " rows");
    }
    ++next;
}

template <typename EventType>
void Scheduler::end(std::int32_t handle) {
    const auto found = requests_.find(handle);
    if (found == requests_.end()) {
        ++counters_.ignored_results;
        return;
    }
    Request& request = *found->second;
    if (request.life.is<StateId::Prefilling>() || request.life.is<StateId::Decoding>() ||
        request.life.is<StateId::PrefillDone>()) {
        capacity_.publish_last_state(request);
    }
    transition(request, EventType{});
}

void Scheduler::land(const ForwardResult& result) {
    if (outstanding_.empty() || outstanding_.front().plan->forward_id != result.forward_id) {
        ++counters_.ignored_results;
        return;
    }
    const Outstanding landed = std::move(outstanding_.front());
    outstanding_.pop_front();
    for (std::size_t row = 0; row < landed.requests.size(); ++row) {
        land_row(*landed.requests[row], *landed.plan, row, result);
    }
}

void Scheduler::land_row(Request& request, const Plan& plan, std::size_t row, const ForwardResult& result) {
    fsm::ForwardResources& bundle = *request.life.bundle();
    fsm::CacheProgress& progress = bundle.progress();
    const bool ending = request.life.is<StateId::Finishing>();
    const bool samples = plan.samples[row] != 0;
    const bool failed = !result.failed.empty() && result.failed[row] != 0;
    const bool lost = failed || (samples && result.tokens[row] < 0);
    if (failed) {
        // Nothing it wrote, nor what was loaded for it, becomes known.
        progress.publish_limit =
            std::min({progress.publish_limit, plan.prefix_len[row], progress.published_pages * config_.prefix_granularity});
    }
    progress.committed = plan.prefix_len[row] + plan.input_len[row];
    if (samples && !lost && !ending && !request.broken) request.tokens.push_back(result.tokens[row]);
    if (lost && !ending && !request.broken) {
        request.broken = true;
        broken_.push_back(&request);
    }
    capacity_.publish(request);
    for (cache::BlockTable& table : bundle.tables()) table.forward_landed(result.forward_id);
    const bool first = samples && plan.kind[row] == static_cast<std::int32_t>(RowKind::Prefill);
    transition(request, fsm::ResultLandedEvent{.first_token = first});
}

}  // namespace tokenspeed
