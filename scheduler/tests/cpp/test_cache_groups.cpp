// Several cache groups over one pool: windows that let go, states with checkpoints, joint hits and the junction cut.
#include "check.h"
#include "engine.h"

using namespace tokenspeed;
using engine::Engine;
using engine::prompt;

namespace {

constexpr engine::ConfigOptions kHybrid{.parents = 120, .budget = 64, .model_len = 400, .window = 12, .checkpoint = 8};

// Runs one prompt alone; returns what of it the cache gave.
int cached_after(Engine& plane, int handle, const std::vector<std::int32_t>& tokens, int limit = 2) {
    const std::int64_t before = plane.scheduler.snapshot().prefix_hit_tokens;
    plane.submit(handle, tokens, {.max_new_tokens = limit});
    plane.run();
    CHECK(plane.outputs.contains(handle));
    return static_cast<int>(plane.scheduler.snapshot().prefix_hit_tokens - before);
}

std::int64_t held(const Engine& plane, std::size_t group) { return plane.scheduler.snapshot().groups[group].held; }

}  // namespace

TEST(a_window_holds_a_constant_number_of_blocks_however_long_the_request) {
    Engine plane({.parents = 200, .model_len = 400, .window = 12});
    plane.submit(1, prompt(20), {.max_new_tokens = 300});
    std::int64_t most = 0;
    for (int round = 0; round < 290; ++round) {
        plane.round();
        if (round > 2) most = std::max(most, held(plane, 1));
    }
    CHECK(most <= 12 / 4 + 2);
    CHECK(held(plane, 0) > 70);
    plane.run();
    plane.check_pool_whole();
}

// Known from the field: a conversation of N turns kept a state block for every turn.
TEST(a_state_group_holds_at_most_its_input_and_its_live_block) {
    for (const int overlap : {0, 1}) {
        engine::ConfigOptions options = kHybrid;
        options.overlap = overlap;
        Engine plane(options);
        std::vector<std::int32_t> conversation = prompt(20);
        for (int turn = 1; turn <= 6; ++turn) {
            plane.submit(turn, conversation, {.max_new_tokens = 20});
            while (plane.scheduler.has_work() || plane.results_out()) {
                plane.round();
                // And one more while a forward that still reads the old input is out.
                CHECK(held(plane, 2) <= 2 + overlap);
            }
            const auto& output = plane.outputs.at(turn);
            conversation.insert(conversation.end(), output.begin(), output.end());
            for (int i = 0; i < 6; ++i) conversation.push_back(turn + i);
        }
        plane.check_pool_whole();
    }
}

// Else a prompt that is computed keeps a block that nothing reads, for as long as its peer takes to fetch the rest.
TEST(a_request_with_nothing_out_holds_its_live_state_alone) {
    Engine plane(kHybrid);
    plane.submit(1, prompt(20), {.max_new_tokens = 20});
    for (int round = 0; round < 19; ++round) {
        plane.round();
        CHECK_EQ(held(plane, 2), 1);
    }
    plane.run();
    // Of 39 computed tokens, the checkpoints behind 24 and 32, which the forwards after them began with.
    CHECK_EQ(plane.scheduler.snapshot().groups[2].cached, 2);
}

TEST(the_second_turn_of_a_conversation_starts_behind_the_last_checkpoint) {
    Engine plane(kHybrid);
    CHECK_EQ(cached_after(plane, 1, prompt(30), 20), 0);
    std::vector<std::int32_t> second = prompt(30);
    second.insert(second.end(), plane.outputs[1].begin(), plane.outputs[1].end());
    second.push_back(5);
    // 49 tokens were computed; the last checkpoint at a multiple of 8 that was passed is 48.
    CHECK_EQ(cached_after(plane, 2, second), 48);
}

// A prompt that is computed in one chunk leaves no checkpoint inside; where a second one branches off, one is made, and
// the third starts there in every group.
TEST(a_junction_cut_leaves_a_checkpoint_where_prompts_branch) {
    Engine plane(kHybrid);
    const auto branch = [](int tail) {
        std::vector<std::int32_t> tokens = prompt(36);
        for (int i = 0; i < 9; ++i) tokens.push_back(900 + tail);
        return tokens;
    };
    CHECK_EQ(cached_after(plane, 1, branch(1)), 0);
    plane.submit(2, branch(2), {.max_new_tokens = 2});
    const auto cut = plane.round();
    CHECK_EQ(cut->num_rows(), 1);
    CHECK_EQ(cut->input_len[0], 36);
    CHECK_EQ(cut->samples[0], 0);
    plane.run();
    CHECK_EQ(cached_after(plane, 3, branch(3)), 36);
}

