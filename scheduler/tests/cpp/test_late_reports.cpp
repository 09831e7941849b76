// Reports that come late, fail, or are about what is gone meanwhile: what they leave behind must be nothing.
#include "check.h"
#include "dealer.h"

using namespace tokenspeed;
using dealer::Engine;
using engine::prompt;

namespace {

// Rounds until the request is gone, with everything acknowledged but puts.
void run_without_puts(Engine& plane, int handle) {
    for (int rounds = 0; plane.state(handle) != "gone"; ++rounds) {
        CHECK(rounds < 50);
        plane.step();
        for (const CacheOperation* operation : plane.operations_out()) {
            if (operation->kind != OperationKind::StoragePut) plane.acknowledge(operation->op_id);
        }
        while (plane.results_out() > 0) plane.land();
    }
}

std::vector<std::int64_t> ids_of(const Engine& plane, OperationKind kind) {
    std::vector<std::int64_t> ids;
    for (const CacheOperation* operation : plane.operations_out()) {
        if (operation->kind == kind) ids.push_back(operation->op_id);
    }
    return ids;
}

}  // namespace

TEST(what_a_failed_load_brought_never_becomes_known) {
    Engine plane({.parents = 6, .host_parents = 20});
    for (const int salt : {0, 5}) {
        plane.submit(1, prompt(salt == 0 ? 13 : 21, salt), {.max_new_tokens = 1});
        plane.drain([](const Plan&) {});
    }
    plane.submit(2, prompt(13), {.max_new_tokens = 1});
    plane.step();
    const auto loads = ids_of(plane, OperationKind::LoadBack);
    CHECK_EQ(loads.size(), 1u);
    plane.acknowledge(loads[0], ~std::uint64_t{0});
    plane.land();
    plane.step();
    CHECK_EQ(plane.aborts.size(), 1u);
    CHECK_EQ(plane.aborts[0].reason, "failed");
    // Whatever it hits, it must be right.
    plane.submit(3, prompt(13), {.max_new_tokens = 4});
    plane.drain([](const Plan&) {});
    CHECK_EQ(plane.outputs.at(3).size(), 4u);
    plane.check_pool_whole();
}

TEST(what_left_the_host_before_its_turn_is_not_put_under_its_old_name) {
    Engine plane({.parents = 5, .seqs = 1, .host_parents = 4, .storage = true, .storage_operations = 1});
    // The first two blocks are being put, and pinned; the next two wait for their turn and give way to the last two.
    for (int request = 1; request <= 3; ++request) {
        plane.submit(request, prompt(9, request), {.max_new_tokens = 1});
        run_without_puts(plane, request);
        plane.step();
        for (const CacheOperation* operation : plane.operations_out()) {
            if (operation->kind == OperationKind::WriteBack) plane.acknowledge(operation->op_id);
        }
        plane.step();
        CHECK_EQ(ids_of(plane, OperationKind::StoragePut).size(), 1u);
    }
    CHECK(plane.scheduler.snapshot().host_evictions >= 2);
    plane.drain([](const Plan&) {});
    // The second prompt again: no tier may have anything else under its name.
    plane.submit(4, prompt(17, 9), {.max_new_tokens = 1});
    plane.drain([](const Plan&) {});
    plane.submit(5, prompt(9, 2), {.max_new_tokens = 3});
    plane.drain([](const Plan&) {});
    CHECK_EQ(plane.outputs.at(5).size(), 3u);
    plane.check_pool_whole();
}

TEST(a_late_failure_of_an_operation_does_not_hit_the_next_request_with_its_handle) {
    Scheduler scheduler(engine::config({.parents = 6, .host_parents = 20}));
    const auto run = [&](int handle, const std::vector<std::int32_t>& tokens) {
        scheduler.submit(handle, tokens, {.max_new_tokens = 1});
        const auto plan = scheduler.plan();
        CHECK_EQ(plan->num_rows(), 1);
        scheduler.advance({ForwardResult{plan->forward_id, {1}, {}}, Finish{handle}});
        return plan;
    };
    const auto acknowledge = [&] {
        for (const CacheOperation& operation : std::vector(scheduler.plan()->operations)) {
            scheduler.advance({OperationDone{operation.op_id, {}}});
        }
    };
    run(1, prompt(13));
    acknowledge();
    run(1, prompt(21, 5));
    acknowledge();
    const auto loaded = run(2, prompt(13));
    CHECK_EQ(loaded->operations.size(), 1u);
    CHECK(loaded->operations[0].kind == OperationKind::LoadBack);
    scheduler.submit(2, prompt(5, 7), {.max_new_tokens = 2});
    CHECK_EQ(scheduler.plan()->num_rows(), 1);
    const std::size_t blocks = loaded->operations[0].size();
    scheduler.advance({OperationDone{loaded->operations[0].op_id, std::vector<std::uint8_t>(blocks, 0)}});
    scheduler.check_invariants();
    CHECK(scheduler.plan()->aborts.empty());
}

TEST(what_a_peer_computed_although_it_was_known_is_let_go_at_once) {
    Engine plane({.parents = 10, .role = fsm::Role::Decode});
    plane.submit(1, prompt(9), {.max_new_tokens = 2});
    plane.drain([](const Plan&) {});
    plane.submit(2, prompt(9), {.max_new_tokens = 2, .max_cached_prefix_tokens = 0});
    plane.bootstrap_all();
    plane.step();
    CHECK_EQ(plane.row(2).blocks, 3);
    plane.peer_done();
    CHECK_EQ(plane.scheduler.snapshot().groups[0].held, 3);
    plane.drain([](const Plan&) {});
    plane.check_pool_whole();
}
