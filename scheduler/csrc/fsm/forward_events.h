// The events of every role: scheduling, results, retraction, the end.
#pragma once

#include <optional>
#include <utility>

#include "fsm/forward_states.h"
#include "fsm/pd_states.h"

namespace tokenspeed::fsm {

// What a state becomes that gives up its bundle now, or once what is out against it has landed.
template <typename Result, Role R>
Result end_of(ForwardResources&& bundle) {
    if (bundle.quiet()) return Finished<R>(std::move(bundle).give_back());
    return Finishing<R>(std::move(bundle));
}

// The next `input_len` tokens of the prompt are computed. From Submitted the grant brings the row and the first blocks,
// `cached` tokens of them out of the prefix cache.
struct SchedulePrefillEvent {
    static constexpr EventId id = EventId::SchedulePrefill;

    Grant grant;
    std::int32_t input_len = 0;
    bool completes = false;
    std::int32_t cached = 0;
    std::int32_t cached_pages = 0;

    template <typename Result, Role R>
    [[nodiscard]] Result step(Submitted<R>&&) && {
        // The pins of a storage fetch end here: what they protected was admitted with the grant.
        ForwardResources bundle(std::move(grant), cached, cached_pages);
        bundle.schedule(Grant{}, input_len);
        return successor<Result, R>(std::move(bundle));
    }
    template <typename Result, Role R>
    [[nodiscard]] Result step(Prefilling<R>&& state) && {
        ForwardResources bundle = std::move(state).take();
        bundle.schedule(std::move(grant), input_len);
        return successor<Result, R>(std::move(bundle));
    }

private:
    template <typename Result, Role R>
    Result successor(ForwardResources&& bundle) const {
        if (!completes) return Prefilling<R>(std::move(bundle));
        if constexpr (states_of(R).contains(StateId::PrefillAwaitingResult)) {
            return PrefillAwaitingResult<R>(std::move(bundle));
        } else {
            return PrefillDone<R>(std::move(bundle));
        }
    }
};

// The next token is computed (`input_len` of them where a draft is verified).
struct ScheduleDecodeEvent {
    static constexpr EventId id = EventId::ScheduleDecode;

    Grant grant;
    std::int32_t input_len = 1;

    template <typename Result, typename State>
    [[nodiscard]] Result step(State&& state) && {
        ForwardResources bundle = std::move(state).take();
        bundle.schedule(std::move(grant), input_len);
        return Decoding<std::remove_cvref_t<State>::role>(std::move(bundle));
    }
};

// A forward that was out against the bundle has landed; `first_token` where it brought the prompt's first token.
struct ResultLandedEvent {
    static constexpr EventId id = EventId::ResultLanded;

    bool first_token = false;

    template <typename Result, Role R>
    [[nodiscard]] Result step(Finishing<R>&& state) && {
        ForwardResources bundle = std::move(state).take();
        bundle.result_landed();
        return end_of<Result, R>(std::move(bundle));
    }
    template <typename Result, Role R>
      requires(states_of(R).contains(StateId::PrefillAwaitingResult))
    [[nodiscard]] Result step(PrefillAwaitingResult<R>&& state) && {
        ForwardResources bundle = std::move(state).take();
        bundle.result_landed();
        if (first_token) return PrefillDone<R>(std::move(bundle));
        return PrefillAwaitingResult<R>(std::move(bundle));
    }
    template <typename Result, typename State>
    [[nodiscard]] Result step(State&& state) && {
        state.resources().result_landed();
        return Result(std::in_place_type<std::remove_cvref_t<State>>, std::move(state));
    }
};

// Evicts a quiet request. With an image it is Retracted; without one it goes back into the line and computes again. So
// does a retracted one whose image is lost.
struct RetractEvent {
    static constexpr EventId id = EventId::Retract;

    std::optional<HostImage> image;
    std::int64_t epoch = 0;

    template <typename Result, Role R>
      requires(states_of(R).contains(StateId::Retracted))
    [[nodiscard]] Result step(Retracted<R>&& state) && {
        return Submitted<R>(std::move(state).take().give_back());
    }
    template <typename Result, typename State>
    [[nodiscard]] Result step(State&& state) && {
        using Left = std::remove_cvref_t<State>;
        Released released = std::move(state).take().give_back();
        if constexpr (states_of(Left::role).contains(StateId::Retracted)) {
            if (image) return Retracted<Left::role>(std::move(released), std::move(*image), Left::id, epoch);
        }
        return Submitted<Left::role>(std::move(released));
    }
};

// Begins to copy an image back into fresh blocks.
struct RestoreEvent {
    static constexpr EventId id = EventId::Restore;

