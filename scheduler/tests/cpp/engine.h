// Plays an engine against a scheduler: plans are executed on a device of token ids (device.h), results and ended
// operations are reported as they fall due, and every token is compared with what it must be.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "check.h"
#include "device.h"
#include "scheduler/scheduler.h"

namespace engine {

inline std::vector<std::int32_t> prompt(int length, int salt = 0) {
    std::vector<std::int32_t> tokens;
    for (int i = 0; i < length; ++i) tokens.push_back((7 * i + 13 * salt) % 997);
    return tokens;
}

// The state of a live request by name; "gone" where there is none.
inline std::string state_of(const Scheduler& scheduler, int handle) {
    for (const RequestRow& row : scheduler.requests(1000)) {
        if (row.handle == handle) return std::string(fsm::name_of(row.state));
    }
    return "gone";
}

inline RequestRow row_of(const Scheduler& scheduler, int handle) {
    for (const RequestRow& row : scheduler.requests(1000)) {
        if (row.handle == handle) return row;
    }
    check::fail(__FILE__, __LINE__, "no such request");
}

// Nothing is held on device or host; of one group, every block is free or cached.
inline void check_nothing_held(const Snapshot& snapshot) {
    for (const GroupCounts& group : snapshot.groups) CHECK_EQ(group.held, 0);
    for (const GroupCounts& group : snapshot.host) CHECK_EQ(group.held, 0);
    if (snapshot.groups.size() > 1) return;
    CHECK_EQ(snapshot.groups[0].free + snapshot.groups[0].cached, snapshot.groups[0].total);
}

struct ConfigOptions {
    int parents = 16, children = 1, granularity = 4, page = 4, seqs = 8, budget = 64, model_len = 200, overlap = 0;
    bool mixed = true, prefix_cache = true;
    int headroom = 4096, overtakes = 8;
    int window = 0;      // tokens of a sliding-window group; 0: none
    int checkpoint = 0;  // checkpoint granularity of a state group; 0: none
    bool full = true;    // whether there is a full-history group
    int window_children = 1, state_children = 1;
    int host_parents = 0;
    bool host_cache = true, storage = false;
    int storage_timeout = 100, storage_operations = 16;
    fsm::Role role = fsm::Role::Fused;
};

inline SchedulerConfig config(const ConfigOptions& options = {}) {
    std::vector<CacheGroup> groups;
    if (options.full) groups.push_back({"full", kFullHistory, options.granularity, options.children, 0, 0});
    if (options.window > 0) {
        groups.push_back({"window", kSlidingWindow, options.granularity, options.window_children, options.window, 0});
    }
    if (options.checkpoint > 0) groups.push_back({"state", kState, 0, options.state_children, 0, options.checkpoint});
    return {.role = options.role,
            .groups = std::move(groups),
            .num_parents = options.parents,
            .prefix_granularity = options.page,
            .max_num_seqs = options.seqs,
            .max_scheduled_tokens = options.budget,
            .max_model_len = options.model_len,
            .overlap_depth = options.overlap,
            .mixed_batches = options.mixed,
            .prefix_cache = options.prefix_cache,
            .headroom_tokens = options.headroom,
            .max_overtakes = options.overtakes,
            .host_parents = options.host_parents,
            .host_cache = options.host_cache,
            .storage = options.storage,
            .storage_timeout_ticks = options.storage_timeout,
            .storage_max_operations = options.storage_operations};
}

// Scheduler and device together. Requests end by length; what they produced is kept and compared.
class Engine {
public:
    explicit Engine(const ConfigOptions& options, std::shared_ptr<Storage> storage = std::make_shared<Storage>())
        : config_(config(options)), scheduler(config_), device(config_, std::move(storage)), overlap_(options.overlap) {}

    void submit(int handle, std::vector<std::int32_t> tokens, SubmitOptions options) {
        scheduler.submit(handle, tokens, options);
        live[handle] = {std::move(tokens), {}, options.max_new_tokens};
    }

    // One round: plan, execute, and the results that are due. Returns the plan.
    std::shared_ptr<const Plan> round() {
        auto plan = scheduler.plan();
        scheduler.check_invariants();
        for (const PlanAbort& abort : plan->aborts) {
            aborts.push_back(abort);
            live.erase(abort.handle);
        }
        if (plan->num_rows() > 0 || !plan->operations.empty()) results_.push_back({plan, device.execute(*plan)});
        const std::size_t keep = plan->num_rows() > 0 ? static_cast<std::size_t>(overlap_) : 0;
        while (results_.size() > keep) land();
        return plan;
    }

    void end(int handle, bool abort) {
        live.erase(handle);
        if (abort) {
            scheduler.advance({Abort{handle}});
        } else {
            scheduler.advance({Finish{handle}});
        }
        scheduler.check_invariants();
    }

    void run(int most_rounds = 5000) {
        while (scheduler.has_work() || !results_.empty()) {
            CHECK(most_rounds-- > 0);
            const bool nothing_out = results_.empty();
            const auto plan = round();
            // With nothing out and a live request, a round does something.
            CHECK(plan->num_rows() > 0 || !plan->operations.empty() || !nothing_out || !plan->aborts.empty() ||
                  !scheduler.has_work());
        }
    }

    void check_pool_whole() const {
        check_nothing_held(scheduler.snapshot());
    }

    std::string state(int handle) const { return state_of(scheduler, handle); }
    RequestRow row(int handle) const { return row_of(scheduler, handle); }
    bool results_out() const { return !results_.empty(); }

    struct Live {
        std::vector<std::int32_t> prompt;
        std::vector<std::int32_t> output;
        int limit;
    };

private:
    SchedulerConfig config_;

public:
    Scheduler scheduler;
    Device device;
    std::map<int, Live> live;
    std::map<int, std::vector<std::int32_t>> outputs;  // of those that ended by length
    std::vector<PlanAbort> aborts;

private:
    struct Executed {
        std::shared_ptr<const Plan> plan;
        std::vector<Event> events;
    };

    void land() {
        Executed landed = std::move(results_.front());
        results_.pop_front();
        const auto* result = landed.events.empty() ? nullptr : std::get_if<ForwardResult>(&landed.events.back());
        std::vector<Event> ends;
        for (std::size_t i = 0; result != nullptr && i < landed.plan->handle.size(); ++i) {
            const auto found = live.find(landed.plan->handle[i]);
            if (found == live.end() || result->tokens[i] < 0) continue;
            Live& request = found->second;
            std::vector<std::int32_t> sequence = request.prompt;
            sequence.insert(sequence.end(), request.output.begin(), request.output.end());
            CHECK_EQ(result->tokens[i], next_token(sequence, config_));
            request.output.push_back(result->tokens[i]);
            if (static_cast<int>(request.output.size()) < request.limit) continue;
            ends.push_back(Finish{found->first});
            outputs[found->first] = request.output;
            live.erase(found);
        }
        landed.events.insert(landed.events.end(), ends.begin(), ends.end());
        scheduler.advance(landed.events);
        scheduler.check_invariants();
    }

    int overlap_;
    std::deque<Executed> results_;
};

}  // namespace engine
