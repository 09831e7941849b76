// Plays an engine against a scheduler: a device whose cache holds token ids, kept by the plans' deltas alone. The next
// token is a hash of the whole sequence read back through the table, so a wrong, stale or too early reused block changes
// tokens.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "check.h"
#include "scheduler/scheduler.h"

namespace engine {

using namespace tokenspeed;

inline std::int32_t next_token(const std::vector<std::int32_t>& sequence) {
    std::uint64_t hash = 14695981039346656037u;
    for (const std::int32_t token : sequence) hash = (hash ^ static_cast<std::uint64_t>(token)) * 1099511628211u;
    return static_cast<std::int32_t>(hash % 1000);
}

inline std::vector<std::int32_t> prompt(int length, int salt = 0) {
    std::vector<std::int32_t> tokens;
    for (int i = 0; i < length; ++i) tokens.push_back((7 * i + 13 * salt) % 997);
    return tokens;
}

struct ConfigOptions {
    int parents = 16, children = 1, granularity = 4, page = 4, seqs = 8, budget = 64, model_len = 200, overlap = 0;
    bool mixed = true, prefix_cache = true;
    int headroom = 4096, overtakes = 8;
};

inline SchedulerConfig config(const ConfigOptions& options = {}) {
    return {.role = fsm::Role::Fused,
            .groups = {{"full", kFullHistory, options.granularity, options.children}},
            .num_parents = options.parents,
            .prefix_granularity = options.page,
            .max_num_seqs = options.seqs,
            .max_scheduled_tokens = options.budget,
            .max_model_len = options.model_len,
            .overlap_depth = options.overlap,
            .mixed_batches = options.mixed,
            .prefix_cache = options.prefix_cache,
            .headroom_tokens = options.headroom,
            .max_overtakes = options.overtakes};
}

class Device {
public:
    explicit Device(const SchedulerConfig& config)
        : granularity_(config.groups[0].block_granularity),
          store_(static_cast<std::size_t>((config.num_parents + 1) * config.groups[0].children_per_parent *
                                          granularity_),
                 -1),
          rows_(static_cast<std::size_t>(config.max_num_seqs) + 1) {}

    ForwardResult execute(const Plan& plan) {
        for (const std::int32_t index : plan.starts) row(plan.row[static_cast<std::size_t>(index)]) = Row{};
        apply(plan.tables[0]);
        ForwardResult result{plan.forward_id, {}, {}};
        std::size_t at = 0;
        for (std::size_t i = 0; i < plan.handle.size(); ++i) {
            result.tokens.push_back(compute(plan, i, at));
            at += static_cast<std::size_t>(plan.input_len[i]);
        }
        return result;
    }

private:
    struct Row {
        std::int32_t version = 0;
        std::int32_t last = -1;
        std::vector<std::int32_t> table;
    };
    Row& row(std::int32_t number) { return rows_[static_cast<std::size_t>(number)]; }
    std::int32_t& slot(const Row& row, std::int32_t position) {
        const std::int32_t block = row.table.at(static_cast<std::size_t>(position / granularity_));
        CHECK(block > 0);
        return store_.at(static_cast<std::size_t>(block * granularity_ + position % granularity_));
    }

    void apply(const BlockTableDelta& delta) {
        auto ids = delta.ids.begin();
        for (std::size_t i = 0; i < delta.row.size(); ++i) {
            Row& own = row(delta.row[i]);
            CHECK_EQ(own.version, delta.version_from[i]);
            CHECK_EQ(delta.version_to[i], delta.version_from[i] + 1);
            CHECK(delta.first_slot[i] <= static_cast<std::int32_t>(own.table.size()));
            own.version = delta.version_to[i];
            own.table.resize(static_cast<std::size_t>(delta.first_slot[i]));
            own.table.insert(own.table.end(), ids, ids + delta.count[i]);
            ids += delta.count[i];
        }
        CHECK(ids == delta.ids.end());
    }

    std::int32_t compute(const Plan& plan, std::size_t i, std::size_t at) {
        Row& own = row(plan.row[i]);
        const std::int32_t end = plan.prefix_len[i] + plan.input_len[i];
        for (std::int32_t position = plan.prefix_len[i]; position < end; ++position) {
            const std::int32_t token = plan.input_ids.at(at++);
            slot(own, position) = token < 0 ? own.last : token;
        }
        if (plan.samples[i] == 0) return -1;
        std::vector<std::int32_t> sequence;
        for (std::int32_t position = 0; position < end; ++position) sequence.push_back(slot(own, position));
        own.last = next_token(sequence);
        return own.last;
    }

    std::int32_t granularity_;
    std::vector<std::int32_t> store_;
    std::vector<Row> rows_;
};

// Scheduler and device together. Requests end by length; what they produced is kept and compared.
class Engine {
public:
    explicit Engine(const ConfigOptions& options)
        : config_(config(options)), scheduler(config_), device_(config_), overlap_(options.overlap) {}

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
        if (plan->num_rows() > 0) results_.push_back({plan, device_.execute(*plan)});
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
            CHECK(plan->num_rows() > 0 || !nothing_out || !plan->aborts.empty());
        }
    }

    void check_pool_whole() const {
        const Snapshot snapshot = scheduler.snapshot();
        CHECK_EQ(snapshot.groups[0].held, 0);
        CHECK_EQ(snapshot.groups[0].free + snapshot.groups[0].cached, snapshot.groups[0].total);
    }

    std::string state(int handle) const {
        for (const RequestRow& row : scheduler.requests(1000)) {
            if (row.handle == handle) return std::string(fsm::name_of(row.state));
        }
        return "gone";
    }
    RequestRow row(int handle) const {
        for (const RequestRow& row : scheduler.requests(1000)) {
            if (row.handle == handle) return row;
        }
        check::fail(__FILE__, __LINE__, "no such request");
    }

    struct Live {
        std::vector<std::int32_t> prompt;
        std::vector<std::int32_t> output;
        int limit;
    };

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
        ForwardResult result;
    };

    void land() {
        Pending landed = std::move(results_.front());
        results_.pop_front();
        std::vector<Event> events{landed.result};
        for (std::size_t i = 0; i < landed.plan->handle.size(); ++i) {
            const auto found = live.find(landed.plan->handle[i]);
            if (found == live.end() || landed.result.tokens[i] < 0) continue;
            Live& request = found->second;
            std::vector<std::int32_t> sequence = request.prompt;
            sequence.insert(sequence.end(), request.output.begin(), request.output.end());
            CHECK_EQ(landed.result.tokens[i], next_token(sequence));
            request.output.push_back(landed.result.tokens[i]);
            if (static_cast<int>(request.output.size()) < request.limit) continue;
            events.push_back(Finish{found->first});
            outputs[found->first] = request.output;
            live.erase(found);
        }
        scheduler.advance(events);
        scheduler.check_invariants();
    }

    Device device_;
    int overlap_;
    std::deque<Pending> results_;
};

}  // namespace engine
