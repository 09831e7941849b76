// The host and the storage tier: what is written back, what is hit, what a failure or a timeout does.
#include "check.h"
#include "engine.h"

using namespace tokenspeed;
using engine::Engine;
using engine::prompt;

namespace {

void run_one(Engine& plane, int handle, const std::vector<std::int32_t>& tokens, int limit = 2) {
    plane.submit(handle, tokens, {.max_new_tokens = limit});
    plane.run();
    CHECK(plane.outputs.contains(handle));
}

std::size_t count(const Plan& plan, OperationKind kind) {
    std::size_t found = 0;
    for (const CacheOperation& operation : plan.operations) found += operation.kind == kind ? 1 : 0;
    return found;
}

constexpr engine::ConfigOptions kHost{.parents = 14, .budget = 24, .host_parents = 60};
constexpr engine::ConfigOptions kStorage{.parents = 14, .budget = 24, .host_parents = 40, .storage = true};

}  // namespace

TEST(what_the_device_evicted_is_hit_in_the_host_tier) {
    for (const bool groups : {false, true}) {
        engine::ConfigOptions options = kHost;
        if (groups) {
            options.parents = 30;
            options.host_parents = 120;
            options.window = 6;
            options.checkpoint = 8;
        }
        Engine plane(options);
        run_one(plane, 1, prompt(30, 1), 8);
        for (int handle = 2; handle < 6; ++handle) run_one(plane, handle, prompt(40, handle));
        std::vector<std::int32_t> again = prompt(30, 1);
        again.insert(again.end(), plane.outputs[1].begin(), plane.outputs[1].end());
        again.push_back(3);
        const std::int64_t computed = plane.device.computed_tokens;
        run_one(plane, 9, again, 1);
        const Snapshot snapshot = plane.scheduler.snapshot();
        CHECK(snapshot.host_hit_tokens >= 24);
        CHECK(plane.device.computed_tokens - computed <= 15);
        plane.check_pool_whole();
    }
}

// Known from the field: a prefix that other load had evicted was hit all the same, and the text was wrong.
TEST(what_was_evicted_everywhere_is_no_hit) {
    engine::ConfigOptions options = kHost;
    options.host_parents = 12;
    Engine plane(options);
    run_one(plane, 1, prompt(40, 1));
    for (int handle = 2; handle < 8; ++handle) run_one(plane, handle, prompt(40, handle));
    const std::int64_t hits = plane.scheduler.snapshot().prefix_hit_tokens;
    run_one(plane, 9, prompt(40, 1));
    CHECK_EQ(plane.scheduler.snapshot().prefix_hit_tokens, hits);
}

TEST(only_an_acknowledged_copy_is_visible) {
    Engine plane(kHost);
    plane.device.fails = [](const CacheOperation& o) { return o.kind == OperationKind::WriteBack; };
    run_one(plane, 1, prompt(30, 1));
    CHECK_EQ(plane.scheduler.snapshot().host[0].cached, 0);
    CHECK_EQ(plane.scheduler.snapshot().host[0].free, 60);
    plane.device.fails = nullptr;
    run_one(plane, 2, prompt(30, 2));
    CHECK(plane.scheduler.snapshot().host[0].cached > 0);
}

TEST(a_load_that_fails_ends_its_request_and_publishes_nothing) {
    Engine plane(kHost);
    run_one(plane, 1, prompt(30, 1));
    for (int handle = 2; handle < 6; ++handle) run_one(plane, handle, prompt(40, handle));
    int failures = 0;
    plane.device.fails = [&](const CacheOperation& o) { return o.kind == OperationKind::LoadBack && failures++ == 0; };
    plane.submit(7, prompt(30, 1), {.max_new_tokens = 2});
    plane.run();
    CHECK_EQ(plane.aborts.size(), 1u);
    CHECK_EQ(plane.aborts[0].reason, "failed");
    run_one(plane, 8, prompt(30, 1));
    plane.check_pool_whole();
}

