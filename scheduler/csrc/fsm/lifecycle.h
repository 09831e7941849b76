// The life of one request in one role: the variant of its states, and dispatch where the state is known only at run time.
#pragma once

#include <concepts>
#include <stdexcept>
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

    // A life begins in line, or with a peer's handshake.
    template <typename State>
      requires(State::role == R && (State::id == StateId::Submitted || State::id == StateId::Bootstrapping))
    explicit Lifecycle(State&& state) : state_(std::forward<State>(state)) {}

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

    // The host image, or nullptr in a state that owns none.
    const HostImage* image() const noexcept {
        return std::visit(
            [](const auto& state) -> const HostImage* {
                if constexpr (requires { { state.image() } -> std::convertible_to<const HostImage&>; }) {
                    return &state.image();
                } else if constexpr (std::remove_cvref_t<decltype(state)>::id == StateId::Finishing) {
                    return state.held_image();
                } else {
                    return nullptr;
                }
            },
            state_);
    }
    // The host pins, or nullptr in a state that owns none.
    const cache::HostPins* pins() const noexcept {
        return std::visit(
            [](const auto& state) -> const cache::HostPins* {
                using State = std::remove_cvref_t<decltype(state)>;
                if constexpr (State::id == StateId::Prefetching) {
                    return &state.pins().pins();
                } else if constexpr (State::id == StateId::Submitted) {
                    return state.pins() ? &state.pins()->pins() : nullptr;
                } else {
                    return nullptr;
                }
            },
            state_);
    }

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

// The life of a request in the role its deployment has: which role is decided once, when it is made.
class AnyLifecycle {
public:
    explicit AnyLifecycle(Role role) : life_(begin(role)), id_(std::visit([](const auto& l) { return l.id(); }, life_)) {}
    AnyLifecycle(const AnyLifecycle&) = delete;
    AnyLifecycle& operator=(const AnyLifecycle&) = delete;

    StateId id() const noexcept { return id_; }
    template <StateId Id>
    bool is() const noexcept {
        return id_ == Id;
    }
    ForwardResources* bundle() noexcept { return bundle_; }
    const ForwardResources* bundle() const noexcept { return bundle_; }
    const HostImage* image() const noexcept {
        return std::visit([](const auto& life) { return life.image(); }, life_);
    }
    const cache::HostPins* pins() const noexcept {
        return std::visit([](const auto& life) { return life.pins(); }, life_);
    }

    // The pins a storage fetch fills; only of a request that is Prefetching.
    cache::HostPins* prefetch_pins() noexcept {
        return id_ == StateId::Prefetching ? const_cast<cache::HostPins*>(pins()) : nullptr;
    }

    template <typename Event>
    StateId dispatch(Event event, std::int64_t request) {
        std::visit([&](auto& life) { id_ = life.dispatch(std::move(event), request); }, life_);
        // Looked up once a transition, read many times a round.
        bundle_ = std::visit([](auto& life) { return life.bundle(); }, life_);
        return id_;
    }

private:
    using Variant = std::variant<Lifecycle<Role::Fused>, Lifecycle<Role::Prefill>, Lifecycle<Role::Decode>>;

    static Variant begin(Role role) {
        switch (role) {
            case Role::Fused:
                return Lifecycle<Role::Fused>(Submitted<Role::Fused>::fresh());
            case Role::Prefill:
                return Lifecycle<Role::Prefill>(Bootstrapping<Role::Prefill>::fresh());
            case Role::Decode:
                return Lifecycle<Role::Decode>(Bootstrapping<Role::Decode>::fresh());
        }
        throw std::logic_error("no such role");
    }

    Variant life_;
    StateId id_;
    ForwardResources* bundle_ = nullptr;
};

}  // namespace tokenspeed::fsm
