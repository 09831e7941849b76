// Deals events to a scheduler in any order: an engine taken apart. The plans are executed on a device whose cells know what
// they hold (chained_device.h), every token that lands is checked, and all invariants after every single event.
//
// round() is what an engine does; step(), land(), acknowledge(), peer_done() and the rest are its parts. Requests end by
// length.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "chained_device.h"
#include "check.h"
#include "engine.h"
#include "scheduler/scheduler.h"

namespace dealer {

class Engine {
public:
    struct Live {
        std::vector<std::int32_t> prompt;
        std::vector<std::int32_t> output;
        int limit;
        std::int64_t serial;
        bool broken = false;  // something of it was lost: the scheduler ends it
    };

    explicit Engine(const engine::ConfigOptions& options)
        : config_(engine::config(options)), scheduler(config_), device_(config_), overlap_(options.overlap) {}

    void submit(int handle, std::vector<std::int32_t> tokens, SubmitOptions options) {
        scheduler.submit(handle, tokens, options);
        // No output goes beyond the longest sequence.
        const int limit = std::min(options.max_new_tokens, config_.max_model_len - static_cast<int>(tokens.size()));
        live[handle] = {std::move(tokens), {}, limit, ++serials_};
        if (config_.role != fsm::Role::Fused) bootstrapping_.push_back(handle);
    }

    // One round: what ended, plan, execute, and the results that are due. Returns the plan.
    std::shared_ptr<const Plan> round() {
        bootstrap_all();
        while (!operations_.empty()) acknowledge(operations_.begin()->first);
        while (!remote_.empty()) peer_done();
        auto plan = step();
        const std::size_t keep = plan->num_rows() > 0 ? static_cast<std::size_t>(overlap_) : 0;
        while (results_.size() > keep) land();
        return plan;
    }

    // Plan and execute; nothing lands.
    std::shared_ptr<const Plan> step() {
        auto plan = scheduler.plan();
        scheduler.check_invariants();
        ended_since_plan_.clear();
        for (const PlanAbort& abort : plan->aborts) {
            aborts.push_back(abort);
            live.erase(abort.handle);
        }
        Device::Executed executed = device_.execute(*plan);
        for (const CacheOperation& operation : plan->operations) {
            if (operation.kind == OperationKind::RemotePrefill) {
                remote_.push_back({operation, serial_of(operation.handle)});
            } else {
                operations_[operation.op_id] = {operation, serial_of(operation.handle)};
            }
        }
        if (plan->num_rows() == 0) return plan;
        Pending pending{plan, std::move(executed), {}};
        for (const std::int32_t handle : plan->handle) pending.serials.push_back(serial_of(handle));
        results_.push_back(std::move(pending));
        return plan;
    }

    // The oldest result that is out lands, and with it the load-backs that its rows read. `failed` and `lost` are rows
    // (bits): what a failed row wrote is garbage, a lost one brings no token; nobody ends their requests here.
    void land(std::uint64_t failed = 0, std::uint64_t lost = 0) {
        Pending landed = std::move(results_.front());
        results_.pop_front();
        std::vector<Event> events;
        for (const CacheOperation& operation : landed.plan->operations) {
            if (operation.kind != OperationKind::LoadBack || operations_.erase(operation.op_id) == 0) continue;
            events.push_back(device_.complete(operation, 0));
        }
        ForwardResult& result = landed.executed.result;
        const std::size_t rows = landed.plan->handle.size();
        if (failed != 0) result.failed.assign(rows, 0);
        std::vector<Event> ends;
        for (std::size_t i = 0; i < rows; ++i) {
            const bool fails = bit(failed, i);
            if (fails) {
                result.failed[i] = 1;
                Device::spoil(landed.executed.written[i]);
            }
            if (fails || bit(lost, i)) result.tokens[i] = -1;
            land_row(landed, i, fails || landed.plan->samples[i] != 0, ends);
        }
        last_landed_ = result;
        events.push_back(std::move(result));
        events.insert(events.end(), ends.begin(), ends.end());
        advance(events);
    }

