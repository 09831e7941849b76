// The life of one request in one role: the variant of its states, and dispatch where the state is known only at run time.
#pragma once

#include <type_traits>
#include <utility>
#include <variant>

#include "fsm/apply.h"
#include "fsm/forward_events.h"
#include "fsm/pd_events.h"

namespace tokenspeed::fsm {

template <Role R>
class Lifecycle {
public:
    using Variant = typename VariantOf<R, states_of(R).bits>::type;

    explicit Lifecycle(Submitted<R>&& state) : state_(std::move(state)) {}

    StateId id() const noexcept {
        return std::visit([](const auto& state) { return std::remove_cvref_t<decltype(state)>::id; }, state_);
    }

    // Applies the event; returns the state it led to. Throws InvalidTransition, and is as it was, where the table does
    // not allow the event.
    template <typename Event>
    StateId dispatch(Event event, std::int64_t request) {
        std::visit(
            [&](auto& state) {
                using State = std::remove_cvref_t<decltype(state)>;
                if constexpr (Legal<Event, State>) {
                    auto next = apply(std::move(event), std::move(state));
                    std::visit([&](auto& successor) { become(std::move(successor)); }, next);
                } else {
                    throw InvalidTransition(Event::id, State::id, request);
                }
            },
            state_);
        return id();
    }

    // The device bundle, or nullptr in a state that owns none.
    ForwardResources* bundle() noexcept {
        return std::visit(
            [](auto& state) -> ForwardResources* {
                if constexpr (owns_bundle(std::remove_cvref_t<decltype(state)>::id)) {
                    return &state.resources();
                } else {
                    return nullptr;
                }
            },
            state_);
    }
    const ForwardResources* bundle() const noexcept { return const_cast<Lifecycle*>(this)->bundle(); }

    template <StateId Id>
    bool is() const noexcept {
        return std::holds_alternative<typename StateType<R, Id>::type>(state_);
    }

private:
    template <typename State>
    void become(State&& state) {
        state_ = std::forward<State>(state);
    }

    Variant state_;
};

}  // namespace tokenspeed::fsm
