// Random requests, ends and failures over random worlds, with the invariants checked after every call, tokens compared
// with what they must be, and two schedulers that must plan alike. The seed of a failure is in its message.
#include <random>

#include "check.h"
#include "engine.h"

using namespace tokenspeed;
using engine::Engine;

namespace {

bool same(const Plan& a, const Plan& b) { return a.digest() == b.digest(); }

void check_shape(const Plan& plan, const engine::ConfigOptions& options) {
    std::int64_t tokens = 0;
    int truncated = 0;
    for (std::size_t i = 0; i < plan.handle.size(); ++i) {
        tokens += plan.input_len[i];
        const bool prefill = plan.kind[i] == 0;
        if (i > 0) CHECK(plan.kind[i - 1] <= plan.kind[i]);
        // Cut by the budget: only the last prompt of a round. (A junction cut leaves the round open.)
        if (prefill && plan.samples[i] == 0 && options.window == 0 && options.checkpoint == 0) {
            ++truncated;
            CHECK(i + 1 == plan.handle.size() || plan.kind[i + 1] == 1);
        }
        if (!options.mixed) CHECK_EQ(plan.kind[i], plan.kind[0]);
    }
    CHECK(tokens <= options.budget);
    CHECK(truncated <= 1);
}

void run(unsigned seed, bool groups, bool tiers) {
    std::mt19937 random(seed);
    const auto draw = [&](int from, int to) {
        return from + static_cast<int>(random() % static_cast<unsigned>(to - from + 1));
    };
    engine::ConfigOptions options{.parents = draw(4, 30),
                                  .children = draw(1, 3),
                                  .granularity = draw(1, 4),
                                  .page = 0,
                                  .seqs = draw(1, 8),
                                  .budget = draw(1, 24),
                                  .model_len = draw(0, 1) == 0 ? 30 : 120,
                                  .overlap = draw(0, 1),
                                  .mixed = draw(0, 3) > 0,
                                  .prefix_cache = draw(0, 4) > 0,
                                  .headroom = draw(0, 1) == 0 ? 8 : 4096,
                                  .overtakes = draw(0, 3)};
    options.page = options.granularity * draw(1, 3);
    if (groups) {
        options.parents = draw(12, 40);
        options.full = draw(0, 4) > 0;
        options.window = draw(0, 2) > 0 || !options.full ? draw(1, 20) : 0;
        options.window_children = draw(1, 3);
        options.state_children = draw(1, 2);
        if (draw(0, 1) == 0) {
            options.checkpoint = options.page * draw(1, 2);
            options.budget += options.checkpoint;
        }
    }
    if (tiers) {
        options.host_parents = draw(0, 40);
        options.host_cache = draw(0, 2) > 0;
        options.storage = options.host_parents > 0 && options.host_cache && options.prefix_cache && draw(0, 1) == 0;
    }
    try {
        engine::config(options).validate();
    } catch (const std::invalid_argument&) {
        return;  // a pool too small for its groups
    }
    Engine plane(options), twin(options);
    const auto storage = std::make_shared<std::mt19937>(seed + 1), again = std::make_shared<std::mt19937>(seed + 1);
    // Some operations fail, the same for both.
    plane.device.fails = [storage](const CacheOperation&) { return (*storage)() % 12 == 0; };
    twin.device.fails = [again](const CacheOperation&) { return (*again)() % 12 == 0; };
    const auto shared = engine::prompt(60);
    for (int handle = 1, rounds = 0; handle <= 30 || plane.scheduler.has_work(); ++rounds) {
        CHECK(rounds < 5000);
        if (handle <= 30 && draw(0, 1) == 0) {
            const int length = draw(1, 16);
            std::vector<std::int32_t> tokens(shared.begin(), shared.begin() + draw(0, length));
            while (static_cast<int>(tokens.size()) < length) tokens.push_back(draw(0, 99));
            const SubmitOptions submit{
                .max_new_tokens = draw(1, 14), .declared = draw(0, 1) == 0, .priority = draw(0, 1)};
            try {
                plane.submit(handle, tokens, submit);
                twin.submit(handle, tokens, submit);
            } catch (const RequestRefused&) {
                CHECK(length + (submit.declared ? submit.max_new_tokens : 1) >
                      plane.scheduler.max_single_request_tokens());
            }
            ++handle;
        }
        if (draw(0, 14) == 0 && !plane.live.empty()) {
            const int victim = std::next(plane.live.begin(), draw(0, static_cast<int>(plane.live.size()) - 1))->first;
            const bool abort = draw(0, 1) == 0;
            plane.end(victim, abort);
            twin.end(victim, abort);
        }
        const auto plan = plane.round();
        check_shape(*plan, options);
        CHECK(same(*plan, *twin.round()));
    }
    while (plane.results_out()) {
        (void)plane.round();
        (void)twin.round();
    }
    plane.check_pool_whole();
    CHECK(plane.live.empty());
}

void run_all(unsigned from, unsigned count, bool groups, bool tiers) {
    for (unsigned seed = from; seed < from + count; ++seed) {
        try {
            run(seed, groups, tiers);
        } catch (const std::exception& error) {
            check::fail(__FILE__, __LINE__, "seed " + std::to_string(seed) + ": " + error.what());
        }
    }
}

}  // namespace

TEST(random_worlds_keep_every_invariant_and_every_token) { run_all(0, 120, false, false); }
TEST(so_do_worlds_of_several_groups) { run_all(1000, 200, true, false); }
TEST(so_do_worlds_with_a_host_and_a_storage_tier_whose_operations_may_fail) { run_all(2000, 200, false, true); }
TEST(so_do_worlds_of_several_groups_and_tiers) { run_all(3000, 300, true, true); }
