// The events that can be dealt to an engine (dealer.h), as bytes, and which of them are possible now. Submissions are the
// test's own.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "dealer.h"

namespace dealer {

enum class Deal : std::uint8_t {
    Submit,       // + request
    Finish,       // + request
    Abort,        // + request
    Plan,
    Land,         // the oldest result
    LandFailing,  // + row of it that fails
    LandLosing,   // + row of it that brings no token
    Repeat,       // a result that landed
    LandEarly,    // the newest result before the oldest
    Done,         // + operation that is out, the oldest is 0
    DoneFailing,  // + operation whose first block fails
    RepeatDone,   // an operation that ended
    Bootstrap,
    Peer,
    PeerFails,
};

inline constexpr int kDealt = 16;  // indices an event can have
inline constexpr std::array<std::string_view, 15> kDealNames{
    "submit", "finish",     "abort",         "plan",         "land",      "land, failing row", "land, losing row", "repeat result",
    "land early", "done", "done, failing", "repeat done", "bootstrap", "peer done",         "peer fails"};

inline char dealt(Deal deal, int index = 0) { return static_cast<char>(static_cast<int>(deal) * kDealt + index); }
inline Deal deal_of(char event) { return static_cast<Deal>(static_cast<unsigned char>(event) / kDealt); }
inline int index_of(char event) { return static_cast<unsigned char>(event) % kDealt; }

inline std::string describe(std::string_view way) {
    std::string text;
    for (const char event : way) {
        if (!text.empty()) text += "; ";
        text += std::string(kDealNames[static_cast<std::size_t>(deal_of(event))]);
        if (index_of(event) > 0 || deal_of(event) <= Deal::Abort) text += " " + std::to_string(index_of(event));
    }
    return text;
}

// Everything but Submit. Finish and Abort of request i are of handle i + 1.
inline void deal(Engine& plane, char event) {
    const int index = index_of(event);
    switch (deal_of(event)) {
        case Deal::Submit: check::fail(__FILE__, __LINE__, "a submission is the test's own");
        case Deal::Finish: return plane.end(index + 1, false);
        case Deal::Abort: return plane.end(index + 1, true);
        case Deal::Plan: return static_cast<void>(plane.step());
        case Deal::Land: return plane.land();
        case Deal::LandFailing: return plane.land(std::uint64_t{1} << index);
        case Deal::LandLosing: return plane.land(0, std::uint64_t{1} << index);
        case Deal::Repeat: return plane.repeat_result();
        case Deal::LandEarly: return plane.land_out_of_turn();
        case Deal::Done: return plane.acknowledge(plane.operations_out().at(static_cast<std::size_t>(index))->op_id);
        case Deal::DoneFailing:
            return plane.acknowledge(plane.operations_out().at(static_cast<std::size_t>(index))->op_id, 1);
        case Deal::RepeatDone: return plane.repeat_operation();
        case Deal::Bootstrap: return plane.bootstrap_next();
        case Deal::Peer: return plane.peer_done();
        case Deal::PeerFails: return plane.peer_done(true);
    }
}

// What may come from outside now, besides submissions and the ends of requests. An engine plans while no more results are
// out than its depth of overlap.
inline std::string possible(const Engine& plane, int overlap) {
    std::string events;
    if (static_cast<int>(plane.results_out()) <= overlap) events += dealt(Deal::Plan);
    if (plane.results_out() > 0) {
        events += dealt(Deal::Land);
        const Plan& oldest = plane.oldest_out();
        for (int row = 0; row < std::min<int>(oldest.num_rows(), kDealt); ++row) {
            events += dealt(Deal::LandFailing, row);
            if (oldest.samples[static_cast<std::size_t>(row)] != 0) events += dealt(Deal::LandLosing, row);
        }
    }
    if (plane.any_landed()) events += dealt(Deal::Repeat);
    if (plane.results_out() > 1) events += dealt(Deal::LandEarly);
    for (int operation = 0; operation < std::min<int>(static_cast<int>(plane.operations_out().size()), kDealt); ++operation) {
        events += dealt(Deal::Done, operation);
        events += dealt(Deal::DoneFailing, operation);
    }
    if (plane.any_done()) events += dealt(Deal::RepeatDone);
    if (plane.bootstraps_out() > 0) events += dealt(Deal::Bootstrap);
    if (plane.peers_out() > 0) {
        events += dealt(Deal::Peer);
        events += dealt(Deal::PeerFails);
    }
    return events;
}

}  // namespace dealer