// Known from the field: aborted while its blocks were being loaded, they were freed twice or too early.
TEST(an_abort_while_host_blocks_are_loading_frees_them_once_at_the_end_of_the_load) {
    Engine plane(kHost);
    run_one(plane, 1, prompt(30, 1));
    for (int handle = 2; handle < 6; ++handle) run_one(plane, handle, prompt(40, handle));
    plane.submit(7, prompt(30, 1), {.max_new_tokens = 2});
    const auto plan = plane.scheduler.plan();
    CHECK_EQ(count(*plan, OperationKind::LoadBack), 1u);
    CHECK(plane.scheduler.snapshot().host[0].held > 0);
    plane.end(7, true);
    CHECK_EQ(plane.state(7), "Finishing");
    CHECK(plane.scheduler.snapshot().groups[0].held > 0);
    plane.scheduler.advance(plane.device.execute(*plan));
    plane.scheduler.check_invariants();
    CHECK_EQ(plane.state(7), "gone");
    plane.check_pool_whole();
    plane.submit(8, prompt(6), {.max_new_tokens = 2});
    plane.end(8, true);  // never scheduled
    plane.check_pool_whole();
}

TEST(an_acknowledgement_of_the_wrong_size_is_refused_and_changes_nothing) {
    Engine plane(kHost);
    plane.submit(1, prompt(30, 1), {.max_new_tokens = 9});
    std::shared_ptr<const Plan> plan;
    do {
        plan = plane.scheduler.plan();
        if (count(*plan, OperationKind::WriteBack) > 0) break;
        plane.scheduler.advance(plane.device.execute(*plan));
    } while (true);
    const std::int64_t op_id = plan->operations[0].op_id;
    CHECK_THROWS(std::invalid_argument, "entries in succeeded for an operation of",
                 plane.scheduler.advance({OperationDone{op_id, {1}}, Finish{1}}));
    CHECK(plane.state(1) != "gone");  // nothing of the batch applied
    plane.scheduler.advance({OperationDone{op_id + 100, {}}});  // unknown: ignored, counted
    CHECK_EQ(plane.scheduler.snapshot().ignored_results, 1);
}

TEST(a_restart_finds_in_the_storage_what_was_put_there) {
    for (const bool groups : {false, true}) {
        engine::ConfigOptions options = kStorage;
        if (groups) {
            options.parents = 30;
            options.window = 6;
            options.checkpoint = 8;
        }
        const auto disk = std::make_shared<engine::Storage>();
        std::vector<std::int32_t> conversation = prompt(30, 1);
        {
            Engine before(options, disk);
            run_one(before, 1, conversation, 8);
            conversation.insert(conversation.end(), before.outputs[1].begin(), before.outputs[1].end());
            conversation.push_back(3);
        }
        CHECK(!disk->empty());
        Engine after(options, disk);
        run_one(after, 2, conversation);
        CHECK(after.scheduler.snapshot().storage_hit_tokens >= 32);
        CHECK(after.device.computed_tokens <= 9);
        after.check_pool_whole();
    }
}

TEST(prefetching_keeps_its_place_and_does_not_hold_the_line) {
    Engine plane(kStorage);
    plane.submit(1, prompt(30, 1), {.max_new_tokens = 2});
    plane.submit(2, prompt(30, 2), {.max_new_tokens = 2});
    const auto plan = plane.scheduler.plan();
    CHECK_EQ(count(*plan, OperationKind::StorageQuery), 2u);
    CHECK_EQ(plane.state(1), "Prefetching");
    CHECK_EQ(plane.scheduler.explain(1).code, "operation");
    // Only the second answer is there: it goes first.
    plane.scheduler.advance({OperationDone{plan->operations[1].op_id, std::vector<std::uint8_t>(plan->operations[1].size(), 0)}});
    const auto second = plane.scheduler.plan();
    CHECK_EQ(second->handle[0], 2);
    CHECK_EQ(plane.state(1), "Prefetching");
    plane.scheduler.advance(plane.device.execute(*second));
    plane.scheduler.advance({OperationDone{plan->operations[0].op_id, std::vector<std::uint8_t>(plan->operations[0].size(), 0)}});
    plane.scheduler.check_invariants();
    CHECK_EQ(plane.state(1), "Submitted");
}