TEST(a_junction_cut_does_not_close_the_round) {
    Engine plane(kHybrid);
    (void)cached_after(plane, 1, prompt(36));
    std::vector<std::int32_t> branch = prompt(32);
    branch.push_back(999);
    plane.submit(2, branch, {.max_new_tokens = 2});
    plane.submit(3, prompt(6, 7), {.max_new_tokens = 2});
    const auto plan = plane.round();
    CHECK_EQ(plan->num_rows(), 2);
    CHECK_EQ(plan->input_len[0], 32);
    CHECK_EQ(plan->input_len[1], 6);
    plane.run();
}

TEST(a_window_hit_needs_the_window_and_not_what_lies_before_it) {
    Engine plane({.parents = 60, .model_len = 300, .window = 8, .full = false});
    CHECK_EQ(cached_after(plane, 1, prompt(60)), 0);
    std::vector<std::int32_t> longer = prompt(60);
    longer.push_back(7);
    CHECK_EQ(cached_after(plane, 2, longer), 60);
    CHECK(plane.scheduler.snapshot().groups[0].cached < 60 / 4);
}

// The joint hit is the same whatever the order of the groups: the middle of three orders is compared block by block.
TEST(the_joint_hit_does_not_depend_on_the_order_of_the_groups) {
    std::vector<std::int64_t> hits;
    const CacheGroup full{"full", kFullHistory, 4, 1, 0, 0};
    const CacheGroup window{"window", kSlidingWindow, 2, 1, 7, 0};
    const CacheGroup state{"state", kState, 0, 1, 0, 8};
    for (const auto& groups : {std::vector{full, window, state}, std::vector{state, window, full},
                               std::vector{window, full, state}}) {
        SchedulerConfig config = engine::config({.parents = 150, .budget = 16, .model_len = 300});
        config.groups = groups;
        Scheduler scheduler(config);
        const auto run = [&](int handle, const std::vector<std::int32_t>& tokens) {
            scheduler.submit(handle, tokens, {.max_new_tokens = 1});
            while (scheduler.has_work()) {
                const auto plan = scheduler.plan();
                std::vector<Event> events{ForwardResult{plan->forward_id, {}, {}}};
                auto& result = std::get<ForwardResult>(events[0]);
                for (const std::int32_t samples : plan->samples) result.tokens.push_back(samples != 0 ? 3 : -1);
                if (!result.tokens.empty() && result.tokens.back() >= 0) events.push_back(Finish{handle});
                scheduler.advance(events);
                scheduler.check_invariants();
            }
            hits.push_back(scheduler.snapshot().prefix_hit_tokens);
        };
        run(1, prompt(50));
        std::vector<std::int32_t> branch = prompt(42);
        branch.resize(60, 990);
        run(2, branch);
        branch.resize(45);
        run(3, branch);
    }
    CHECK(std::vector(hits.begin(), hits.begin() + 3) == std::vector(hits.begin() + 3, hits.begin() + 6));
    CHECK(std::vector(hits.begin(), hits.begin() + 3) == std::vector(hits.begin() + 6, hits.end()));
    CHECK(hits[2] > 0);
}

// Known from the field: with a pool of about two windows a sharer of a prefix longer than the window never got on.
TEST(a_sharer_of_a_prefix_longer_than_the_window_gets_on_in_a_pool_of_two_windows) {
    for (const int overlap : {0, 1}) {
        Engine plane({.parents = 9, .budget = 16, .model_len = 300, .overlap = overlap, .window = 16, .full = false});
        plane.submit(1, prompt(60), {.max_new_tokens = 10});
        plane.submit(2, prompt(60), {.max_new_tokens = 10});
        plane.submit(3, prompt(41), {.max_new_tokens = 10});
        plane.run(400);
        CHECK_EQ(plane.outputs.size(), 3u);
        plane.check_pool_whole();
    }
}

