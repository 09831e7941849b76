// The twelve states, the events, and the one table that says which event leads from which state to which.
//
// Everything that has to know what is legal reads it from here: the constraint on apply() (apply.h), the run-time error
// InvalidTransition, the enums of the Python module, the diagram in docs/ and the dashboard's order of states.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tokenspeed::fsm {

enum class Role : std::uint8_t { Fused, Prefill, Decode };

enum class StateId : std::uint8_t {
    Bootstrapping,
    Submitted,
    Prefetching,
    Prefilling,
    RemotePrefilling,
    PrefillAwaitingResult,
    PrefillDone,
    Decoding,
    Retracted,
    Restoring,
    Finishing,
    Finished,
};
inline constexpr std::size_t kStateCount = 12;

enum class EventId : std::uint8_t {
    Bootstrapped,
    Prefetch,
    PrefetchLanded,
    SchedulePrefill,
    ScheduleRemotePrefill,
    RemotePrefillDone,
    ScheduleDecode,
    ResultLanded,
    Retract,
    Restore,
    RestoreLanded,
    Finish,
    Abort,
};
inline constexpr std::size_t kEventCount = 13;

inline constexpr std::array<std::string_view, kStateCount> kStateNames{
    "Bootstrapping", "Submitted",  "Prefetching", "Prefilling", "RemotePrefilling", "PrefillAwaitingResult",
    "PrefillDone",   "Decoding",   "Retracted",   "Restoring",  "Finishing",        "Finished",
};

inline constexpr std::array<std::string_view, kEventCount> kEventNames{
    "BootstrappedEvent",      "PrefetchEvent",       "PrefetchLandedEvent", "SchedulePrefillEvent",
    "ScheduleRemotePrefillEvent", "RemotePrefillDoneEvent", "ScheduleDecodeEvent", "ResultLandedEvent",
    "RetractEvent",           "RestoreEvent",        "RestoreLandedEvent",  "FinishEvent",
    "AbortEvent",
};

constexpr std::size_t index_of(StateId state) { return static_cast<std::size_t>(state); }
constexpr std::size_t index_of(EventId event) { return static_cast<std::size_t>(event); }
constexpr std::string_view name_of(StateId state) { return kStateNames[index_of(state)]; }
constexpr std::string_view name_of(EventId event) { return kEventNames[index_of(event)]; }

// A set of states as bits in the order of StateId.
class StateSet {
public:
    constexpr StateSet() = default;
    template <typename... States>
    constexpr explicit StateSet(StateId first, States... rest)
        : bits(static_cast<std::uint16_t>((bit(first) | ... | bit(rest)))) {}

    constexpr bool contains(StateId state) const { return (bits & bit(state)) != 0; }
    constexpr bool empty() const { return bits == 0; }
    constexpr std::size_t size() const { return static_cast<std::size_t>(std::popcount(bits)); }
    constexpr StateSet without(StateSet other) const { return from_bits(bits & ~other.bits); }
    constexpr StateSet intersect(StateSet other) const { return from_bits(bits & other.bits); }
    constexpr bool operator==(const StateSet&) const = default;

    std::uint16_t bits = 0;  // public, so that a set can be a template argument

private:
    static constexpr unsigned bit(StateId state) { return 1u << index_of(state); }
    static constexpr StateSet from_bits(unsigned bits) {
        StateSet set;
        set.bits = static_cast<std::uint16_t>(bits);
        return set;
    }
};

// What one event does in one state. There is no default: a state or an event without a decision in the table below is
// an array with a missing element of a type that cannot be made from nothing, hence a compile error.
class Decision {
public:
    constexpr explicit Decision(StateSet successors) : successors_(successors) {}
    constexpr StateSet successors() const { return successors_; }

private:
    StateSet successors_;
};

