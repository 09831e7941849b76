// The table and the types agree: apply() compiles for exactly the pairs that the table allows, in every role.
#include "check.h"
#include "fsm/lifecycle.h"

using namespace tokenspeed::fsm;

namespace {

template <EventId Id>
struct EventType;
template <>
struct EventType<EventId::Bootstrapped> : std::type_identity<BootstrappedEvent> {};
template <>
struct EventType<EventId::Prefetch> : std::type_identity<PrefetchEvent> {};
template <>
struct EventType<EventId::PrefetchLanded> : std::type_identity<PrefetchLandedEvent> {};
template <>
struct EventType<EventId::SchedulePrefill> : std::type_identity<SchedulePrefillEvent> {};
template <>
struct EventType<EventId::ScheduleRemotePrefill> : std::type_identity<ScheduleRemotePrefillEvent> {};
template <>
struct EventType<EventId::RemotePrefillDone> : std::type_identity<RemotePrefillDoneEvent> {};
template <>
struct EventType<EventId::ScheduleDecode> : std::type_identity<ScheduleDecodeEvent> {};
template <>
struct EventType<EventId::ResultLanded> : std::type_identity<ResultLandedEvent> {};
template <>
struct EventType<EventId::Retract> : std::type_identity<RetractEvent> {};
template <>
struct EventType<EventId::Restore> : std::type_identity<RestoreEvent> {};
template <>
struct EventType<EventId::RestoreLanded> : std::type_identity<RestoreLandedEvent> {};
template <>
struct EventType<EventId::Finish> : std::type_identity<FinishEvent> {};
template <>
struct EventType<EventId::Abort> : std::type_identity<AbortEvent> {};

// One pair in one role: whether apply() exists is what the table says, and so is the type of its result.
template <Role R, StateId State, EventId Event>
constexpr bool pair_agrees() {
    using EventT = typename EventType<Event>::type;
    static_assert(EventT::id == Event);
    if constexpr (!states_of(R).contains(State)) {
        return successors(R, State, Event).empty();
    } else {
        using StateT = typename StateType<R, State>::type;
        static_assert(StateT::id == State && StateT::role == R);
        constexpr StateSet allowed = successors(State, Event).intersect(states_of(R));
        static_assert(CanApply<EventT, StateT> == !allowed.empty());
        if constexpr (!allowed.empty()) {
            using Result = decltype(apply(std::declval<EventT>(), std::declval<StateT>()));
            static_assert(std::is_same_v<Result, typename VariantOf<R, allowed.bits>::type>);
            static_assert(std::variant_size_v<Result> == allowed.size());
        }
        return true;
    }
}

template <Role R, std::size_t... Pairs>
constexpr bool all_pairs_agree(std::index_sequence<Pairs...>) {
    return (pair_agrees<R, static_cast<StateId>(Pairs / kEventCount), static_cast<EventId>(Pairs % kEventCount)>() &&
            ...);
}

using AllPairs = std::make_index_sequence<kStateCount * kEventCount>;
static_assert(all_pairs_agree<Role::Fused>(AllPairs{}));
static_assert(all_pairs_agree<Role::Prefill>(AllPairs{}));
static_assert(all_pairs_agree<Role::Decode>(AllPairs{}));

// What a fused deployment has no use for does not exist in it.
static_assert(std::variant_size_v<Lifecycle<Role::Fused>::Variant> == 9);
static_assert(!states_of(Role::Fused).contains(StateId::Bootstrapping));
static_assert(!states_of(Role::Fused).contains(StateId::RemotePrefilling));
static_assert(!states_of(Role::Fused).contains(StateId::PrefillAwaitingResult));

// Ownership moves; it is never copied, and moving cannot fail half way.
template <typename Type>
constexpr bool moves_only = std::is_nothrow_move_constructible_v<Type> && !std::is_copy_constructible_v<Type> &&
                            !std::is_copy_assignable_v<Type>;
static_assert(moves_only<ForwardResources> && moves_only<HostImage> && moves_only<HostPins> && moves_only<Released>);
static_assert(moves_only<Submitted<Role::Fused>> && moves_only<Prefetching<Role::Fused>>);
static_assert(moves_only<Prefilling<Role::Fused>> && moves_only<Decoding<Role::Fused>>);
static_assert(moves_only<Retracted<Role::Fused>> && moves_only<Restoring<Role::Fused>>);
static_assert(moves_only<Finishing<Role::Fused>> && moves_only<Finished<Role::Fused>>);

template <typename State>
concept HasTables = requires(State state) { state.resources().tables(); };
static_assert(HasTables<Prefilling<Role::Fused>> && HasTables<Finishing<Role::Fused>>);
static_assert(!HasTables<Submitted<Role::Fused>> && !HasTables<Retracted<Role::Fused>>);
static_assert(!HasTables<Finished<Role::Fused>> && !HasTables<Prefetching<Role::Fused>>);

}  // namespace