TEST(a_lookup_that_takes_too_long_is_not_waited_for) {
    Engine plane(kStorage);
    plane.scheduler.advance({Tick{1000}});
    plane.submit(1, prompt(30, 1), {.max_new_tokens = 2});
    const auto query = plane.scheduler.plan();
    plane.scheduler.advance({Tick{1099}});
    CHECK_EQ(plane.scheduler.plan()->num_rows(), 0);
    plane.scheduler.advance({Tick{1100}});
    const auto plan = plane.scheduler.plan();
    CHECK_EQ(plan->num_rows(), 1);
    CHECK_EQ(plane.scheduler.snapshot().storage_timeouts, 1);
    plane.scheduler.advance({OperationDone{query->operations[0].op_id, {}}});  // late
    plane.scheduler.check_invariants();
    CHECK_EQ(plane.scheduler.snapshot().pending_operations, 0);
}

TEST(a_failed_put_is_not_a_stored_block_and_a_failed_fetch_computes) {
    const auto disk = std::make_shared<engine::Storage>();
    {
        Engine before(kStorage, disk);
        before.device.fails = [](const CacheOperation& o) { return o.kind == OperationKind::StoragePut; };
        run_one(before, 1, prompt(30, 1));
        CHECK(disk->empty());
        before.device.fails = nullptr;
        run_one(before, 2, prompt(30, 2));
        CHECK(!disk->empty());
    }
    Engine after(kStorage, disk);
    after.device.fails = [](const CacheOperation& o) { return o.kind == OperationKind::StorageFetch; };
    run_one(after, 2, prompt(30, 2));
    CHECK_EQ(after.scheduler.snapshot().storage_hit_tokens, 0);
    after.check_pool_whole();
}

TEST(an_abort_while_prefetching_leaves_the_fetch_to_end_by_itself) {
    const auto disk = std::make_shared<engine::Storage>();
    {
        Engine before(kStorage, disk);
        run_one(before, 1, prompt(30, 1));
    }
    Engine plane(kStorage, disk);
    plane.submit(1, prompt(30, 1), {.max_new_tokens = 2});
    plane.scheduler.advance(plane.device.execute(*plane.scheduler.plan()));
    const auto fetch = plane.scheduler.plan();
    CHECK_EQ(count(*fetch, OperationKind::StorageFetch), 1u);
    plane.end(1, true);
    CHECK_EQ(plane.state(1), "gone");
    CHECK(plane.scheduler.snapshot().host[0].held > 0);  // the storage writes there still
    plane.scheduler.advance(plane.device.execute(*fetch));
    plane.scheduler.check_invariants();
    CHECK_EQ(plane.scheduler.snapshot().host[0].held, 0);
    CHECK(plane.scheduler.snapshot().host[0].cached > 0);
}

// Known from the field: requests whose salt, adapter or images differ shared blocks because their token ids agree.
TEST(name_spaces_share_nothing_in_any_tier) {
    const auto disk = std::make_shared<engine::Storage>();
    Engine plane(kStorage, disk);
    plane.submit(1, prompt(30, 1), {.max_new_tokens = 2, .name_space = "a"});
    plane.run();
    plane.submit(2, prompt(30, 1), {.max_new_tokens = 2, .name_space = "b"});
    plane.run();
    CHECK_EQ(plane.scheduler.snapshot().prefix_hit_tokens, 0);
    plane.submit(3, prompt(30, 1), {.max_new_tokens = 2, .name_space = "a"});
    plane.run();
    CHECK(plane.scheduler.snapshot().prefix_hit_tokens > 0);
}

TEST(a_put_pins_its_blocks_until_it_is_acknowledged) {
    Engine plane(kStorage);
    plane.submit(1, prompt(30, 1), {.max_new_tokens = 20});
    const CacheOperation* put = nullptr;
    std::shared_ptr<const Plan> plan;
    while (put == nullptr) {
        plan = plane.scheduler.plan();
        for (const CacheOperation& operation : plan->operations) {
            if (operation.kind == OperationKind::StoragePut) put = &operation;
        }
        std::vector<Event> events = plane.device.execute(*plan);
        std::erase_if(events, [&](const Event& event) {
            const auto* done = std::get_if<OperationDone>(&event);
            return put != nullptr && done != nullptr && done->op_id == put->op_id;
        });
        plane.scheduler.advance(events);
    }
    plane.end(1, true);
    CHECK_EQ(plane.scheduler.snapshot().host[0].held, static_cast<std::int64_t>(put->size()));
    plane.scheduler.advance({OperationDone{put->op_id, {}}});
    plane.scheduler.check_invariants();
    CHECK_EQ(plane.scheduler.snapshot().host[0].held, 0);
}

