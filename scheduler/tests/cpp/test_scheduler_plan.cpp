// What a round plans: chunks, budget, order, prefix hits, deltas, and what a refused admission leaves behind.
#include "check.h"
#include "engine.h"

using namespace tokenspeed;
using engine::Engine;
using engine::prompt;

namespace {

std::vector<int> rows(const IntArray& array) { return {array.begin(), array.end()}; }
using Rows = std::vector<int>;

}  // namespace

TEST(a_prompt_is_prefilled_in_chunks_over_many_rounds) {
    Engine plane({.budget = 8});
    plane.submit(1, prompt(20), {.max_new_tokens = 2});
    for (const auto& [from, length, samples] : {std::tuple{0, 8, 0}, {8, 8, 0}, {16, 4, 1}}) {
        const auto plan = plane.round();
        CHECK_EQ(plan->prefix_len.at(0), from);
        CHECK_EQ(plan->input_len.at(0), length);
        CHECK_EQ(plan->samples.at(0), samples);
        CHECK_EQ(plan->prompt_len.at(0), 20);
        CHECK_EQ(plan->starts.size(), static_cast<std::size_t>(from == 0));
        CHECK_EQ(plane.state(1), samples == 1 ? "PrefillDone" : "Prefilling");
    }
    const auto plan = plane.round();
    CHECK(rows(plan->kind) == Rows{1});
    CHECK_EQ(plan->prefix_len.at(0), 20);
    CHECK(!plane.scheduler.has_work());
    plane.check_pool_whole();
}

TEST(decodes_take_the_budget_first_and_one_truncated_prompt_is_the_last_prefill) {
    Engine plane({.parents = 64, .budget = 16});
    plane.submit(1, prompt(4, 1), {.max_new_tokens = 9});
    plane.round();
    for (const int handle : {2, 3, 4}) plane.submit(handle, prompt(7, handle), {.max_new_tokens = 9});
    const auto plan = plane.round();
    CHECK(rows(plan->handle) == (Rows{2, 3, 4, 1}));
    CHECK(rows(plan->kind) == (Rows{0, 0, 0, 1}));
    CHECK(rows(plan->input_len) == (Rows{7, 7, 1, 1}));
    CHECK(rows(plan->samples) == (Rows{1, 1, 0, 1}));
    plane.submit(5, prompt(3, 5), {.max_new_tokens = 9, .priority = 9});
    // The resident chunk comes before a new prompt, whatever its priority.
    const auto next = plane.round();
    CHECK(rows(next->handle) == (Rows{4, 5, 1, 2, 3}));
    CHECK(rows(next->input_len) == (Rows{6, 3, 1, 1, 1}));
}

TEST(new_prompts_go_by_priority_then_age) {
    Engine plane({.parents = 64, .seqs = 2});
    plane.submit(1, prompt(4, 1), {.max_new_tokens = 1, .priority = 0});
    plane.submit(2, prompt(4, 2), {.max_new_tokens = 1, .priority = 5});
    plane.submit(3, prompt(4, 3), {.max_new_tokens = 1, .priority = 0});
    plane.submit(4, prompt(4, 4), {.max_new_tokens = 1, .priority = -1});
    CHECK(rows(plane.round()->handle) == (Rows{2, 1}));
    CHECK(rows(plane.round()->handle) == (Rows{3, 4}));
}

TEST(without_mixing_decodes_run_only_where_no_prefill_did) {
    Engine plane({.parents = 64, .budget = 8, .mixed = false});
    plane.submit(1, prompt(4), {.max_new_tokens = 5});
    plane.round();
    plane.submit(2, prompt(12, 2), {.max_new_tokens = 5});
    CHECK(rows(plane.round()->handle) == Rows{2});
    CHECK(rows(plane.round()->handle) == Rows{2});
    CHECK(rows(plane.round()->handle) == (Rows{1, 2}));
}