TEST(decodes_are_scheduled_from_exactly_three_states) {
    StateSet from;
    for (std::size_t state = 0; state < kStateCount; ++state) {
        const auto id = static_cast<StateId>(state);
        if (!successors(id, EventId::ScheduleDecode).empty()) from.bits |= StateSet{id}.bits;
    }
    CHECK(from == (StateSet{StateId::PrefillAwaitingResult, StateId::PrefillDone, StateId::Decoding}));
}

TEST(neither_abort_nor_finish_is_ever_refused_while_a_request_lives) {
    for (std::size_t state = 0; state < kStateCount; ++state) {
        const auto id = static_cast<StateId>(state);
        for (const EventId event : {EventId::Abort, EventId::Finish}) {
            CHECK_EQ(successors(id, event).empty(), id == StateId::Finished);
        }
        CHECK(successors(id, EventId::Abort) == successors(id, EventId::Finish));
    }
}

TEST(every_state_is_reached_and_every_one_but_finished_is_left) {
    StateSet reached{StateId::Submitted, StateId::Bootstrapping};  // where requests begin
    for (std::size_t state = 0; state < kStateCount; ++state) {
        bool left = false;
        for (std::size_t event = 0; event < kEventCount; ++event) {
            const StateSet next = successors(static_cast<StateId>(state), static_cast<EventId>(event));
            reached.bits |= next.bits;
            left = left || !next.without(StateSet{static_cast<StateId>(state)}).empty();
        }
        CHECK_EQ(left, static_cast<StateId>(state) != StateId::Finished);
    }
    CHECK(reached == all_states());
}

TEST(nothing_with_a_forward_out_can_end_at_once_or_be_retracted_into_the_line_by_a_result) {
    // A result never takes blocks away from a request that goes on.
    for (const StateId state : {StateId::Prefilling, StateId::PrefillDone, StateId::Decoding}) {
        CHECK(successors(state, EventId::ResultLanded) == StateSet{state});
    }
    // While a peer or a copy is at work, an end must wait for it.
    for (const StateId state : {StateId::RemotePrefilling, StateId::Restoring}) {
        CHECK(successors(state, EventId::Abort) == StateSet{StateId::Finishing});
    }
}

TEST(an_illegal_event_at_run_time_names_event_state_and_request_and_changes_nothing) {
    Lifecycle<Role::Fused> life(Submitted<Role::Fused>::fresh());
    CHECK_THROWS(InvalidTransition, "ScheduleDecodeEvent is not allowed in state Submitted (request 7)",
                 life.dispatch(ScheduleDecodeEvent{}, 7));
    CHECK(life.id() == StateId::Submitted);
    try {
        life.dispatch(RestoreLandedEvent{}, 9);
        CHECK(false);
    } catch (const std::logic_error& error) {
        const auto& invalid = dynamic_cast<const InvalidTransition&>(error);
        CHECK(invalid.event() == EventId::RestoreLanded && invalid.state() == StateId::Submitted);
        CHECK_EQ(invalid.request(), 9);
    }
    CHECK(life.dispatch(AbortEvent{}, 7) == StateId::Finished);
    CHECK_THROWS(InvalidTransition, "AbortEvent is not allowed in state Finished", life.dispatch(AbortEvent{}, 7));
}