    // An operation that is out ends; `failed` are blocks (bits).
    void acknowledge(std::int64_t op_id, std::uint64_t failed = 0) {
        const Operation operation = operations_.at(op_id);
        operations_.erase(op_id);
        last_done_ = device_.complete(operation.what, failed);
        const bool works = std::ranges::find(last_done_->succeeded, 0) == last_done_->succeeded.end();
        if (operation.what.kind == OperationKind::LoadBack && !works) spoil_rows(operation);
        if (operation.what.kind == OperationKind::HandOff) {
            const auto found = live.find(operation.what.handle);
            if (found != live.end() && found->second.serial == operation.serial) retire(found);
        }
        advance({*last_done_});
    }

    // Decode role: the peer wrote the oldest prompt that was left to it, or failed.
    void peer_done(bool fails = false) {
        const Operation remote = remote_.front();
        remote_.pop_front();
        const auto found = live.find(remote.what.handle);
        const bool alive = found != live.end() && found->second.serial == remote.serial;
        std::vector<Event> events{RemotePrefillDone{remote.what.handle, fails ? -1 : 0}};
        if (alive && !fails) {
            Live& request = found->second;
            // After a retraction without an image the output so far is part of what the peer computes.
            const std::vector<std::int32_t> sequence = sequence_of(request);
            device_.peer_fills(remote.what, sequence);
            const std::int32_t token = next_token(sequence);
            std::get<RemotePrefillDone>(events[0]).first_token = token;
            request.output.push_back(token);
            if (static_cast<int>(request.output.size()) == request.limit) {
                events.push_back(Finish{found->first});
                retire(found);
            }
        }
        advance(events);
    }

    void bootstrap_all() {
        while (!bootstrapping_.empty()) bootstrap_next();
    }
    void bootstrap_next() {
        advance({Bootstrapped{bootstrapping_.front()}});
        bootstrapping_.pop_front();
    }

    void tick(std::int64_t now) { advance({Tick{now}}); }

    // What landed, or ended, is reported again: counted, and nothing else.
    void repeat_result() { repeat(*last_landed_); }
    void repeat_operation() { repeat(*last_done_); }

    // The newest result that is out is reported before the oldest: refused, and nothing happens.
    void land_out_of_turn() {
        CHECK_THROWS(std::invalid_argument, "has not reported yet", scheduler.advance({results_.back().executed.result}));
        scheduler.check_invariants();
    }

    // Whether a handle may be used again: nothing has it, and no plan can still tell of the request that had it.
    bool reusable(int handle) const {
        return !live.contains(handle) && !ended_since_plan_.contains(handle) && state(handle) == "gone";
    }

    void end(int handle, bool abort) {
        live.erase(handle);
        ended_since_plan_.insert(handle);
        if (abort) {
            advance({Abort{handle}});
        } else {
            advance({Finish{handle}});
        }
    }

    bool anything_out() const { return !results_.empty() || !operations_.empty() || !remote_.empty(); }
    // Nothing that was asked for is still to come.
    bool quiet() const { return !anything_out() && bootstrapping_.empty(); }

    // Runs everything to its end. With nothing out and a live request, a round does something.
    template <typename Note>
    void drain(Note&& note, int most_rounds = 5000) {
        while (scheduler.has_work() || anything_out()) {
            CHECK(most_rounds-- > 0);
            const bool idle = quiet() && scheduler.has_work();
            const auto plan = round();
            CHECK(!idle || plan->num_rows() > 0 || !plan->aborts.empty() || !plan->operations.empty() || !scheduler.has_work());
            note(*plan);
        }
    }

    void check_pool_whole() const {
        const Snapshot snapshot = scheduler.snapshot();
        CHECK_EQ(snapshot.pending_operations, 0);
        engine::check_nothing_held(snapshot);
    }

    std::string state(int handle) const { return engine::state_of(scheduler, handle); }
    RequestRow row(int handle) const { return engine::row_of(scheduler, handle); }