TEST(a_steady_decode_sends_no_delta_and_a_new_block_sends_one) {
    Engine plane({});
    plane.submit(1, prompt(5), {.max_new_tokens = 8});
    const auto first = plane.round();
    CHECK(rows(first->tables[0].first_slot) == Rows{0});
    CHECK(rows(first->tables[0].count) == Rows{2});
    CHECK(rows(first->tables[0].version_from) == Rows{0});
    for (int position = 5; position < 8; ++position) CHECK(plane.round()->tables[0].row.empty());
    const auto grown = plane.round();
    CHECK(rows(grown->tables[0].first_slot) == Rows{2});
    CHECK(rows(grown->tables[0].version_from) == Rows{1});
    CHECK_EQ(grown->tables[0].ids.size(), 1u);
}

TEST(a_shared_prefix_is_hit_and_the_last_prompt_token_is_computed) {
    Engine plane({});
    plane.submit(1, prompt(16), {.max_new_tokens = 1});
    plane.run();
    plane.submit(2, prompt(16), {.max_new_tokens = 1});
    CHECK(rows(plane.round()->prefix_len) == Rows{12});
    plane.submit(3, prompt(17), {.max_new_tokens = 1});
    CHECK(rows(plane.round()->prefix_len) == Rows{16});
    plane.submit(4, prompt(17), {.max_new_tokens = 1, .name_space = "other"});
    CHECK(rows(plane.round()->prefix_len) == Rows{0});
    plane.submit(5, prompt(17), {.max_new_tokens = 1, .max_cached_prefix_tokens = 9});
    CHECK(rows(plane.round()->prefix_len) == Rows{8});
    const Snapshot snapshot = plane.scheduler.snapshot();
    CHECK_EQ(snapshot.prefix_hit_tokens, 12 + 16 + 8);
    CHECK_EQ(snapshot.prefix_query_tokens, 16 + 16 + 17 + 17 + 17);
}

TEST(a_page_of_several_blocks_is_hit_whole_or_not_at_all) {
    Engine plane({.parents = 6, .granularity = 2, .page = 6});
    plane.submit(1, prompt(7), {.max_new_tokens = 1});
    plane.run();
    CHECK_EQ(plane.scheduler.snapshot().groups[0].cached, 3);
    plane.submit(2, prompt(7), {.max_new_tokens = 1});
    CHECK(rows(plane.round()->prefix_len) == Rows{6});
    // Four fresh blocks evict the last block of the page: what is left of it is no hit.
    plane.submit(3, prompt(8, 9), {.max_new_tokens = 1});
    plane.run();
    plane.submit(4, prompt(7), {.max_new_tokens = 1});
    CHECK(rows(plane.round()->prefix_len) == Rows{0});
    plane.run();
}

TEST(equal_prompts_in_one_batch_end_up_on_the_same_blocks) {
    Engine plane({});
    plane.submit(1, prompt(8), {.max_new_tokens = 4});
    plane.submit(2, prompt(8), {.max_new_tokens = 4});
    plane.round();
    CHECK_EQ(plane.scheduler.snapshot().groups[0].held, 2);
    const auto plan = plane.round();
    // The redirected table is sent again from its first changed slot.
    CHECK(rows(plan->tables[0].first_slot) == (Rows{2, 0}));
    plane.run();
    plane.check_pool_whole();
}

TEST(nothing_is_published_before_its_forward_landed_nor_after_it_failed) {
    Scheduler scheduler(engine::config({.overlap = 1}));
    scheduler.submit(1, prompt(8), {.max_new_tokens = 4});
    const auto first = scheduler.plan();
    scheduler.submit(2, prompt(9), {.max_new_tokens = 4});
    const auto second = scheduler.plan();
    CHECK_EQ(second->prefix_len.at(0), 0);  // 1's blocks are not known yet
    scheduler.advance({ForwardResult{first->forward_id, {-1}, {1}}, Abort{1}});
    scheduler.submit(3, prompt(9), {.max_new_tokens = 4});
    CHECK_EQ(scheduler.plan()->prefix_len.at(0), 0);
    CHECK_EQ(scheduler.snapshot().groups[0].cached, 0);
    scheduler.check_invariants();
}

