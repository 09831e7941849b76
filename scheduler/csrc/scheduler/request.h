// One live request: what it asked for, what is known of it, and the state that owns its resources.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cache/page_hash.h"
#include "fsm/lifecycle.h"
#include "scheduler/policy.h"
#include "scheduler/report.h"

namespace tokenspeed {

// Why a request got no row in the last round.
enum class WaitReason : std::uint8_t {
    None,
    Queued,           // its turn did not come
    NoRow,            // every row of the request pool is taken
    Budget,           // the round's tokens were spent
    Capacity,         // short by `figure` blocks of group `group`
    LineHeld,         // waits behind request `figure`, whose prompt is not complete
    Sealed,           // waits behind request `figure`, which was passed often enough
    ResultInFlight,   // its last result must land first
    Armed,            // left out so that it becomes quiet and can be retracted for request `figure`
    GenerationDone,   // all its tokens are scheduled; its end is awaited
    Operation,        // waits for operation `figure`
    Retracted,        // gave way to request `figure`
    Bootstrapping,    // the handshake with the peer is pending
    Peer,             // the peer writes or reads its blocks
};

struct Request {
    Request(std::int32_t handle_, std::int64_t age_, fsm::Role role) : handle(handle_), age(age_), life(role) {}

    std::int32_t handle;
    std::int64_t age;  // order of submission: the smaller, the older
    std::int32_t priority = 0;
    bool declared = true;
    std::int32_t max_new_tokens = 0;
    std::int32_t max_cached_prefix_tokens = -1;
    std::int32_t prompt_tokens = 0;

    std::vector<std::int32_t> tokens;  // the prompt and the output known so far
    std::int32_t prefill_len = 0;      // of what is prefilled: prompt, and after a retraction output too
    std::int32_t samples_scheduled = 0;
    bool broken = false;               // a row of it failed: it gets no further rows

    // Chained digests of its first pages, each computed once.
    cache::Digest root{};
    std::vector<cache::Digest> digests;

    fsm::AnyLifecycle life;
    double arrived = 0;
    Timeline timeline;  // never empty once it is submitted
    std::int32_t cached_tokens = 0;
    std::int32_t retractions = 0;
    std::int32_t junction = 0;         // where the chunk that crosses it ends; 0 for none
    bool begins = false;               // its next row is the first one in its pool row
    std::int64_t retraction_epoch = 0; // of all retractions, the how-manieth: a copy of what Retracted has
    bool remote = false;               // the peer is to report that it computed the prompt

    // Storage: whether it was looked up, since when it is, and what a fetch brought.
    bool looked_up = false;
    std::int64_t looked_up_at = 0;
    std::int64_t operation = 0;        // the one it waits for
    std::int32_t storage_tokens = 0;

    // Resident, by group: what the reserve lets it grow to, in tokens, and the blocks of that not yet held.
    struct Reserve {
        std::int64_t target_tokens = 0;
        std::int64_t outstanding = 0;
    };
    std::vector<Reserve> reserves;
    bool prepaid = false;  // the reserve covered its whole generation when it was admitted
    std::int64_t armed_in_round = -1;
    std::int64_t last_decode_round = -1;
    std::int64_t last_chunk_round = -1;

    // Waiting: what the last refusal for capacity saw, so that it is not planned again before something changed.
    struct Refusal {
        std::int64_t room = 0;    // weight that was not promised
        std::int64_t needed = 0;  // weight below which it cannot fit, unless others publish what it needs
        std::int64_t publications = 0;
    };
    std::optional<Refusal> refusal;
    std::int32_t overtaken = 0;

    WaitReason reason = WaitReason::Queued;
    std::int64_t figure = 0;
    std::size_t short_group = 0;

    // Neighbours among the live, by age.
    Request* older = nullptr;
    Request* newer = nullptr;

    std::int32_t generated() const { return static_cast<std::int32_t>(tokens.size()) - prompt_tokens; }
    std::int32_t known_tokens() const { return static_cast<std::int32_t>(tokens.size()); }
    bool generation_scheduled() const { return samples_scheduled >= max_new_tokens; }

    // The digest of page `page`; the tokens up to its end must be known.
    const cache::Digest& digest(std::int32_t page, std::int32_t page_tokens) {
        if (digests.capacity() == 0) digests.reserve(tokens.capacity() / static_cast<std::size_t>(page_tokens) + 1);
        while (static_cast<std::int32_t>(digests.size()) <= page) {
            const auto first = digests.size() * static_cast<std::size_t>(page_tokens);
            digests.push_back(cache::next_digest(
                digests.empty() ? root : digests.back(),
                std::span(tokens).subspan(first, static_cast<std::size_t>(page_tokens))));
        }
        return digests[static_cast<std::size_t>(page)];
    }
};

// The word for a reason in records and explanations.
const char* code_of(WaitReason reason);

// The order of the waiting line. A retracted request keeps its place.
struct LineOrder {
    bool operator()(const Request* a, const Request* b) const {
        return comes_before({a->priority, a->age}, {b->priority, b->age});
    }
};

struct AgeOrder {
    bool operator()(const Request* a, const Request* b) const { return a->age < b->age; }
};

struct RestoreOrder {
    bool operator()(const Request* a, const Request* b) const {
        return restores_before({a->generated() > 0, a->retraction_epoch}, {b->generated() > 0, b->retraction_epoch});
    }
};

}  // namespace tokenspeed
