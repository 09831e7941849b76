// The scheduler: decides when, for whom and with which blocks a step runs. It touches no device and reads no clock, and
// nothing it decides depends on the order of a hash table: the same inputs give the same plans on every rank.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
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

// New prompts that may fail for capacity, or be skipped because nothing changed since they did, before a round stops
// trying: what bounds a round's work whatever the length of the line.
inline constexpr int kMaxRefusalsPerRound = 16;
// Requests that are remembered after their end, and notes that nobody took.
inline constexpr std::size_t kMaxEnded = 64;
inline constexpr std::size_t kMaxNotes = 64;
// Resident prompts that are not complete, beyond which none starts that would have to be cut, too.
inline constexpr int kMaxIncompletePrompts = 2;

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

    // Applies a batch of events, ended operations before results. It is validated whole first: where this throws
    // std::invalid_argument, nothing happened.
    void advance(const std::vector<Event>& events);

    // Plans the next round. The plan must be executed exactly once, in order.
    [[nodiscard]] std::shared_ptr<const Plan> plan();

    // The time, in seconds of the caller's choice, that visits and notes are stamped with. Nothing is decided by it.
    void set_time(double seconds) { time_ = seconds; }

    Snapshot snapshot() const;
    // The live by interest: who waits (the longest waiting first), who is in prefill, who decodes (by blocks held), who
    // ends.
    std::vector<RequestRow> requests(std::size_t limit) const;
    PoolMaps maps(int cells) const;
    // `typical_tokens` 0: the mean of the live, or what the caller would have said where none lives.
    Headroom headroom(std::int64_t typical_tokens) const;
    Description describe(std::int32_t handle) const;
    // What happened since this was last asked, at most kMaxNotes.
    std::vector<Note> take_notes() { return std::exchange(notes_, {}); }
    // Why the request does not run, as of the last round.
    Explanation explain(std::int32_t handle) const;
    // The last rounds that did or refused anything, the oldest first.
    std::vector<Decision> decisions(std::size_t last) const;
    // Whether any request is alive or an operation waits to be sent.
    bool has_work() const {
        return !requests_.empty() || !outbox_.empty() || !puts_.empty() || !aborts_.empty() ||
               capacity_.has_publications();
    }
    const SchedulerConfig& config() const { return config_; }
    std::int64_t max_single_request_tokens() const { return bound_; }
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
    enum class Step : std::uint8_t { Decode, Chunk, Prompt };
    // A step that failed for capacity.
    struct Blocked {
        Request* request;
        Step what;
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
        Request* sealed_by = nullptr;    // a retracted request for which there was no room
        std::vector<CacheOperation> operations;
        std::vector<PlanAbort> aborts;
        std::vector<std::int32_t> retracted, restored;

        bool is_idle() const { return prefills.empty() && decodes.empty() && retracted.empty() && restored.empty(); }
    };
    struct Outstanding {
        std::shared_ptr<const Plan> plan;
        std::vector<Request*> requests;  // by row; they live at least until the result lands
    };
    // A cache operation that is out. Its pins keep the host blocks it touches as they are.
    struct Pending {
        OperationKind kind = OperationKind::WriteBack;
        std::int32_t handle = 0;
        std::int64_t age = 0;  // of the request: handles are used again
        IntArray group;
        std::vector<cache::BlockId> host;
        std::vector<cache::BlockKey> keys;
        IntArray slots;  // of a storage query: which slot each key is for
        cache::HostPins pins;
    };

    // Where the walk along the line ended in the last round: who stands behind was not looked at.
    struct LineStop {
        std::int32_t handle = 0;
        std::int64_t age = 0;
        Place place;
        bool sealed = false;  // then that is everybody else
    };
    struct Ended {
        RequestRow row;
        Timeline timeline;
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
    void validate_result(const ForwardResult& result, std::size_t& next) const;
    void land(const ForwardResult& result);
    void land_row(Request& request, const Plan& plan, std::size_t row, const ForwardResult& result);

    // round.cpp: decodes, chunks, new prompts
    void end_broken(Round& round);
    void schedule_decodes(Round& round);
    bool try_decode(Round& round, Request& request);
    bool may_decode(Round& round, Request& request) const;
    bool outgrown(const Request& request) const;
    void end_outgrown(Round& round, Request& request);
    void schedule_prefills(Round& round);
    int incomplete_prompts() const;
    const Request* first_incomplete() const;
    bool completes_now(const Round& round, Request& request) const;
    void schedule_chunks(Round& round);
    bool try_chunk(Round& round, Request& request);
    void schedule_prompts(Round& round);
    Request* walk_line(Round& round);
    void stop_line(const Request* last);
    bool try_prompt(Round& round, Request& request);
    std::int32_t chunk_for(const Round& round, const Request& request, std::int32_t from, std::int32_t junction) const;
    void refuse(Request& request, const Shortfall& shortfall);
    void count_overtaking(const Request& admitted);
    Request* sealing() const;
    void resume_left_out(Round& round);
    bool out_of_turn(const Request& request) const;

    // retraction.cpp: who gives way, and how it comes back
    void retract_and_grant(Round& round);
    std::vector<Request*> rank_victims(const Round& round) const;
    std::vector<Request*> victims_for_resident(const std::vector<Request*>& ranked, const Blocked& beneficiary) const;
    std::vector<Request*> victims_for_prompt(const Round& round, const std::vector<Request*>& ranked,
                                             Request& prompt) const;
    std::int64_t shared_with(const Prefix& prefix, const Request& resident) const;
    bool may_benefit(const Blocked& blocked) const;
    void compact(Round& round);
    void arm(Request& victim, const Request& beneficiary);
    void hand_over(Round& round, const std::vector<Request*>& victims, const Blocked& beneficiary);
    void grant(Round& round, const std::vector<Blocked>& blocked);

    // images.cpp: byte-exact copies of retracted requests
    void retract(Round& round, Request& request, const Request& beneficiary);
    std::optional<fsm::HostImage> make_image(Round& round, Request& request);
    void restore_one(Round& round);
    bool try_restore(Round& round, Request& request);
    Prefix prefix_of_image(Request& request, bool claim) const;

    // operations.cpp: what moves between the tiers
    CacheOperation make_operation(OperationKind kind, std::int32_t handle);
    Pending& pend(const CacheOperation& operation, const Request* request, cache::HostPins pins);
    void send_loads(Round& round, OperationKind kind, Request& request, const std::vector<Load>& loads);
    void write_back(Round& round);
    void done(const OperationDone& event);
    Request* owner(const Pending& pending) const;
    void copied_to_host(Pending& pending, const OperationDone& event);
    void image_saved(Request& request, bool succeeded);
    void restored(Request& request, bool succeeded);

    // storage.cpp: the third tier
    void put(Round& round);
    void look_up(Round& round);
    void ask_storage(Round& round, Request& request);
    void end_late_lookups();
    void fetch(Request& request, const Pending& query, const OperationDone& event);
    void fetched(Request* request, Pending& pending, const OperationDone& event);
    void land_lookup(Request& request);
    void add_keys(CacheOperation& operation, const std::vector<cache::BlockKey>& keys) const;
    bool storage_is_busy() const { return storage_operations_ >= config_.storage_max_operations; }

    // peers.cpp: prefill and decode apart
    void hand_off(Round& round);
    void handed_off(Request& request);
    void schedule_remote(Round& round);
    bool try_remote(Round& round, Request& request);
    void remote_prefill_done(const RemotePrefillDone& event);

    // emit.cpp
    std::shared_ptr<const Plan> emit(Round&& round);
    void emit_row(Plan& plan, const PlannedRow& row, RowKind kind) const;
    void emit_deltas(Plan& plan, Request& request) const;
    void record(const Round& round);

    // report.cpp, picture.cpp, explain.cpp, describe.cpp
    void note(std::string kind, std::int32_t handle, std::string text);
    void note_retraction(const Request& request, const Request& beneficiary, std::int64_t held, std::int32_t computed,
                         std::int64_t saved);
    RequestRow row_of(const Request& request) const;
    std::vector<std::vector<cache::BlockId>> pinned_blocks() const;
    std::int64_t mean_tokens() const;
    std::int64_t largest_now() const;
    bool fits_now(std::int64_t tokens, std::int64_t copies) const;
    const Request* line_stop_before(const Request& request) const;
    std::vector<std::string> sentences_about(Request& request) const;
    std::string place_in_line(const Request& request) const;
    void describe_waiting(Request& request, std::vector<std::string>& lines) const;
    void describe_way_back(Request& request, std::vector<std::string>& lines) const;
    void describe_resident(const Request& request, std::vector<std::string>& lines) const;
    void describe_needs(const Request& request, const Demand& demand, const std::string& what,
                        std::vector<std::string>& lines) const;
    std::string what_frees(const Request& request, const Shortfall& shortfall, bool reserves) const;
    bool pinned_by_others(const Request& request) const;
    void check_request(const Request& request) const;
    void check_books() const;
    Explanation explain(const Request& request) const;

    static bool is_resident(fsm::StateId state) {
        return fsm::owns_bundle(state) && state != fsm::StateId::Finishing;
    }

    SchedulerConfig config_;
    std::int64_t pool_tokens_;
    std::int64_t bound_;
    // Declared before the requests and operations: the tiers outlive every table and pin.
    Capacity capacity_;
    std::unordered_map<std::int32_t, std::unique_ptr<Request>> requests_;  // looked up by handle, never walked
    Request* oldest_ = nullptr;  // the live, by age
    Request* newest_ = nullptr;
    std::vector<Request*> residents_;        // own a bundle and are not ending, in the order of admission; with gaps
    std::int64_t resident_count_ = 0;
    std::set<Request*, LineOrder> waiting_;  // in state Submitted
    std::set<Request*, AgeOrder> refused_;   // of those, refused for capacity
    std::set<Request*, LineOrder> to_look_up_;    // of those, not yet looked up in the storage
    std::set<Request*, AgeOrder> prefetching_;    // in state Prefetching
    std::set<Request*, RestoreOrder> retracted_;  // in state Retracted
    std::int64_t retracted_waiting_ = 0;     // retracted ones that are not running again, image or not
    std::vector<Request*> broken_;
    std::vector<PlanAbort> aborts_;          // found between rounds
    std::deque<Outstanding> outstanding_;
    std::map<std::int64_t, Pending> pending_;
    std::vector<CacheOperation> outbox_;     // operations found between rounds
    std::deque<Publication> puts_;           // host blocks that the storage may not have
    std::int32_t storage_operations_ = 0;
    std::deque<Decision> decisions_;
    bool prompts_turn_ = false;  // the budget cut a resident prompt in the last round
    std::int64_t round_ = 0;
    std::int64_t now_ = 0;
    std::int64_t next_age_ = 0;
    std::int64_t next_epoch_ = 0;
    std::int64_t last_forward_id_ = 0;
    std::int64_t last_op_id_ = 0;
    std::int64_t evictions_seen_ = 0;
    std::vector<std::int64_t> no_promises_;  // zero for every group
    Counters counters_;
    double time_ = 0;
    std::optional<LineStop> line_stop_;
    std::vector<Note> notes_;
    std::deque<Ended> ended_;
};

}  // namespace tokenspeed