TEST(a_row_that_failed_and_that_nobody_ended_is_ended_by_the_scheduler) {
    Scheduler scheduler(engine::config());
    scheduler.submit(1, prompt(8), {.max_new_tokens = 4});
    const auto plan = scheduler.plan();
    scheduler.advance({ForwardResult{plan->forward_id, {-1}, {1}}});
    const auto next = scheduler.plan();
    CHECK_EQ(next->num_rows(), 0);
    CHECK_EQ(next->aborts.at(0).handle, 1);
    CHECK_EQ(next->aborts.at(0).reason, "failed");
    CHECK(!scheduler.has_work());
}

TEST(overlap_plans_a_first_decode_before_the_first_token_is_known) {
    Scheduler scheduler(engine::config({.overlap = 1}));
    scheduler.submit(1, prompt(6), {.max_new_tokens = 3});
    const auto prefill = scheduler.plan();
    const auto decode = scheduler.plan();
    CHECK_EQ(decode->num_rows(), 1);
    CHECK_EQ(decode->input_ids.at(0), -1);
    CHECK_EQ(decode->prefix_len.at(0), 6);
    CHECK_EQ(scheduler.plan()->num_rows(), 0);  // two results are out
    scheduler.advance({ForwardResult{prefill->forward_id, {7}, {}}});
    const auto last = scheduler.plan();
    CHECK_EQ(last->num_rows(), 1);
    scheduler.advance({ForwardResult{decode->forward_id, {8}, {}}});
    CHECK_EQ(scheduler.plan()->num_rows(), 0);  // three tokens are scheduled
    scheduler.advance({ForwardResult{last->forward_id, {9}, {}}, Finish{1}});
    CHECK(!scheduler.has_work());
}

TEST(without_overlap_a_known_token_is_sent_and_nothing_is_planned_over_a_result) {
    Scheduler scheduler(engine::config());
    scheduler.submit(1, prompt(6), {.max_new_tokens = 3});
    const auto prefill = scheduler.plan();
    CHECK_EQ(scheduler.plan()->num_rows(), 0);
    scheduler.advance({ForwardResult{prefill->forward_id, {77}, {}}});
    CHECK_EQ(scheduler.plan()->input_ids.at(0), 77);
}

TEST(results_are_idempotent_and_a_batch_is_validated_whole) {
    Scheduler scheduler(engine::config({.overlap = 1}));
    scheduler.submit(1, prompt(6), {.max_new_tokens = 5});
    const auto first = scheduler.plan(), second = scheduler.plan();
    const ForwardResult one{first->forward_id, {7}, {}}, two{second->forward_id, {8}, {}};
    CHECK_THROWS(std::invalid_argument, "2 tokens for a plan of 1 rows",
                 (scheduler.advance({one, ForwardResult{second->forward_id, {8, 9}, {}}}), 0));
    CHECK_THROWS(std::invalid_argument, "forward 1 has not reported yet", (scheduler.advance({Abort{1}, two}), 0));
    CHECK(scheduler.requests(1).at(0).state == fsm::StateId::Decoding);
    CHECK_EQ(scheduler.requests(1).at(0).generated_tokens, 0);
    scheduler.advance({one, one, two, two, ForwardResult{99, {1}, {}}, Finish{42}, Abort{43}});
    CHECK_EQ(scheduler.requests(1).at(0).generated_tokens, 2);
    CHECK_EQ(scheduler.snapshot().ignored_results, 5);
    scheduler.check_invariants();
}

