// Who gives way when the pool is full, when, and for whom.
#include "check.h"
#include "engine.h"

using namespace tokenspeed;
using engine::Engine;
using engine::prompt;

namespace {

SubmitOptions undeclared(int limit, int priority = 0) {
    return {.max_new_tokens = limit, .declared = false, .priority = priority};
}

bool contains(const IntArray& handles, int handle) {
    return std::find(handles.begin(), handles.end(), handle) != handles.end();
}

}  // namespace

TEST(decodes_that_outgrow_the_pool_retract_and_lose_no_token) {
    for (const int overlap : {0, 1}) {
        Engine plane({.parents = 14, .seqs = 6, .overlap = overlap});
        for (int handle = 1; handle <= 6; ++handle) plane.submit(handle, prompt(9, handle), undeclared(24));
        plane.run();
        CHECK(plane.scheduler.snapshot().retractions > 0);
        CHECK_EQ(plane.outputs.size(), 6u);
        plane.check_pool_whole();
    }
}

TEST(the_victim_frees_most_blocks_and_the_grant_comes_in_the_same_round) {
    Engine plane({.parents = 9, .seqs = 3});
    plane.submit(1, prompt(16, 1), undeclared(30));  // 4 blocks, and a fifth for its first decode
    plane.submit(2, prompt(7, 2), undeclared(30));   // 2 blocks, a third for its second decode
    plane.round();
    plane.round();
    CHECK_EQ(plane.row(1).blocks + plane.row(2).blocks, 7);
    plane.submit(3, prompt(8, 3), {.max_new_tokens = 1});
    plane.round();
    CHECK_EQ(plane.scheduler.snapshot().groups[0].held, 8);
    // From here on the pool fills; whoever is blocked, the larger gives way.
    while (plane.scheduler.snapshot().retractions == 0) {
        const auto plan = plane.round();
        if (plane.scheduler.snapshot().retractions == 0) continue;
        CHECK_EQ(plane.state(1), "Submitted");
        CHECK_EQ(plane.row(1).retractions, 1);
        CHECK(contains(plan->handle, 2));
        CHECK(!contains(plan->handle, 1));
    }
    plane.run();
    plane.check_pool_whole();
}

TEST(a_victim_with_a_result_out_is_left_out_of_the_next_batch_and_then_taken) {
    Engine plane({.parents = 6, .seqs = 2, .overlap = 1});
    plane.submit(1, prompt(8, 1), undeclared(14));
    plane.submit(2, prompt(3, 2), undeclared(20));
    int armed = 0;
    while (plane.scheduler.snapshot().retractions == 0) {
        plane.round();
        for (const RequestRow& row : plane.scheduler.requests(9)) {
            armed += row.reason.starts_with("about to be retracted") ? 1 : 0;
        }
    }
    CHECK(armed > 0);
    plane.run();
    CHECK_EQ(plane.outputs.size(), 2u);
}

TEST(a_retracted_request_keeps_its_place_and_starts_again_with_its_output_as_prompt) {
    Engine plane({.parents = 8, .seqs = 2, .budget = 64, .prefix_cache = false});
    plane.submit(1, prompt(14, 1), undeclared(17));
    plane.submit(2, prompt(6, 2), undeclared(20));
    while (plane.scheduler.snapshot().retractions == 0) plane.round();
    const RequestRow before = plane.row(1);
    CHECK(before.generated_tokens > 0);
    CHECK_EQ(plane.state(1), "Submitted");
    plane.submit(3, prompt(4, 3), {.max_new_tokens = 1});
    for (;;) {
        const auto plan = plane.round();
        if (plane.state(1) == "Submitted") continue;
        const auto at = std::find(plan->handle.begin(), plan->handle.end(), 1) - plan->handle.begin();
        CHECK_EQ(plan->prompt_len.at(static_cast<std::size_t>(at)), 14 + before.generated_tokens);
        CHECK_EQ(plan->prefix_len.at(static_cast<std::size_t>(at)), 0);
        CHECK(contains(plan->starts, static_cast<int>(at)));
        break;
    }
    plane.run();
    CHECK_EQ(plane.outputs.at(1).size(), 17u);
}

TEST(prepaid_generations_are_not_retracted_for_others) {
    Engine plane({.parents = 10, .seqs = 3});
    plane.submit(1, prompt(8, 1), {.max_new_tokens = 13});  // 20 tokens: 5 blocks, all promised
    plane.submit(2, prompt(4, 2), undeclared(30));
    plane.submit(3, prompt(4, 3), undeclared(30));
    while (plane.state(1) != "gone") {
        plane.round();
        if (plane.state(1) != "gone") CHECK_EQ(plane.row(1).retractions, 0);
    }
    plane.run();
    CHECK_EQ(plane.outputs.size(), 3u);
}

TEST(a_new_prompt_makes_a_less_important_decode_give_way_once_and_nobody_before_it) {
    for (const int priority : {-1, 0, 5}) {
        Engine plane({.parents = 8, .seqs = 3});
        plane.submit(1, prompt(20, 1), undeclared(30, priority));
        plane.round();
        plane.submit(2, prompt(16, 2), {.max_new_tokens = 4});
        const auto first = plane.round();
        const auto second = plane.round();
        if (priority < 0) {
            CHECK(contains(first->handle, 2) || contains(second->handle, 2));
            CHECK_EQ(plane.row(1).retractions, 1);
        } else {
            CHECK_EQ(plane.row(1).retractions, 0);
            CHECK_EQ(plane.state(2), "Submitted");
        }
        plane.run();
        CHECK_EQ(plane.scheduler.snapshot().retractions, priority < 0 ? 1 : 0);
    }
}

TEST(a_lone_request_of_undeclared_length_that_outgrows_the_pool_is_ended_with_figures) {
    for (const int overlap : {0, 1}) {
        Engine plane({.parents = 4, .overlap = overlap});
        plane.submit(1, prompt(5), undeclared(100));
        plane.run();
        CHECK_EQ(plane.aborts.size(), 1u);
        CHECK_EQ(plane.aborts[0].reason, "capacity");
        CHECK(plane.aborts[0].detail.find("has grown to 17 tokens, and the KV cache holds 16") != std::string::npos);
        CHECK(plane.aborts[0].detail.find("max_new_tokens") != std::string::npos);
        plane.check_pool_whole();
    }
}

TEST(an_incomplete_prefill_gives_way_before_any_decode) {
    Engine plane({.parents = 9, .seqs = 4, .budget = 6});
    plane.submit(1, prompt(4, 1), undeclared(20));
    plane.submit(2, prompt(2, 2), undeclared(20));
    plane.round();
    plane.submit(3, prompt(28, 3), undeclared(4));
    while (plane.scheduler.snapshot().retractions == 0) plane.round();
    CHECK_EQ(plane.row(3).retractions, 1);
    plane.run();
    CHECK_EQ(plane.outputs.size(), 3u);
    plane.check_pool_whole();
}