    Grant grant;
    std::int32_t published_pages = 0;

    template <typename Result, Role R>
    [[nodiscard]] Result step(Retracted<R>&& state) && {
        const StateId resumes_in = state.resumes_in();
        const std::int32_t computed = state.image().computed();
        return Restoring<R>(ForwardResources(std::move(grant), computed, published_pages), std::move(state).take(),
                            resumes_in);
    }
};

// The copy has landed: the request goes on in the state it was retracted from, the image goes.
struct RestoreLandedEvent {
    static constexpr EventId id = EventId::RestoreLanded;

    template <typename Result, Role R>
    [[nodiscard]] Result step(Restoring<R>&& state) && {
        const StateId resumes_in = state.resumes_in();
        ForwardResources bundle = std::move(state).take();
        if (resumes_in == StateId::Prefilling) return Prefilling<R>(std::move(bundle));
        if (resumes_in == StateId::PrefillDone) return PrefillDone<R>(std::move(bundle));
        return Decoding<R>(std::move(bundle));
    }
    template <typename Result, Role R>
    [[nodiscard]] Result step(Finishing<R>&& state) && {
        return Finished<R>(std::move(state).take().give_back());
    }
};

// Looks blocks up in the storage and fills host blocks with what it has.
struct PrefetchEvent {
    static constexpr EventId id = EventId::Prefetch;

    HostPins pins;

    template <typename Result, Role R>
    [[nodiscard]] Result step(Submitted<R>&&) && {
        return Prefetching<R>(std::move(pins));
    }
};

// The storage answered, or its time is up; what was fetched stays pinned until the first chunk is admitted.
struct PrefetchLandedEvent {
    static constexpr EventId id = EventId::PrefetchLanded;

    template <typename Result, Role R>
    [[nodiscard]] Result step(Prefetching<R>&& state) && {
        return Submitted<R>(std::move(state).take());
    }
};

// The end of a request, by itself or because nobody wants it any more: the same in every state, so one base does both.
template <EventId Id>
struct EndEvent {
    static constexpr EventId id = Id;

    template <typename Result, Role R>
    [[nodiscard]] Result step(Submitted<R>&& state) && {
        return Finished<R>(std::move(state).give_back());
    }
    template <typename Result, Role R>
      requires(states_of(R).contains(StateId::Bootstrapping))
    [[nodiscard]] Result step(Bootstrapping<R>&& state) && {
        return Finished<R>(std::move(state).give_back());
    }
    template <typename Result, Role R>
    [[nodiscard]] Result step(Prefetching<R>&& state) && {
        return Finished<R>(std::move(state).take().give_back());
    }
    template <typename Result, Role R>
      requires(states_of(R).contains(StateId::Retracted))
    [[nodiscard]] Result step(Retracted<R>&& state) && {
        return Finished<R>(std::move(state).take().give_back());
    }
    template <typename Result, Role R>
      requires(states_of(R).contains(StateId::Restoring))
    [[nodiscard]] Result step(Restoring<R>&& state) && {
        ForwardResources bundle = std::move(state).take();
        return Finishing<R>(std::move(bundle), std::move(state).take_image());
    }
    template <typename Result, Role R>
      requires(states_of(R).contains(StateId::RemotePrefilling))
    [[nodiscard]] Result step(RemotePrefilling<R>&& state) && {
        return Finishing<R>(std::move(state).take());
    }
    template <typename Result, Role R>
    [[nodiscard]] Result step(Finishing<R>&& state) && {
        return Result(std::in_place_type<Finishing<R>>, std::move(state));
    }
    template <typename Result, typename State>
    [[nodiscard]] Result step(State&& state) && {
        return end_of<Result, std::remove_cvref_t<State>::role>(std::move(state).take());
    }
};

struct FinishEvent : EndEvent<EventId::Finish> {};
struct AbortEvent : EndEvent<EventId::Abort> {};

}  // namespace tokenspeed::fsm