// Known from the field: 1464 tokens in a window of 1024, sent twice each by two users.
TEST(a_a_b_b_beyond_the_window_are_four_right_answers) {
    Engine plane({.parents = 400, .granularity = 16, .page = 16, .budget = 256, .model_len = 2000, .window = 1024, .checkpoint = 64});
    for (int i = 0; i < 4; ++i) plane.submit(i + 1, prompt(1464, i / 2), {.max_new_tokens = 4});
    plane.run();
    CHECK(plane.outputs[1] == plane.outputs[2]);
    CHECK(plane.outputs[3] == plane.outputs[4]);
    CHECK(plane.outputs[1] != plane.outputs[3]);
}

// Known from the field: the chunk was longer than the distance of checkpoints, and nothing was ever used again.
TEST(chunks_end_at_checkpoints_so_that_long_prompts_are_used_again) {
    Engine plane({.parents = 3000, .granularity = 16, .page = 16, .budget = 2048, .model_len = 8000, .checkpoint = 384});
    plane.submit(1, prompt(5000), {.max_new_tokens = 1});
    const auto first = plane.round();
    CHECK_EQ(first->input_len[0], 5 * 384);
    plane.run();
    CHECK_EQ(cached_after(plane, 2, prompt(5000)), 10 * 384);
}

TEST(without_room_for_a_checkpoint_nobody_waits) {
    Engine plane({.parents = 7, .budget = 16, .model_len = 300, .checkpoint = 4, .full = false});
    for (int handle = 1; handle <= 3; ++handle) plane.submit(handle, prompt(10, handle), {.max_new_tokens = 30});
    plane.run();
    CHECK_EQ(plane.outputs.size(), 3u);
    CHECK_EQ(plane.scheduler.snapshot().retractions, 0);
    plane.check_pool_whole();
}

TEST(groups_of_different_geometry_share_the_parents) {
    Engine plane({.parents = 40,
                  .children = 3,
                  .budget = 32,
                  .model_len = 300,
                  .window = 10,
                  .checkpoint = 8,
                  .window_children = 2,
                  .state_children = 1});
    for (int handle = 1; handle <= 10; ++handle) {
        plane.submit(handle, prompt(20 + handle, handle % 3), {.max_new_tokens = 25, .declared = false});
    }
    plane.run();
    CHECK_EQ(plane.outputs.size(), 10u);
    plane.check_pool_whole();
}

TEST(the_bound_of_one_request_counts_every_group_and_is_exact) {
    for (const int parents : {9, 14, 23}) {
        const engine::ConfigOptions options{
            .parents = parents, .budget = 16, .model_len = 1000, .overlap = 1, .window = 6, .checkpoint = 8};
        Engine plane(options);
        const auto bound = static_cast<int>(plane.scheduler.max_single_request_tokens());
        // Full history, a window of 6 with one token out (seven span three blocks at most), and a state with its input.
        const auto needs = [](int tokens) { return (tokens + 3) / 4 + std::min(3, (tokens + 3) / 4) + 2; };
        CHECK(needs(bound) <= parents && needs(bound + 1) > parents);
        plane.submit(1, prompt(bound / 2), {.max_new_tokens = bound - bound / 2});
        plane.run();
        CHECK_EQ(plane.outputs.size(), 1u);
        CHECK_THROWS(RequestRefused, "more than the " + std::to_string(bound),
                     plane.scheduler.submit(2, prompt(bound), {.max_new_tokens = 1}));
    }
}

TEST(a_failed_row_leaves_no_state_behind) {
    Engine plane(kHybrid);
    plane.submit(1, prompt(16), {.max_new_tokens = 5});
    const auto plan = plane.scheduler.plan();
    // The whole of the prompt failed, on a page boundary, and the engine ends the request itself.
    plane.scheduler.advance({ForwardResult{plan->forward_id, {-1}, {1}}, Abort{1}});
    plane.live.erase(1);
    for (const GroupCounts& group : plane.scheduler.snapshot().groups) CHECK_EQ(group.cached, 0);
    CHECK_EQ(cached_after(plane, 2, prompt(16)), 0);
}