TEST(an_end_with_a_forward_out_goes_through_finishing) {
    Scheduler scheduler(engine::config({.overlap = 1}));
    for (const bool abort : {false, true}) {
        scheduler.submit(1, prompt(6), {.max_new_tokens = 5});
        const auto first = scheduler.plan(), second = scheduler.plan();
        if (abort) {
            scheduler.advance({ForwardResult{first->forward_id, {7}, {}}, Abort{1}, Abort{1}});
        } else {
            scheduler.advance({ForwardResult{first->forward_id, {7}, {}}, Finish{1}, Abort{1}});
        }
        CHECK(scheduler.requests(1).at(0).state == fsm::StateId::Finishing);
        CHECK(scheduler.snapshot().groups[0].held > 0);
        CHECK_EQ(scheduler.plan()->num_rows(), 0);
        scheduler.advance({ForwardResult{second->forward_id, {8}, {}}});
        CHECK(!scheduler.has_work());
        CHECK_EQ(scheduler.snapshot().groups[0].held, 0);
        scheduler.check_invariants();
    }
}

TEST(what_can_never_fit_is_refused_with_both_figures) {
    Scheduler scheduler(engine::config({.parents = 10, .model_len = 200}));
    CHECK_EQ(scheduler.max_single_request_tokens(), 40);
    CHECK_THROWS(RequestRefused, "prompt (33 tokens) + max_new_tokens (8) = 41 tokens, more than the 40",
                 (scheduler.submit(1, prompt(33), {.max_new_tokens = 8}), 0));
    CHECK_THROWS(RequestRefused, "= 41 tokens, more than the 40",
                 (scheduler.submit(1, prompt(40), {.max_new_tokens = 8, .declared = false}), 0));
    scheduler.submit(1, prompt(39), {.max_new_tokens = 8, .declared = false});
    CHECK_THROWS(std::invalid_argument, "a request with this handle is alive",
                 (scheduler.submit(1, prompt(4), {.max_new_tokens = 1}), 0));
    CHECK_THROWS(std::invalid_argument, "the prompt is empty", (scheduler.submit(2, {}, {.max_new_tokens = 1}), 0));
    const std::vector<std::int32_t> negative{1, -5};
    CHECK_THROWS(std::invalid_argument, "token -5 at position 1",
                 (scheduler.submit(2, negative, {.max_new_tokens = 1}), 0));
}

TEST(at_exactly_the_bound_alone_a_request_completes) {
    for (const int overlap : {0, 1}) {
        for (const int length : {1, 20, 39}) {
            Engine plane({.parents = 10, .budget = 7, .overlap = overlap});
            plane.submit(1, prompt(length), {.max_new_tokens = 40 - length});
            plane.run();
            CHECK_EQ(plane.outputs.at(1).size(), static_cast<std::size_t>(40 - length));
            CHECK_EQ(plane.scheduler.snapshot().retractions, 0);
        }
    }
}

TEST(a_refused_admission_leaves_pool_index_and_request_as_they_were) {
    Engine plane({.parents = 10, .budget = 64});
    plane.submit(1, prompt(16), {.max_new_tokens = 20});
    plane.round();
    plane.submit(2, prompt(20), {.max_new_tokens = 8});  // shares four pages, but its own do not fit
    const GroupCounts before = plane.scheduler.snapshot().groups[0];
    plane.round();
    const GroupCounts after = plane.scheduler.snapshot().groups[0];
    CHECK_EQ(plane.row(2).reason, "capacity: short by 2 blocks");
    CHECK_EQ(after.held, before.held + 1);  // request 1's own next block
    CHECK_EQ(after.cached, before.cached);
    CHECK_EQ(plane.row(2).blocks, 0);
    plane.run();
    plane.check_pool_whole();
}

TEST(a_reserve_limits_new_prompts_but_holds_no_block) {
    Engine plane({.parents = 10});
    plane.submit(1, prompt(4, 1), {.max_new_tokens = 17});  // will write 20 tokens: 5 blocks
    plane.submit(2, prompt(4, 2), {.max_new_tokens = 18});  // 21 tokens: 6 blocks, one too many
    plane.submit(3, prompt(4, 3), {.max_new_tokens = 17});
    CHECK(rows(plane.round()->handle) == (Rows{1, 3}));
    CHECK_EQ(plane.scheduler.snapshot().groups[0].held, 2);
    plane.run();
    CHECK_EQ(plane.scheduler.snapshot().retractions, 0);
}