TEST(fetched_blocks_are_kept_for_the_request_until_it_is_admitted) {
    const auto disk = std::make_shared<engine::Storage>();
    {
        Engine before(kStorage, disk);
        run_one(before, 1, prompt(30, 1));
    }
    Engine plane(kStorage, disk);
    plane.submit(1, prompt(30, 1), {.max_new_tokens = 2});
    plane.scheduler.advance(plane.device.execute(*plane.scheduler.plan()));  // the question
    plane.scheduler.advance(plane.device.execute(*plane.scheduler.plan()));  // the fetch
    CHECK_EQ(plane.state(1), "Submitted");
    CHECK_EQ(plane.scheduler.snapshot().host[0].held, 7);
    const auto plan = plane.scheduler.plan();
    CHECK_EQ(plan->prefix_len[0], 28);
    plane.scheduler.advance(plane.device.execute(*plan));
    CHECK_EQ(plane.scheduler.snapshot().host[0].held, 0);
}

// The device says so by the operation alone: what the forward brought is not believed.
TEST(a_load_that_failed_is_not_believed_whatever_the_forward_brought) {
    Engine plane(kHost);
    run_one(plane, 1, prompt(30, 1));
    for (int handle = 2; handle < 6; ++handle) run_one(plane, handle, prompt(40, handle));
    plane.submit(7, prompt(30, 1), {.max_new_tokens = 5});
    const auto plan = plane.scheduler.plan();
    std::vector<Event> events = plane.device.execute(*plan);
    const std::int64_t cached = plane.scheduler.snapshot().groups[0].cached;
    for (Event& event : events) {
        auto* done = std::get_if<OperationDone>(&event);
        if (done == nullptr) continue;
        for (const CacheOperation& operation : plan->operations) {
            if (operation.op_id == done->op_id && operation.kind == OperationKind::LoadBack) {
                done->succeeded.assign(operation.size(), 0);
            }
        }
    }
    plane.scheduler.advance(events);
    const auto next = plane.scheduler.plan();
    CHECK_EQ(next->aborts.size(), 1u);
    CHECK(plane.scheduler.snapshot().groups[0].cached <= cached);
    plane.live.erase(7);
    plane.check_pool_whole();
}

TEST(what_the_host_evicted_before_its_put_is_not_put) {
    engine::ConfigOptions options = kStorage;
    options.host_parents = 12;
    const auto disk = std::make_shared<engine::Storage>();
    {
        // Puts fail to be acknowledged for a while, so that they queue behind the bound on storage operations.
        Engine before(options, disk);
        std::deque<Event> held_back;
        for (int handle = 1; handle <= 6; ++handle) {
            before.submit(handle, prompt(40, handle), {.max_new_tokens = 1});
            for (int round = 0; round < 12; ++round) {
                const auto plan = before.scheduler.plan();
                std::vector<Event> events = before.device.execute(*plan);
                std::vector<Event> due;
                for (Event& event : events) {
                    const auto* done = std::get_if<OperationDone>(&event);
                    const bool put = done != nullptr && std::any_of(plan->operations.begin(), plan->operations.end(),
                        [&](const CacheOperation& o) { return o.op_id == done->op_id && o.kind == OperationKind::StoragePut; });
                    if (put) {
                        held_back.push_back(event);
                    } else {
                        due.push_back(event);
                    }
                }
                for (const std::int32_t samples : plan->samples) {
                    if (samples != 0) due.push_back(Finish{handle});
                }
                before.scheduler.advance(due);
                before.scheduler.check_invariants();
            }
            if (held_back.size() > 14) {
                before.scheduler.advance({held_back.front()});
                held_back.pop_front();
            }
        }
    }
    for (int handle = 1; handle <= 6; ++handle) {
        Engine after(kStorage, disk);
        run_one(after, handle, prompt(40, handle));  // compares every token
    }
}
