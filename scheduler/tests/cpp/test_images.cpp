// Retract and restore: byte-exact images, what they cost, the order of coming back, and what happens without room.
#include <algorithm>

#include "check.h"
#include "engine.h"

using namespace tokenspeed;
using engine::Engine;
using engine::prompt;

namespace {

SubmitOptions undeclared(int limit) { return {.max_new_tokens = limit, .declared = false}; }

// Six requests that outgrow the pool.
void overfill(Engine& plane, int limit = 24) {
    for (int handle = 1; handle <= 6; ++handle) plane.submit(handle, prompt(9, handle), undeclared(limit));
}

// Rounds until somebody is Retracted; returns who.
int until_retracted(Engine& plane) {
    for (int round = 0; round < 200; ++round) {
        plane.round();
        for (const RequestRow& row : plane.scheduler.requests(100)) {
            if (row.state == fsm::StateId::Retracted) return row.handle;
        }
    }
    check::fail(__FILE__, __LINE__, "nobody was retracted");
}

}  // namespace

TEST(a_retracted_request_comes_back_with_the_same_tokens_and_computes_nothing_twice) {
    for (const int overlap : {0, 1}) {
        for (const bool groups : {false, true}) {
            for (const bool host_cache : {false, true}) {
                Engine plane({.parents = groups ? 20 : 14, .seqs = 6, .overlap = overlap, .window = groups ? 6 : 0,
                              .checkpoint = groups ? 8 : 0, .host_parents = 60, .host_cache = host_cache});
                overfill(plane);
                plane.run();
                const Snapshot snapshot = plane.scheduler.snapshot();
                CHECK_EQ(plane.outputs.size(), 6u);
                CHECK(snapshot.retractions > 0);
                CHECK_EQ(snapshot.restores, snapshot.retractions);
                CHECK(snapshot.image_blocks > 0);
                CHECK_EQ(snapshot.recomputed_tokens, 0);
                // Every token was computed once: the prompt and all outputs but the last.
                CHECK_EQ(plane.device.computed_tokens, 6 * (9 + 23));
                plane.check_pool_whole();
            }
        }
    }
}

// Who gives way right behind a checkpoint had two states until its last result landed: the image is of the later.
TEST(of_a_state_an_image_has_the_live_block_alone) {
    int behind_a_checkpoint = 0;
    for (const int overlap : {0, 1}) {
        for (const int parents : {18, 19, 20, 21, 22}) {
            Engine plane({.parents = parents, .seqs = 6, .overlap = overlap, .checkpoint = 4, .host_parents = 60,
                          .host_cache = false});
            plane.device.fails = [&](const CacheOperation& operation) {
                if (operation.kind != OperationKind::ImageSave) return false;
                CHECK_EQ(std::count(operation.group.begin(), operation.group.end(), 1), 1);
                const Engine::Live& request = plane.live.at(operation.handle);
                const std::size_t computed = request.prompt.size() + request.output.size() - 1;
                behind_a_checkpoint += computed % 4 == 1 ? 1 : 0;
                return false;
            };
            for (int handle = 1; handle <= 6; ++handle) plane.submit(handle, prompt(8 + handle, handle), undeclared(24));
            plane.run();
            CHECK_EQ(plane.outputs.size(), 6u);
            CHECK(plane.scheduler.snapshot().restores > 0);
            plane.check_pool_whole();
        }
    }
    CHECK(behind_a_checkpoint > 0);
}

TEST(what_the_host_tier_has_already_is_pinned_and_not_copied) {
    const auto image_blocks = [](bool host_cache) {
        Engine plane({.parents = 14, .seqs = 6, .host_parents = 60, .host_cache = host_cache});
        overfill(plane);
        (void)until_retracted(plane);
        return plane.scheduler.snapshot().image_blocks;
    };
    CHECK(image_blocks(true) < image_blocks(false));
}

TEST(without_room_for_an_image_the_request_computes_again) {
    Engine plane({.parents = 14, .seqs = 6, .host_parents = 1, .host_cache = false});
    overfill(plane);
    plane.run();
    const Snapshot snapshot = plane.scheduler.snapshot();
    CHECK_EQ(plane.outputs.size(), 6u);
    CHECK(snapshot.recomputed_tokens > 0);
    plane.check_pool_whole();
}

TEST(an_image_that_could_not_be_saved_is_computed_again) {
    Engine plane({.parents = 14, .seqs = 6, .host_parents = 60, .host_cache = false});
    plane.device.fails = [](const CacheOperation& o) { return o.kind == OperationKind::ImageSave; };
    overfill(plane);
    plane.run();
    CHECK_EQ(plane.outputs.size(), 6u);
    CHECK_EQ(plane.scheduler.snapshot().restores, 0);
    CHECK(plane.scheduler.snapshot().recomputed_tokens > 0);
    plane.check_pool_whole();
}

TEST(an_image_that_cannot_be_copied_back_ends_that_request_alone) {
    Engine plane({.parents = 14, .seqs = 6, .host_parents = 60, .host_cache = false});
    int failures = 0;
    plane.device.fails = [&](const CacheOperation& o) { return o.kind == OperationKind::Restore && failures++ == 0; };
    overfill(plane);
    plane.run();
    CHECK_EQ(plane.aborts.size(), 1u);
    CHECK_EQ(plane.aborts[0].reason, "failed");
    CHECK_EQ(plane.outputs.size(), 5u);
    plane.check_pool_whole();
}