    std::size_t results_out() const { return results_.size(); }
    std::size_t peers_out() const { return remote_.size(); }
    std::size_t bootstraps_out() const { return bootstrapping_.size(); }
    bool any_landed() const { return last_landed_.has_value(); }
    bool any_done() const { return last_done_.has_value(); }
    const Plan& oldest_out() const { return *results_.front().plan; }
    // The operations that are out, the oldest first.
    std::vector<const CacheOperation*> operations_out() const {
        std::vector<const CacheOperation*> out;
        for (const auto& [op_id, operation] : operations_) out.push_back(&operation.what);
        return out;
    }

private:
    SchedulerConfig config_;

public:
    Scheduler scheduler;
    std::map<int, Live> live;
    std::map<int, std::vector<std::int32_t>> outputs;  // of those that ended by length
    std::vector<PlanAbort> aborts;

private:
    struct Pending {
        std::shared_ptr<const Plan> plan;
        Device::Executed executed;
        std::vector<std::int64_t> serials;  // by row: handles are used again
    };
    struct Operation {
        CacheOperation what;
        std::int64_t serial = 0;
    };

    static bool bit(std::uint64_t bits, std::size_t i) { return i < 64 && (bits >> i & 1) != 0; }

    std::int64_t serial_of(int handle) const {
        const auto found = live.find(handle);
        return found == live.end() ? 0 : found->second.serial;
    }

    void advance(const std::vector<Event>& events) {
        scheduler.advance(events);
        scheduler.check_invariants();
    }

    void repeat(const Event& event) {
        const std::int64_t ignored = scheduler.snapshot().ignored_results;
        advance({event});
        CHECK_EQ(scheduler.snapshot().ignored_results, ignored + 1);
    }

    static std::vector<std::int32_t> sequence_of(const Live& request) {
        std::vector<std::int32_t> sequence = request.prompt;
        sequence.insert(sequence.end(), request.output.begin(), request.output.end());
        return sequence;
    }

    void retire(std::map<int, Live>::iterator found) {
        outputs[found->first] = found->second.output;
        live.erase(found);
    }

    // What was loaded for a request is garbage, and so is all that its rows made of it.
    void spoil_rows(const Operation& operation) {
        for (const Pending& pending : results_) {
            for (std::size_t i = 0; i < pending.serials.size(); ++i) {
                if (pending.serials[i] == operation.serial && pending.plan->handle[i] == operation.what.handle) {
                    Device::spoil(pending.executed.written[i]);
                }
            }
        }
        const auto found = live.find(operation.what.handle);
        if (found != live.end() && found->second.serial == operation.serial) found->second.broken = true;
    }

    // What a row brought: its token must be what follows the whole sequence. A request that has all it asked for ends.
    void land_row(const Pending& landed, std::size_t row, bool owes_token, std::vector<Event>& ends) {
        const auto found = live.find(landed.plan->handle[row]);
        if (found == live.end() || found->second.serial != landed.serials[row]) return;
        Live& request = found->second;
        const std::int32_t token = landed.executed.result.tokens[row];
        if (token < 0) request.broken |= owes_token;
        if (token < 0 || request.broken) return;
        CHECK_EQ(token, next_token(sequence_of(request)));
        request.output.push_back(token);
        // The prefill role's request ends when the peer has its blocks.
        if (static_cast<int>(request.output.size()) < request.limit || config_.role == fsm::Role::Prefill) return;
        ends.push_back(Finish{found->first});
        retire(found);
    }

    Device device_;
    int overlap_;
    std::int64_t serials_ = 0;
    std::deque<Pending> results_;
    std::map<std::int64_t, Operation> operations_;
    std::deque<Operation> remote_;  // prompts left to the peer
    std::deque<int> bootstrapping_;
    std::set<int> ended_since_plan_;
    std::optional<ForwardResult> last_landed_;
    std::optional<OperationDone> last_done_;
};

}  // namespace dealer