TEST(the_oldest_prompt_blocked_for_capacity_is_overtaken_only_so_often) {
    Engine plane({.parents = 12, .seqs = 4, .overtakes = 3});
    plane.submit(1, prompt(24, 1), {.max_new_tokens = 12});
    plane.round();
    plane.submit(2, prompt(40, 2), {.max_new_tokens = 4});
    int passed = 0;
    for (int handle = 3; handle < 30; ++handle) {
        plane.submit(handle, prompt(2, handle), {.max_new_tokens = 1});
        const auto plan = plane.round();
        if (plane.state(2) != "Submitted") break;
        for (const int started : plan->handle) passed += started > 2 ? 1 : 0;
        CHECK(passed <= 3);
    }
    CHECK_EQ(passed, 3);
    CHECK(plane.state(2) != "Submitted");
    plane.run();
}

TEST(blocked_prompts_are_not_planned_again_before_capacity_grew) {
    Engine plane({.parents = 10});
    plane.submit(1, prompt(20, 1), {.max_new_tokens = 20});
    plane.round();
    for (int handle = 2; handle < 6; ++handle) plane.submit(handle, prompt(8, handle), {.max_new_tokens = 8});
    for (int round = 0; round < 5; ++round) CHECK_EQ(plane.round()->num_rows(), 1);
    plane.run();
    CHECK_EQ(plane.outputs.size(), 5u);
}

TEST(a_wrong_configuration_is_refused_by_name) {
    const auto refused = [](const char* text, auto change) {
        SchedulerConfig config = engine::config();
        change(config);
        CHECK_THROWS(std::invalid_argument, text, Scheduler{config});
    };
    using Config = SchedulerConfig;
    refused("num_parents is 0", [](Config& c) { c.num_parents = 0; });
    refused("max_num_seqs is 0", [](Config& c) { c.max_num_seqs = 0; });
    refused("max_scheduled_tokens is 0", [](Config& c) { c.max_scheduled_tokens = 0; });
    refused("overlap_depth is 2", [](Config& c) { c.overlap_depth = 2; });
    refused("cache group 'full': block_granularity is 3", [](Config& c) { c.groups[0].block_granularity = 3; });
    refused("kind 'paged' is none of", [](Config& c) { c.groups[0].kind = "paged"; });
    refused("cache group 'full': sliding_window_tokens is 0", [](Config& c) { c.groups[0].kind = kSlidingWindow; });
    refused("cache group 'full': sliding_window_tokens is 8: a full_history group has none",
            [](Config& c) { c.groups[0].sliding_window_tokens = 8; });
    refused("cache group 'full': block_granularity is 4: a state group has none",
            [](Config& c) { c.groups[0].kind = kState; });
    const auto state = [](Config& c, int checkpoint) { c.groups.push_back({"state", kState, 0, 1, 0, checkpoint}); };
    refused("cache group 'state': checkpoint_granularity is 0", [&](Config& c) { state(c, 0); });
    refused("cache group 'state': checkpoint_granularity is 6: it must be a multiple of prefix_granularity 4",
            [&](Config& c) { state(c, 6); });
    // Known from the field: chunks smaller than the distance of checkpoints left none, in silence.
    refused("max_scheduled_tokens is 64: cache group 'state' needs at least its checkpoint_granularity 128",
            [&](Config& c) { state(c, 128); });
    refused("cache group 'full': group_id is used twice", [](Config& c) { c.groups.push_back(c.groups[0]); });
    refused("num_parents is 2: not even a request of two tokens", [&](Config& c) {
        state(c, 8);
        c.num_parents = 2;
    });
    refused("storage is on: it reads and writes host blocks", [](Config& c) { c.storage = true; });
    refused("host_parents is -1", [](Config& c) { c.host_parents = -1; });
    refused("storage_timeout_ticks is 0", [](Config& c) { c.storage_timeout_ticks = 0; });
}