// Known from the field: preempted A came back behind B and C that had waited less.
TEST(the_retracted_come_back_before_new_prompts_and_the_oldest_retraction_first) {
    Engine plane({.parents = 14, .seqs = 6, .host_parents = 60, .host_cache = false});
    overfill(plane);
    const int first = until_retracted(plane);
    for (int handle = 10; handle < 13; ++handle) plane.submit(handle, prompt(4, handle), undeclared(3));
    std::vector<int> order;
    std::map<int, std::string> before;
    while (plane.scheduler.has_work()) {
        plane.round();
        for (const RequestRow& row : plane.scheduler.requests(100)) {
            const std::string now(fsm::name_of(row.state));
            std::string& was = before[row.handle];
            if (was == "Retracted" && now != "Retracted") order.push_back(row.handle);
            if (row.handle >= 10 && now != "Submitted" && was != now && was.empty() == false && was == "Submitted") {
                order.push_back(row.handle);
            }
            was = now;
        }
    }
    CHECK(!order.empty());
    CHECK_EQ(order[0], first);
    plane.check_pool_whole();
}

TEST(a_restoring_request_is_no_victim_and_an_abort_waits_for_the_copy) {
    Engine plane({.parents = 14, .seqs = 6, .host_parents = 60, .host_cache = false});
    overfill(plane);
    const int victim = until_retracted(plane);
    Scheduler& scheduler = plane.scheduler;
    // Everybody else ends, so that it is restored; the copy is held back.
    for (int handle = 1; handle <= 6; ++handle) {
        if (handle != victim && plane.live.contains(handle)) plane.end(handle, true);
    }
    std::shared_ptr<const Plan> plan;
    for (int round = 0; round < 5 && plane.state(victim) != "Restoring"; ++round) {
        plan = scheduler.plan();
        if (plane.state(victim) == "Restoring") break;
        std::vector<Event> events = plane.device.execute(*plan);
        scheduler.advance(events);
    }
    CHECK_EQ(plane.state(victim), "Restoring");
    CHECK_EQ(plan->operations.size(), 1u);
    CHECK(plan->operations[0].kind == OperationKind::Restore);
    CHECK_EQ(scheduler.explain(victim).op_id, plan->operations[0].op_id);
    CHECK_EQ(scheduler.plan()->num_rows(), 0);
    CHECK(scheduler.snapshot().groups[0].pinned > 0);
    plane.end(victim, true);
    CHECK_EQ(plane.state(victim), "Finishing");
    CHECK(scheduler.snapshot().groups[0].held > 0);
    scheduler.advance(plane.device.execute(*plan));
    CHECK_EQ(plane.state(victim), "gone");
    scheduler.advance({OperationDone{plan->operations[0].op_id, {}}});  // a repeated acknowledgement
    scheduler.check_invariants();
    CHECK_EQ(scheduler.snapshot().groups[0].held, 0);
    CHECK_EQ(scheduler.snapshot().host[0].held, 0);
}

TEST(an_abort_while_retracted_returns_the_image) {
    Engine plane({.parents = 14, .seqs = 6, .host_parents = 60, .host_cache = false});
    overfill(plane);
    const int victim = until_retracted(plane);
    CHECK(plane.scheduler.snapshot().host[0].held > 0);
    plane.end(victim, true);
    CHECK_EQ(plane.state(victim), "gone");
    plane.run();
    plane.check_pool_whole();
}

// Known from the field: a full host pool lost blocks in the attempt.
TEST(retracting_into_a_full_host_pool_leaves_the_host_as_it_was) {
    Engine plane({.parents = 14, .seqs = 6, .host_parents = 3, .host_cache = false});
    overfill(plane);
    while (plane.scheduler.snapshot().retractions == 0) plane.round();
    CHECK_EQ(plane.scheduler.snapshot().host[0].free, 3);
    CHECK_EQ(plane.scheduler.snapshot().image_blocks, 0);
    plane.run();
    CHECK_EQ(plane.outputs.size(), 6u);
}

// Known from the field: after many retractions the free count had crept down.
TEST(a_thousand_retractions_leave_both_pools_whole) {
    Engine plane({.parents = 10, .seqs = 4, .model_len = 40, .host_parents = 20, .host_cache = false});
    int handle = 1;
    while (plane.scheduler.snapshot().retractions < 1000) {
        for (; plane.live.size() < 4; ++handle) plane.submit(handle, prompt(5, handle), undeclared(20));
        plane.round();
    }
    plane.run();
    plane.check_pool_whole();
    CHECK_EQ(plane.scheduler.snapshot().host[0].free, 20);
    CHECK_EQ(plane.scheduler.snapshot().recomputed_tokens, 0);
}

TEST(an_image_that_is_on_the_device_still_is_claimed_and_not_copied) {
    Engine plane({.parents = 14, .seqs = 2, .host_parents = 60});
    plane.submit(1, prompt(16, 1), undeclared(40));
    plane.submit(2, prompt(16, 2), undeclared(40));
    const int victim = until_retracted(plane);
    plane.end(3 - victim, true);
    std::size_t copied = 0;
    while (plane.scheduler.snapshot().restores == 0) {
        const auto plan = plane.round();
        for (const CacheOperation& operation : plan->operations) {
            if (operation.kind == OperationKind::Restore) copied += operation.size();
        }
    }
    CHECK(copied < 7);
    plane.run();
    CHECK(plane.outputs.contains(victim));
}
