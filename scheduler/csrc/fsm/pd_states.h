// The states of a deployment that splits prefill from decode. Each exists only in the roles that can enter it.
#pragma once

#include "fsm/forward_states.h"

namespace tokenspeed::fsm {

// The peer's handshake is pending; nothing is owned.
template <Role R>
  requires(states_of(R).contains(StateId::Bootstrapping))
class Bootstrapping {
public:
    static constexpr StateId id = StateId::Bootstrapping;
    static constexpr Role role = R;

    [[nodiscard]] static Bootstrapping fresh() { return Bootstrapping(); }
    Bootstrapping(Bootstrapping&&) noexcept = default;
    Bootstrapping& operator=(Bootstrapping&&) noexcept = default;

    [[nodiscard]] Released give_back() && { return Released{}; }

private:
    Bootstrapping() = default;
};

// Decode role: the peer writes the blocks, so they are pinned by this very state.
template <Role R>
  requires(states_of(R).contains(StateId::RemotePrefilling))
class RemotePrefilling : public BundleState<R, StateId::RemotePrefilling> {
public:
    using BundleState<R, StateId::RemotePrefilling>::BundleState;
};

// Prefill role: the whole prompt is scheduled, its first token has not landed.
template <Role R>
  requires(states_of(R).contains(StateId::PrefillAwaitingResult))
class PrefillAwaitingResult : public BundleState<R, StateId::PrefillAwaitingResult> {
public:
    using BundleState<R, StateId::PrefillAwaitingResult>::BundleState;
};

}  // namespace tokenspeed::fsm
