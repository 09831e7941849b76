// Bounded exhaustive check: three requests, six blocks, and every order of events up to a depth.
//
// A scheduler cannot be copied, so a state is the way that leads to it: each way is played from the start. After every
// single event all invariants are checked, and each token that lands. Then the state itself is drained: everything that
// was submitted, and afterwards two more prompts, runs to its end, the tokens must be right and the pool whole. What the
// drain planned, together with what can be seen, is the state's fingerprint: states that look alike and go on alike are
// expanded once. So a state is only taken for another if no plan up to the end of either tells them apart.
//
// Breadth first, so every state is reached by a shortest way. TOKENSPEED_EXHAUSTIVE_DEPTH sets the depth and
// TOKENSPEED_EXHAUSTIVE_WORLD chooses the worlds whose name has that text.
#include <array>
#include <cstdlib>
#include <iostream>
#include <string>
#include <unordered_set>

#include "check.h"
#include "dealt_events.h"
#include "fold.h"

using namespace tokenspeed;
using dealer::Deal;
using dealer::dealt;
using dealer::Engine;

namespace {

constexpr int kRequests = 3;
struct Job {
    int shared;  // tokens of the prompt that are the same for all
    int own;
    SubmitOptions options;
};

struct World {
    const char* name;
    engine::ConfigOptions options;
    std::array<Job, kRequests> jobs;
    int depth;
    int opening = 0;  // rounds of the first two requests that come before the search
};

void submit(Engine& plane, const World& world, int request) {
    const Job& job = world.jobs[static_cast<std::size_t>(request)];
    auto tokens = engine::prompt(job.shared);
    for (int i = 0; i < job.own; ++i) tokens.push_back(500 + 10 * request + i);
    plane.submit(request + 1, tokens, job.options);
}

// What may happen after `way`; `plane` is where it led.
std::string choices(const World& world, const Engine& plane, const std::string& way) {
    std::string events;
    for (int request = 0; request < kRequests; ++request) {
        if (way.find(dealt(Deal::Submit, request)) == std::string::npos) {
            events += dealt(Deal::Submit, request);
        } else {
            events += dealt(Deal::Finish, request);
            events += dealt(Deal::Abort, request);
        }
    }
    return events + dealer::possible(plane, world.options.overlap);
}

// Runs everything to its end, and then prompts that hit what is cached and evict the rest. Returns what was planned.
void drain(Engine& plane, dealer::Fold& fold) {
    const auto run = [&] { plane.drain([&](const Plan& plan) { fold << plan; }, 200); };
    run();
    plane.check_pool_whole();
    const int room = static_cast<int>(plane.scheduler.max_single_request_tokens());
    plane.submit(kRequests + 1, engine::prompt(room - 1, 3), {.max_new_tokens = 1});
    plane.submit(kRequests + 2, engine::prompt(room / 2 + 1), {.max_new_tokens = 2});
    run();
    CHECK_EQ(plane.outputs.at(kRequests + 1).size(), 1u);
    const bool prefill = plane.scheduler.config().role == fsm::Role::Prefill;
    CHECK_EQ(plane.outputs.at(kRequests + 2).size(), prefill ? 1u : 2u);
    plane.check_pool_whole();
}

struct Visited {
    std::uint64_t fingerprint;
    std::string choices;
    Snapshot snapshot;
};

// What the ways into a world's states met, so that a world too roomy to mean anything is noticed.
struct Met {
    std::int64_t retractions = 0, restores = 0, evictions = 0, hits = 0, host_hits = 0, overtakes = 0;