namespace table {

inline constexpr Decision no{StateSet{}};
template <typename... States>
constexpr Decision to(States... states) {
    return Decision{StateSet{states...}};
}
using enum StateId;
using Row = std::array<Decision, kEventCount>;

// One row a state, one column an event, both in the order of their enums.
inline constexpr std::array<Row, kStateCount> kTransitions{
    // Bootstrapping: the peer's handshake is pending; nothing is owned.
    Row{to(Submitted), no, no, no, no, no, no, no, no, no, no, to(Finished), to(Finished)},
    // Submitted
    Row{no, to(Prefetching), no, to(Prefilling, PrefillAwaitingResult, PrefillDone), to(RemotePrefilling), no, no, no, no,
        no, no, to(Finished), to(Finished)},
    // Prefetching: whatever the storage answered, and also a timeout, leads back into the line.
    Row{no, no, to(Submitted), no, no, no, no, no, no, no, no, to(Finished), to(Finished)},
    // Prefilling
    Row{no, no, no, to(Prefilling, PrefillAwaitingResult, PrefillDone), no, no, no, to(Prefilling),
        to(Submitted, Retracted), no, no, to(Finishing, Finished), to(Finishing, Finished)},
    // RemotePrefilling: the peer writes the blocks, so even an abort waits for its last word.
    Row{no, no, no, no, no, to(PrefillDone), no, no, no, no, no, to(Finishing), to(Finishing)},
    // PrefillAwaitingResult
    Row{no, no, no, no, no, no, to(Decoding), to(PrefillAwaitingResult, PrefillDone), no, no, no,
        to(Finishing, Finished), to(Finishing, Finished)},
    // PrefillDone
    Row{no, no, no, no, no, no, to(Decoding), to(PrefillDone), to(Submitted, Retracted), no, no,
        to(Finishing, Finished), to(Finishing, Finished)},
    // Decoding
    Row{no, no, no, no, no, no, to(Decoding), to(Decoding), to(Submitted, Retracted), no, no, to(Finishing, Finished),
        to(Finishing, Finished)},
    // Retracted: without its image (the copy failed) it goes back into the line and computes again.
    Row{no, no, no, no, no, no, no, no, to(Submitted), to(Restoring), no, to(Finished), to(Finished)},
    // Restoring: a copy is under way, so an abort waits for it.
    Row{no, no, no, no, no, no, no, no, no, no, to(Prefilling, PrefillDone, Decoding), to(Finishing), to(Finishing)},
    // Finishing: a second end is not an error; whatever is still out ends it.
    Row{no, no, no, no, no, to(Finished), no, to(Finishing, Finished), no, no, to(Finished), to(Finishing),
        to(Finishing)},
    // Finished
    Row{no, no, no, no, no, no, no, no, no, no, no, no, no},
};

}  // namespace table

constexpr StateSet all_states() {
    using enum StateId;
    return StateSet{Bootstrapping, Submitted, Prefetching, Prefilling, RemotePrefilling, PrefillAwaitingResult,
                    PrefillDone,   Decoding,  Retracted,   Restoring,  Finishing,        Finished};
}

// The states a deployment of this role can be in.
constexpr StateSet states_of(Role role) {
    using enum StateId;
    switch (role) {
        case Role::Fused:
            return all_states().without(StateSet{Bootstrapping, RemotePrefilling, PrefillAwaitingResult});
        case Role::Prefill:
            return all_states().without(StateSet{RemotePrefilling, Retracted, Restoring});
        case Role::Decode:
            return all_states().without(StateSet{PrefillAwaitingResult});
    }
    throw std::logic_error("a role without states");
}

constexpr StateSet successors(StateId state, EventId event) {
    return table::kTransitions[index_of(state)][index_of(event)].successors();
}

// The successors that exist in this role; none where the state itself does not.
constexpr StateSet successors(Role role, StateId state, EventId event) {
    return states_of(role).contains(state) ? successors(state, event).intersect(states_of(role)) : StateSet{};
}

// The states that own a device bundle (scheduler.md: five kinds of ownership).
constexpr bool owns_bundle(StateId state) {
    using enum StateId;
    return StateSet{Prefilling, RemotePrefilling, PrefillAwaitingResult, PrefillDone, Decoding, Restoring, Finishing}
        .contains(state);
}

// An event that the table does not allow in that state.
class InvalidTransition : public std::logic_error {
public:
    InvalidTransition(EventId event, StateId state, std::int64_t request)
        : std::logic_error(std::string(name_of(event)) + " is not allowed in state " + std::string(name_of(state)) +
                           " (request " + std::to_string(request) + ")"),
          event_(event),
          state_(state),
          request_(request) {}

    EventId event() const noexcept { return event_; }
    StateId state() const noexcept { return state_; }
    std::int64_t request() const noexcept { return request_; }

private:
    EventId event_;
    StateId state_;
    std::int64_t request_;
};

}  // namespace tokenspeed::fsm
