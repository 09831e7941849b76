// The events of a deployment that splits prefill from decode.
#pragma once

#include <utility>

#include "fsm/forward_states.h"
#include "fsm/pd_states.h"

namespace tokenspeed::fsm {

// The peer's handshake is done.
struct BootstrappedEvent {
    static constexpr EventId id = EventId::Bootstrapped;

    template <typename Result, Role R>
    [[nodiscard]] Result step(Bootstrapping<R>&& state) && {
        return Submitted<R>(std::move(state).give_back());
    }
};

// Decode role: the blocks of a whole prompt are handed to the peer, which fills `prompt_len` tokens of them.
struct ScheduleRemotePrefillEvent {
    static constexpr EventId id = EventId::ScheduleRemotePrefill;

    Grant grant;
    std::int32_t prompt_len = 0;
    std::int32_t cached_pages = 0;

    template <typename Result, Role R>
    [[nodiscard]] Result step(Submitted<R>&&) && {
        return RemotePrefilling<R>(ForwardResources(std::move(grant), prompt_len, cached_pages));
    }
};

// The peer wrote its last block (or gave up); nothing outside touches the bundle any more.
struct RemotePrefillDoneEvent {
    static constexpr EventId id = EventId::RemotePrefillDone;

    template <typename Result, Role R>
    [[nodiscard]] Result step(RemotePrefilling<R>&& state) && {
        return PrefillDone<R>(std::move(state).take());
    }
    template <typename Result, Role R>
    [[nodiscard]] Result step(Finishing<R>&& state) && {
        return Finished<R>(std::move(state).take().give_back());
    }
};

}  // namespace tokenspeed::fsm
