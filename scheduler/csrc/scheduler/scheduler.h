// The scheduler: decides when, for whom and with which blocks a step runs. It touches no device and reads no clock, and
// nothing it decides depends on the order of a hash table: the same inputs give the same plans on every rank.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "scheduler/capacity.h"
#include "scheduler/config.h"
#include "scheduler/events.h"
#include "scheduler/plan.h"
#include "scheduler/report.h"
#include "scheduler/request.h"

namespace tokenspeed {

struct SubmitOptions {
    std::int32_t max_new_tokens = 0;
    bool declared = true;
    std::int32_t priority = 0;
    std::string_view name_space = {};
    std::int32_t max_cached_prefix_tokens = -1;
};

class Scheduler {
public:
    // Throws std::invalid_argument where the configuration is not valid.
    explicit Scheduler(SchedulerConfig config);
    Scheduler(const Scheduler&) = delete;
    Scheduler& operator=(const Scheduler&) = delete;
    ~Scheduler();

    // Queues a request. Throws RequestRefused where it can never fit, std::invalid_argument for a handle that lives, an
    // empty prompt or a negative token.
    void submit(std::int32_t handle, std::span<const std::int32_t> prompt, const SubmitOptions& options);

    // Applies a batch of events. It is validated whole first: where this throws std::invalid_argument, nothing happened.
    void advance(const std::vector<Event>& events);

    // Plans the next round. The plan must be executed exactly once, in order.
    [[nodiscard]] std::shared_ptr<const Plan> plan();

    Snapshot snapshot() const;
    std::vector<RequestRow> requests(std::size_t limit) const;
    bool has_work() const { return !requests_.empty(); }
    const SchedulerConfig& config() const { return config_; }
    std::int64_t max_single_request_tokens() const { return config_.single_request_bound(); }
    // Walks everything; throws std::runtime_error naming the first broken invariant.
    void check_invariants() const;

private:
    struct PlannedRow {
        Request* request;
        std::int32_t prefix_len;
        std::int32_t input_len;
        bool samples;
        bool starts;
    };
    enum class Admission : std::uint8_t { Decode, Chunk, Prompt };
    // An admission that failed for capacity.
    struct Blocked {
        Request* request;
        Admission what;
        Shortfall shortfall;
    };
    // One round while it is built.
    struct Round {
        std::int64_t budget = 0;
        std::vector<PlannedRow> prefills;
        std::vector<PlannedRow> decodes;
        std::vector<Blocked> blocked;
        std::vector<Request*> left_out;  // armed last round, so skipped so far
        Request* line_holder = nullptr;  // a resident whose prompt is not complete after this round
        std::vector<PlanAbort> aborts;
    };
    struct Outstanding {
        std::shared_ptr<const Plan> plan;
        std::vector<Request*> requests;  // by row; they live at least until the result lands
    };

    // requests.cpp: the life of requests
    template <typename EventType>
    void transition(Request& request, EventType event);
    void leave(Request& request, fsm::StateId state);
    void enter(Request& request, fsm::StateId state);
    void erase(Request& request);
    template <typename EventType>
    void end(std::int32_t handle);
    void validate(const std::vector<Event>& events) const;
    void land(const ForwardResult& result);
    void land_row(Request& request, const Plan& plan, std::size_t row, const ForwardResult& result);

    // round.cpp: decodes, chunks, new prompts
    void end_broken(Round& round);
    void schedule_decodes(Round& round);
    bool try_decode(Round& round, Request& request);
    bool may_decode(Round& round, Request& request) const;
    bool outgrown(const Request& request) const;
    void end_outgrown(Round& round, Request& request);
    void schedule_chunks(Round& round);
    bool try_chunk(Round& round, Request& request);
    void schedule_prompts(Round& round);
    bool try_prompt(Round& round, Request& request);
    static std::int32_t first_chunk_tokens(const Round& round, const Request& request, const Prefix& prefix);
    void refuse_prompt(Round& round, Request& request, const Shortfall& shortfall);
    void count_overtaking(const Request& admitted);
    const Request* sealing() const;
    void resume_left_out(Round& round);
    bool out_of_turn(const Request& request) const;

    // retraction.cpp
    void retract_and_grant(Round& round);
    std::vector<Request*> rank_victims(const Round& round) const;
    std::vector<Request*> victims_for_resident(const std::vector<Request*>& ranked, const Blocked& beneficiary) const;
    std::vector<Request*> victims_for_prompt(const Round& round, const std::vector<Request*>& ranked,
                                             Request& prompt) const;
    bool may_benefit(const Blocked& blocked) const;
    void arm(Request& victim);
    void hand_over(Round& round, const std::vector<Request*>& victims, const Blocked& beneficiary);
    void retract(Request& request);
    void grant(Round& round, const std::vector<Blocked>& blocked);

    // emit.cpp
    std::shared_ptr<const Plan> emit(Round&& round);
    void emit_row(Plan& plan, const PlannedRow& row, RowKind kind) const;
    void emit_deltas(Plan& plan, Request& request) const;

    // report.cpp
    std::string reason_of(const Request& request) const;
    void check_request(const Request& request) const;

    static bool is_resident(fsm::StateId state) {
        return fsm::owns_bundle(state) && state != fsm::StateId::Finishing;
    }

    SchedulerConfig config_;
    // Declared before the requests: the pool outlives every table.
    Capacity capacity_;
    std::unordered_map<std::int32_t, std::unique_ptr<Request>> requests_;  // looked up by handle, never walked
    Request* oldest_ = nullptr;  // the live, by age
    Request* newest_ = nullptr;
    std::vector<Request*> residents_;        // own a bundle and are not ending, in the order of admission; with gaps
    std::int64_t resident_count_ = 0;
    std::set<Request*, LineOrder> waiting_;  // in state Submitted
    std::set<Request*, AgeOrder> refused_;   // of those, refused for capacity
    std::int64_t retracted_waiting_ = 0;
    std::vector<Request*> broken_;
    std::deque<Outstanding> outstanding_;
    std::int64_t round_ = 0;
    std::int64_t next_age_ = 0;
    std::int64_t last_forward_id_ = 0;
    Counters counters_;
};

}  // namespace tokenspeed
