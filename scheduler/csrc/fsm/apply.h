// apply(event, state): the one way from a state to the next.
//
// It exists exactly for the pairs that the table allows; its result is the variant of the table's successors in the
// role of the state. What an event does in a state is the event's own function `step`; if that does not return those
// successors, apply does not compile.
#pragma once

#include <type_traits>
#include <utility>
#include <variant>

#include "fsm/forward_states.h"
#include "fsm/pd_states.h"
#include "fsm/states.h"

namespace tokenspeed::fsm {

// StateType<R, Id>::type: the type of a state in a role.
template <Role R, StateId Id>
struct StateType;
template <Role R>
struct StateType<R, StateId::Bootstrapping> : std::type_identity<Bootstrapping<R>> {};
template <Role R>
struct StateType<R, StateId::Submitted> : std::type_identity<Submitted<R>> {};
template <Role R>
struct StateType<R, StateId::Prefetching> : std::type_identity<Prefetching<R>> {};
template <Role R>
struct StateType<R, StateId::Prefilling> : std::type_identity<Prefilling<R>> {};
template <Role R>
struct StateType<R, StateId::RemotePrefilling> : std::type_identity<RemotePrefilling<R>> {};
template <Role R>
struct StateType<R, StateId::PrefillAwaitingResult> : std::type_identity<PrefillAwaitingResult<R>> {};
template <Role R>
struct StateType<R, StateId::PrefillDone> : std::type_identity<PrefillDone<R>> {};
template <Role R>
struct StateType<R, StateId::Decoding> : std::type_identity<Decoding<R>> {};
template <Role R>
struct StateType<R, StateId::Retracted> : std::type_identity<Retracted<R>> {};
template <Role R>
struct StateType<R, StateId::Restoring> : std::type_identity<Restoring<R>> {};
template <Role R>
struct StateType<R, StateId::Finishing> : std::type_identity<Finishing<R>> {};
template <Role R>
struct StateType<R, StateId::Finished> : std::type_identity<Finished<R>> {};

namespace detail {

// Collects the types of the states whose bit is set, from index I on, in the order of the table.
template <Role R, unsigned Bits, std::size_t I, typename... States>
struct Collect {
    static constexpr auto types() {
        if constexpr (I == kStateCount) {
            return std::type_identity<std::variant<States...>>{};
        } else if constexpr (((Bits >> I) & 1u) != 0) {
            return Collect<R, Bits, I + 1, States..., typename StateType<R, static_cast<StateId>(I)>::type>::types();
        } else {
            return Collect<R, Bits, I + 1, States...>::types();
        }
    }
};

}  // namespace detail

// The variant of the states of a set (its bits) in role R.
template <Role R, unsigned Bits>
struct VariantOf {
    using type = typename decltype(detail::Collect<R, Bits, 0>::types())::type;
};

template <typename State>
concept IsState = !std::is_reference_v<State> && requires {
    { State::id } -> std::convertible_to<StateId>;
    { State::role } -> std::convertible_to<Role>;
};

template <typename Event>
concept IsEvent = !std::is_reference_v<Event> && requires {
    { Event::id } -> std::convertible_to<EventId>;
};

template <typename Event, typename State>
concept Legal = IsEvent<Event> && IsState<State> && !successors(State::role, State::id, Event::id).empty();

template <typename Event, typename State>
  requires Legal<Event, State>
using Successors = typename VariantOf<State::role, successors(State::role, State::id, Event::id).bits>::type;

// Applies the event to a state that is being left (an rvalue; a state that stays is refused by the constraint).
template <typename Event, typename State>
  requires Legal<Event, State>
[[nodiscard]] Successors<Event, State> apply(Event event, State&& state) {
    using Result = Successors<Event, State>;
    static_assert(std::is_same_v<decltype(std::move(event).template step<Result>(std::move(state))), Result>,
                  "an event's step must return the table's successors");
    return std::move(event).template step<Result>(std::move(state));
}

// Whether apply() compiles for the pair: what static_asserts compare with the table.
template <typename Event, typename State>
concept CanApply = requires(Event event, State state) { apply(std::move(event), std::move(state)); };

}  // namespace tokenspeed::fsm