    void note(const Snapshot& snapshot) {
        retractions += snapshot.retractions > 0 ? 1 : 0;
        restores += snapshot.restores > 0 ? 1 : 0;
        evictions += snapshot.evictions > 0 ? 1 : 0;
        hits += snapshot.prefix_hit_tokens > 0 ? 1 : 0;
        host_hits += snapshot.host_hit_tokens > 0 ? 1 : 0;
        overtakes += snapshot.overtakes > 0 ? 1 : 0;
    }
};

// Two submissions and some rounds: brings a search near to what it is about. A search to a depth of the caller's choice
// starts at nothing.
std::string opening(const World& world) {
    std::string way;
    if (world.opening > 0) way = {dealt(Deal::Submit, 0), dealt(Deal::Submit, 1)};
    for (int round = 0; round < world.opening; ++round) way += {dealt(Deal::Plan), dealt(Deal::Land)};
    return way;
}

Visited visit(const World& world, const std::string& way) {
    try {
        Engine plane(world.options);
        for (const char event : way) {
            if (dealer::deal_of(event) == Deal::Submit) {
                submit(plane, world, dealer::index_of(event));
            } else {
                dealer::deal(plane, event);
            }
        }
        dealer::Fold fold;
        fold << static_cast<std::int64_t>(plane.results_out()) << static_cast<std::int64_t>(plane.any_landed());
        fold << plane.scheduler;
        std::string next = choices(world, plane, way);
        fold << std::string_view(next);
        Snapshot snapshot = plane.scheduler.snapshot();
        drain(plane, fold);
        return {fold.value(), std::move(next), std::move(snapshot)};
    } catch (const std::exception& error) {
        check::fail(__FILE__, __LINE__, std::string(world.name) + ", after [" + dealer::describe(way) + "]: " + error.what());
    }
}

void explore(World world) {
    const char* chosen = std::getenv("TOKENSPEED_EXHAUSTIVE_WORLD");
    if (chosen != nullptr && std::string_view(world.name).find(chosen) == std::string_view::npos) return;
    if (const char* depth = std::getenv("TOKENSPEED_EXHAUSTIVE_DEPTH")) {
        world.depth = std::atoi(depth);
        world.opening = 0;
    }
    std::unordered_set<std::uint64_t> seen;
    const std::string start = opening(world);
    const Visited root = visit(world, start);
    seen.insert(root.fingerprint);
    std::vector<std::pair<std::string, std::string>> frontier{{start, root.choices}};
    std::size_t transitions = 0;
    Met met;
    for (int depth = 0; depth < world.depth; ++depth) {
        std::vector<std::pair<std::string, std::string>> next;
        for (const auto& [way, events] : frontier) {
            for (const char event : events) {
                ++transitions;
                std::string longer = way + event;
                Visited visited = visit(world, longer);
                if (!seen.insert(visited.fingerprint).second) continue;
                met.note(visited.snapshot);
                next.emplace_back(std::move(longer), std::move(visited.choices));
            }
        }
        frontier = std::move(next);
    }
    std::cout << world.name << ": depth " << world.depth << ", " << seen.size() << " states, " << transitions
              << " transitions, " << frontier.size() << " states at the edge; of the states, after a retraction "
              << met.retractions << ", a restore " << met.restores << ", an eviction " << met.evictions << ", a hit "
              << met.hits << ", a host hit " << met.host_hits << ", an overtaking " << met.overtakes << std::endl;
}

// Blocks of one token: the first two outgrow the pool and one of them has to give way; the third comes first in line.
World tight(const char* name, int overlap, bool prefix_cache, int depth) {
    return {.name = name,
            .options = {.parents = 6, .granularity = 1, .page = 1, .seqs = 3, .budget = 3, .model_len = 12,
                        .overlap = overlap, .prefix_cache = prefix_cache, .headroom = 2, .overtakes = 1},
            .jobs = {{{1, 1, {.max_new_tokens = 4, .declared = false}},
                      {1, 1, {.max_new_tokens = 4, .declared = false}},
                      {2, 1, {.max_new_tokens = 2, .priority = 1}}}},
            .depth = depth};
}

// Blocks of two tokens, pages of two blocks, and two rows for three requests: prompts that share a page, are cut by the
// budget, and end in the middle of a block.
World paged(const char* name, int overlap, int depth) {
    return {.name = name,
            .options = {.parents = 6, .granularity = 2, .page = 4, .seqs = 2, .budget = 4, .model_len = 12,
                        .overlap = overlap, .headroom = 4, .overtakes = 1},
            .jobs = {{{4, 1, {.max_new_tokens = 3, .declared = false}},
                      {4, 2, {.max_new_tokens = 4}},
                      {0, 7, {.max_new_tokens = 5, .declared = false}}}},
            .depth = depth};
}

// With a host pool: images of those that give way, and, with `host_cache`, written-back blocks; copies end in any order,
// or fail.
World with_host(World world, int opening, int host_parents, bool host_cache) {
    world.opening = opening;
    world.options.host_parents = host_parents;
    world.options.host_cache = host_cache;
    return world;
}

// A window or a state beside, or instead of, the full history.
World with_groups(World world, int parents, bool full, int window, int checkpoint) {
    world.options.parents = parents;
    world.options.full = full;
    world.options.window = window;
    world.options.checkpoint = checkpoint;
    return world;
}

World in_role(World world, fsm::Role role) {
    world.options.role = role;
    return world;
}

}  // namespace

TEST(a_tight_pool) { explore(tight("tight, overlap 0", 0, true, 9)); }
TEST(a_tight_pool_overlapped) { explore(tight("tight, overlap 1", 1, true, 8)); }
TEST(no_prefix_cache) { explore(tight("tight, overlap 0, no prefix cache", 0, false, 9)); }
TEST(no_prefix_cache_overlapped) { explore(tight("tight, overlap 1, no prefix cache", 1, false, 8)); }
TEST(pages) { explore(paged("pages, overlap 0", 0, 9)); }
TEST(pages_overlapped) { explore(paged("pages, overlap 1", 1, 8)); }
TEST(images) { explore(with_host(tight("images", 0, true, 7), 3, 4, false)); }
TEST(images_overlapped) { explore(with_host(tight("images, overlap 1", 1, true, 6), 3, 4, false)); }
TEST(host_cache) { explore(with_host(tight("host cache", 0, true, 5), 3, 4, true)); }
TEST(window) { explore(with_groups(tight("window alone", 0, true, 8), 6, false, 2, 0)); }
TEST(window_beside_history) { explore(with_groups(tight("window and history, overlap 1", 1, true, 7), 10, true, 2, 0)); }
TEST(state_beside_history) { explore(with_groups(tight("state and history", 0, true, 8), 9, true, 0, 2)); }
TEST(prefill_role) { explore(in_role(tight("prefill role", 0, true, 9), fsm::Role::Prefill)); }
TEST(decode_role) { explore(in_role(tight("decode role", 0, true, 9), fsm::Role::Decode)); }