TEST(more_decodes_than_the_budget_take_turns) {
    Engine plane({.parents = 32, .seqs = 6, .budget = 4});
    for (int handle = 1; handle <= 6; ++handle) plane.submit(handle, prompt(1, handle), {.max_new_tokens = 6});
    plane.run();
    CHECK_EQ(plane.outputs.size(), 6u);
}

TEST(short_prompts_are_served_while_a_long_one_is_computed) {
    for (const int overlap : {0, 1}) {
        Engine plane({.parents = 2000, .granularity = 64, .page = 64, .seqs = 16, .budget = 256, .model_len = 110000, .overlap = overlap});
        plane.submit(1, prompt(100000), {.max_new_tokens = 1});
        std::map<int, int> waited;
        int rounds = 0, next = 2;
        for (; plane.live.contains(1); ++rounds) {
            // One of up to 200 tokens every tenth round.
            if (rounds % 10 == 3) {
                plane.submit(next, prompt(20 + (37 * next) % 180, next), {.max_new_tokens = 3});
                waited[next++] = rounds;
            }
            const auto plan = plane.scheduler.plan();
            for (std::size_t i = 0; i < plan->handle.size(); ++i) {
                const auto found = waited.find(plan->handle[i]);
                if (found == waited.end()) continue;
                CHECK(rounds - found->second <= 2);  // in a chunk or two
                waited.erase(found);
            }
            // Too long for a device of token ids: any token will do.
            ForwardResult result{plan->forward_id, {}, {}};
            std::vector<Event> events;
            for (std::size_t i = 0; i < plan->handle.size(); ++i) {
                result.tokens.push_back(plan->samples[i] != 0 ? 3 : -1);
                if (plan->samples[i] == 0) continue;
                auto& request = plane.live[plan->handle[i]];
                request.output.push_back(3);
                if (static_cast<int>(request.output.size()) < request.limit) continue;
                events.push_back(Finish{plan->handle[i]});
                plane.live.erase(plan->handle[i]);
            }
            if (plan->num_rows() > 0) events.insert(events.begin(), result);
            plane.scheduler.advance(events);
        }
        CHECK(waited.size() <= 1);
        CHECK(rounds > 390 && rounds < 500);  // 391 chunks, and a tenth of the rounds shared
    }
}

TEST(two_long_prompts_take_turns_and_a_third_waits) {
    Engine plane({.parents = 200, .seqs = 6, .budget = 16});
    for (int handle = 1; handle <= 3; ++handle) plane.submit(handle, prompt(120, handle), {.max_new_tokens = 2});
    std::map<int, int> first_rows;
    for (int round = 0; round < 12; ++round) {
        const auto plan = plane.round();
        CHECK_EQ(plan->num_rows(), 1);
        ++first_rows[plan->handle[0]];
    }
    CHECK_EQ(first_rows.size(), 2u);
    CHECK(std::abs(first_rows[1] - first_rows[2]) <= 2);
    CHECK_EQ(plane.state(3), "Submitted");
    CHECK_EQ(plane.scheduler.explain(3).code, "line_held");
    plane.run();
    CHECK_EQ(plane.outputs.size(), 3u);
}

// Found by the random engine: each took the other's room in its turn, and neither was ever complete.
TEST(prompts_that_do_not_fit_together_are_computed_one_after_the_other) {
    for (const bool mixed : {false, true}) {
        for (const int overlap : {0, 1}) {
            Engine plane({.parents = 14, .granularity = 1, .page = 1, .seqs = 5, .budget = 1, .model_len = 40,
                          .overlap = overlap, .mixed = mixed, .prefix_cache = false, .headroom = 4, .overtakes = 2});
            plane.submit(1, prompt(8, 1), {.max_new_tokens = 6});
            plane.submit(2, prompt(9, 2), {.max_new_tokens = 5});
            plane.submit(3, prompt(7, 3), {.max_new_tokens = 20, .declared = false});
            plane.submit(4, prompt(12, 4), {.max_new_tokens = 2});
            plane.run(600);
            CHECK_EQ(plane.outputs.size() + plane.aborts.size(), 4u);
        }
    }
}
