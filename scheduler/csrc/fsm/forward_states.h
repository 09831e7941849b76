// The states every role has. Each is move-only, says what it owns by its members, and can only be built from that.
#pragma once

#include <optional>
#include <utility>

#include "fsm/resources.h"
#include "fsm/states.h"

namespace tokenspeed::fsm {

// The states that own a device bundle, and nothing beside it.
template <Role R, StateId Id>
class BundleState {
public:
    static constexpr StateId id = Id;
    static constexpr Role role = R;

    explicit BundleState(ForwardResources&& bundle) : bundle_(std::move(bundle)) {}

    ForwardResources& resources() { return bundle_; }
    const ForwardResources& resources() const { return bundle_; }
    // Takes the bundle out of a state that is being left.
    [[nodiscard]] ForwardResources take() && { return std::move(bundle_); }

protected:
    ForwardResources bundle_;
};

// Waits for its first chunk; owns nothing but, perhaps, the host pins that a storage fetch just left.
template <Role R>
class Submitted {
public:
    static constexpr StateId id = StateId::Submitted;
    static constexpr Role role = R;

    // A request that never held anything.
    [[nodiscard]] static Submitted fresh() { return Submitted(Released{}); }
    // Back in line after it gave back what it held.
    explicit Submitted(Released&&) {}
    explicit Submitted(HostPins&& pins) : pins_(std::move(pins)) {}
    Submitted(Submitted&&) noexcept = default;
    Submitted& operator=(Submitted&&) noexcept = default;

    const std::optional<HostPins>& pins() const { return pins_; }
    [[nodiscard]] Released give_back() && { return pins_ ? std::move(*pins_).give_back() : Released{}; }

private:
    std::optional<HostPins> pins_;
};

template <Role R>
class Prefetching {
public:
    static constexpr StateId id = StateId::Prefetching;
    static constexpr Role role = R;

    explicit Prefetching(HostPins&& pins) : pins_(std::move(pins)) {}

    const HostPins& pins() const { return pins_; }
    [[nodiscard]] HostPins take() && { return std::move(pins_); }

private:
    HostPins pins_;
};

template <Role R>
class Prefilling : public BundleState<R, StateId::Prefilling> {
public:
    using BundleState<R, StateId::Prefilling>::BundleState;
};

template <Role R>
class PrefillDone : public BundleState<R, StateId::PrefillDone> {
public:
    using BundleState<R, StateId::PrefillDone>::BundleState;
};

template <Role R>
class Decoding : public BundleState<R, StateId::Decoding> {
public:
    using BundleState<R, StateId::Decoding>::BundleState;
};

// Evicted: not one device block is left (the token says so), every computed one lives in the image.
template <Role R>
  requires(states_of(R).contains(StateId::Retracted))
class Retracted {
public:
    static constexpr StateId id = StateId::Retracted;
    static constexpr Role role = R;

    Retracted(Released&&, HostImage&& image, StateId resumes_in, std::int64_t epoch)
        : image_(std::move(image)), resumes_in_(resumes_in), epoch_(epoch) {}

    const HostImage& image() const { return image_; }
    StateId resumes_in() const { return resumes_in_; }
    // Of all retractions, the how-manieth: the oldest is restored first.
    std::int64_t epoch() const { return epoch_; }
    [[nodiscard]] HostImage take() && { return std::move(image_); }

private:
    HostImage image_;
    StateId resumes_in_;
    std::int64_t epoch_;
};

// The image flows back into a bundle; neither may be given up before the copy has landed.
template <Role R>
  requires(states_of(R).contains(StateId::Restoring))
class Restoring : public BundleState<R, StateId::Restoring> {
public:
    Restoring(ForwardResources&& bundle, HostImage&& image, StateId resumes_in)
        : BundleState<R, StateId::Restoring>(std::move(bundle)), image_(std::move(image)), resumes_in_(resumes_in) {}

    const HostImage& image() const { return image_; }
    StateId resumes_in() const { return resumes_in_; }
    [[nodiscard]] HostImage take_image() && { return std::move(image_); }

private:
    HostImage image_;
    StateId resumes_in_;
};

// Ended, but a forward (or, with an image, a copy) is still out against the blocks.
template <Role R>
class Finishing : public BundleState<R, StateId::Finishing> {
public:
    using BundleState<R, StateId::Finishing>::BundleState;
    Finishing(ForwardResources&& bundle, HostImage&& image)
        : BundleState<R, StateId::Finishing>(std::move(bundle)), image_(std::move(image)) {}

    // The image whose copy is still out, or nullptr.
    const HostImage* held_image() const { return image_ ? &*image_ : nullptr; }

private:
    std::optional<HostImage> image_;
};

// Terminal; there is no way in without having given back what was held.
template <Role R>
class Finished {
public:
    static constexpr StateId id = StateId::Finished;
    static constexpr Role role = R;

    explicit Finished(Released&&) {}
    Finished(Finished&&) noexcept = default;
    Finished& operator=(Finished&&) noexcept = default;
};

}  // namespace tokenspeed::fsm
