// Blocks from the pool to the table to the bundle and back: ownership, sharing, eviction, and what a state gives back.
#include <memory>

#include "cache/block_pool.h"
#include "cache/block_table.h"
#include "cache/group_cache.h"
#include "check.h"
#include "fsm/lifecycle.h"

using namespace tokenspeed;
using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

namespace {

BlockKey key(std::int32_t page, std::string_view name_space = "") {
    const std::vector<std::int32_t> tokens{page};
    return {next_digest(root_digest(name_space), tokens), 0};
}

// A pool with one group and rows, as a scheduler has them.
struct World {
    explicit World(int parents = 6, int children = 1, int holders = 4)
        : pool(parents), cache(pool, 0, children, holders), rows(holders) {}
    BlockPool pool;
    GroupCache cache;
    RowPool rows;

    Grant grant(int blocks) {
        Grant grant{.row = PoolRow(rows), .blocks = {}};
        CHECK(grant.row);
        BlockTable& table = grant.blocks.emplace_back(cache, grant.row.number());
        CHECK(table.append_fresh(blocks));
        return grant;
    }
    ForwardResources bundle(int blocks) { return ForwardResources(grant(blocks), 0, 0); }
    bool whole() const {
        return cache.held() == 0 && cache.free() + cache.cached() == cache.total() && rows.free() == rows.total();
    }
};

std::vector<BlockId> taken(BlockPool& pool, int group, std::size_t count) {
    std::vector<BlockId> ids(count);
    CHECK(pool.acquire(group, ids));
    return ids;
}

}  // namespace

TEST(the_pool_gives_empty_parents_first_in_first_out) {
    BlockPool pool(3);
    pool.declare(0, 1);
    CHECK(taken(pool, 0, 2) == (std::vector<BlockId>{1, 2}));
    pool.release(0, 2);
    pool.release(0, 1);
    CHECK(taken(pool, 0, 3) == (std::vector<BlockId>{3, 2, 1}));
    BlockId one;
    CHECK(!pool.acquire(0, std::span(&one, 1)));
    CHECK_EQ(pool.check(), "");
}

TEST(holes_of_the_fullest_parent_come_before_empty_parents) {
    BlockPool pool(3);
    pool.declare(0, 4);
    CHECK(taken(pool, 0, 8) == (std::vector<BlockId>{4, 5, 6, 7, 8, 9, 10, 11}));
    for (const BlockId id : {4, 5, 9}) pool.release(0, id);
    // Parent 2 (ids 8 to 11) has one hole, parent 1 two, parent 3 is empty.
    CHECK(taken(pool, 0, 4) == (std::vector<BlockId>{9, 4, 5, 12}));
    CHECK_EQ(pool.check(), "");
}

TEST(acquiring_from_the_pool_is_all_or_nothing) {
    BlockPool pool(2);
    pool.declare(0, 2);
    (void)taken(pool, 0, 3);
    std::vector<BlockId> ids(2, -1);
    CHECK(!pool.acquire(0, ids));
    CHECK(ids == (std::vector<BlockId>{-1, -1}));
    CHECK_EQ(pool.free_blocks(0), 1);
}

TEST(a_parent_goes_to_another_group_only_when_its_last_child_is_back) {
    BlockPool pool(1);
    pool.declare(0, 2);
    pool.declare(1, 3);
    const auto ids = taken(pool, 0, 2);
    CHECK_EQ(pool.free_blocks(1), 0);
    pool.release(0, ids[0]);
    CHECK_EQ(pool.free_blocks(1), 0);
    pool.release(0, ids[1]);
    CHECK_EQ(pool.free_blocks(1), 3);
    CHECK(taken(pool, 1, 3) == (std::vector<BlockId>{3, 4, 5}));
    CHECK_EQ(pool.free_blocks(0), 0);
    CHECK_EQ(pool.check(), "");
}

TEST(a_groups_geometry_never_changes_even_after_everything_was_freed) {
    BlockPool pool(2);
    pool.declare(0, 2);
    for (const BlockId id : taken(pool, 0, 2)) pool.release(0, id);
    pool.declare(0, 2);
    CHECK_THROWS(std::invalid_argument, "2 children a parent since its first use; it cannot change to 4",
                 pool.declare(0, 4));
}

TEST(a_table_gives_everything_back_when_it_goes) {
    World world;
    {
        BlockTable table(world.cache, 1);
        CHECK(table.append_fresh(4));
        CHECK_EQ(world.cache.held(), 4);
        CHECK_EQ(world.cache.sole_blocks(1), 4);
        CHECK(!table.append_fresh(3));  // all or nothing
        CHECK_EQ(table.size(), 4);
        const BlockTable moved = std::move(table);
        CHECK_EQ(moved.size(), 4);
        CHECK(table.empty());  // NOLINT: a moved-from table is empty, by contract
        CHECK_EQ(world.cache.held(), 4);
    }
    CHECK(world.whole());
    CHECK_EQ(world.cache.free(), 6);
    CHECK_EQ(world.cache.check({}), "");
}

TEST(published_blocks_become_evictable_and_the_suffix_goes_first) {
    World world(3);
    std::vector<BlockId> ids;
    {
        BlockTable table(world.cache, 1);
        CHECK(table.append_fresh(3));
        for (int slot = 0; slot < 3; ++slot) table.publish(slot, key(slot), 0);
        ids.assign(table.ids().begin(), table.ids().end());
    }
    CHECK_EQ(world.cache.cached(), 3);
    CHECK_EQ(world.cache.obtainable(), 3);
    BlockTable other(world.cache, 2);
    for (int left = 2; left >= 0; --left) {
        CHECK(other.append_fresh(1));
        for (int page = 0; page < 3; ++page) CHECK_EQ(world.cache.find(key(page)) != kNullBlock, page < left);
    }
    CHECK_EQ(world.cache.evictions(), 3);
    CHECK_EQ(other.ids()[0], ids[2]);
}

TEST(the_least_recently_used_chain_is_evicted_first_and_a_hit_renews_it) {
    World world(4);
    const auto leave_behind = [&](int page) {
        BlockTable table(world.cache, 1);
        CHECK(table.append_fresh(1));
        table.publish(0, key(page), 0);
    };
    leave_behind(0);
    leave_behind(1);
    {
        BlockTable hit(world.cache, 2);
        const BlockId id = world.cache.find(key(0));
        hit.append_hits(std::span(&id, 1));
        CHECK_EQ(world.cache.cached(), 1);
        CHECK(!world.cache.is_evictable(id));
    }
    BlockTable fresh(world.cache, 3);
    CHECK(fresh.append_fresh(3));
    CHECK(world.cache.find(key(1)) == kNullBlock);
    CHECK(world.cache.find(key(0)) != kNullBlock);
}

TEST(sharing_is_counted_and_only_sole_blocks_would_be_freed) {
    World world;
    auto first = std::make_unique<BlockTable>(world.cache, 1);
    CHECK(first->append_fresh(2));
    first->publish(0, key(0), 0);
    BlockTable second(world.cache, 2);
    const BlockId shared = world.cache.find(key(0));
    second.append_hits(std::span(&shared, 1));
    CHECK_EQ(world.cache.sole_blocks(1), 1);
    CHECK_EQ(world.cache.sole_blocks(2), 0);
    first.reset();
    CHECK_EQ(world.cache.sole_blocks(1), 0);
    CHECK_EQ(world.cache.sole_blocks(2), 1);
    CHECK_EQ(world.cache.held(), 1);
    CHECK_EQ(world.cache.check({{2, shared}}), "");
    CHECK(world.cache.check({}) != "");  // a count that nobody's table explains is found
}

TEST(equal_blocks_are_deduplicated_and_the_duplicate_outlives_the_forwards_that_read_it) {
    World world;
    BlockTable first(world.cache, 1), second(world.cache, 2);
    CHECK(first.append_fresh(1));
    CHECK(second.append_fresh(2));
    first.mark_sent();
    second.mark_sent();
    first.publish(0, key(0), 5);
    second.publish(0, key(0), 6);
    CHECK_EQ(second.ids()[0], first.ids()[0]);
    CHECK_EQ(second.changed_from(), 0);
    CHECK(!first.changed());
    CHECK_EQ(world.cache.held(), 3);
    second.forward_landed(5);
    CHECK_EQ(world.cache.held(), 3);
    second.forward_landed(6);
    CHECK_EQ(world.cache.held(), 2);
    std::vector<std::pair<HolderId, BlockId>> held;
    first.collect(held);
    second.collect(held);
    CHECK_EQ(world.cache.check(held), "");
}

TEST(a_bundle_gives_row_and_blocks_back_whatever_becomes_of_it) {
    World world;
    {
        ForwardResources bundle = world.bundle(3);
        CHECK_EQ(bundle.row(), 1);
        CHECK_EQ(world.rows.free(), 3);
    }
    CHECK(world.whole());
    (void)world.bundle(2).tables();
    CHECK(world.whole());
    const Released released = world.bundle(4).give_back();
    (void)released;
    CHECK(world.whole());
}

TEST(a_moved_from_bundle_is_empty_and_access_throws) {
    World world;
    ForwardResources bundle = world.bundle(3);
    bundle.schedule(Grant{}, 2);
    ForwardResources second = std::move(bundle);
    CHECK(bundle.empty());  // NOLINT: that is the contract
    CHECK_EQ(second.results_in_flight(), 1);
    CHECK_THROWS(EmptyBundle, "after it was moved or given back", bundle.tables());
    CHECK_THROWS(EmptyBundle, "after it was moved or given back", bundle.row());
    CHECK_THROWS(EmptyBundle, "after it was moved or given back", bundle.progress());
    CHECK_THROWS(EmptyBundle, "after it was moved or given back", bundle.schedule(Grant{}, 1));
    CHECK_THROWS(EmptyBundle, "after it was moved or given back", std::move(bundle).give_back());
}

TEST(a_bundle_with_a_forward_out_cannot_be_given_back) {
    World world;
    ForwardResources bundle = world.bundle(1);
    bundle.schedule(Grant{}, 1);
    CHECK_THROWS(std::logic_error, "while a forward is out", std::move(bundle).give_back());
    bundle.result_landed();
    (void)std::move(bundle).give_back();
    CHECK(world.whole());
}

TEST(a_request_moves_its_bundle_from_state_to_state_and_gives_it_back_at_the_end) {
    World world;
    Lifecycle<Role::Fused> life(Submitted<Role::Fused>::fresh());
    CHECK(life.bundle() == nullptr);
    CHECK(life.dispatch(SchedulePrefillEvent{.grant = world.grant(2), .input_len = 8}, 1) == StateId::Prefilling);
    CHECK(life.dispatch(ResultLandedEvent{}, 1) == StateId::Prefilling);
    CHECK(life.dispatch(SchedulePrefillEvent{.grant = {}, .input_len = 2, .completes = true}, 1) ==
          StateId::PrefillDone);
    CHECK(life.dispatch(ScheduleDecodeEvent{}, 1) == StateId::Decoding);
    CHECK_EQ(life.bundle()->results_in_flight(), 2);
    CHECK_EQ(life.bundle()->progress().scheduled, 11);
    CHECK_EQ(world.cache.held(), 2);
    CHECK(life.dispatch(FinishEvent{}, 1) == StateId::Finishing);
    CHECK(life.dispatch(AbortEvent{}, 1) == StateId::Finishing);
    CHECK(life.dispatch(ResultLandedEvent{}, 1) == StateId::Finishing);
    CHECK_EQ(world.cache.held(), 2);
    CHECK(life.dispatch(ResultLandedEvent{}, 1) == StateId::Finished);
    CHECK(world.whole());
}

TEST(a_retracted_request_holds_no_device_block_and_comes_back_where_it_was) {
    World world;
    HostPool host(4);
    Lifecycle<Role::Fused> life(Submitted<Role::Fused>::fresh());
    life.dispatch(SchedulePrefillEvent{.grant = world.grant(3), .input_len = 10, .completes = true}, 1);
    life.dispatch(ResultLandedEvent{.first_token = true}, 1);
    HostImage image(HostBlocks(host, 3), 10);
    CHECK(life.dispatch(RetractEvent{.image = std::move(image), .epoch = 1}, 1) == StateId::Retracted);
    CHECK(world.whole());
    CHECK_EQ(host.free(), 1);
    CHECK(life.dispatch(RestoreEvent{.grant = world.grant(3)}, 1) == StateId::Restoring);
    CHECK_EQ(life.bundle()->progress().scheduled, 10);
    CHECK_EQ(host.free(), 1);
    CHECK(life.dispatch(RestoreLandedEvent{}, 1) == StateId::PrefillDone);
    CHECK_EQ(host.free(), 4);
    CHECK(life.dispatch(RetractEvent{}, 1) == StateId::Submitted);  // without an image it computes again
    CHECK(world.whole());
}

TEST(an_end_while_an_image_flows_back_waits_for_the_copy) {
    World world;
    HostPool host(4);
    Lifecycle<Role::Fused> life(Submitted<Role::Fused>::fresh());
    life.dispatch(SchedulePrefillEvent{.grant = world.grant(2), .input_len = 4}, 1);
    life.dispatch(ResultLandedEvent{}, 1);
    life.dispatch(RetractEvent{.image = HostImage(HostBlocks(host, 2), 4), .epoch = 1}, 1);
    life.dispatch(RestoreEvent{.grant = world.grant(2)}, 1);
    CHECK(life.dispatch(AbortEvent{}, 1) == StateId::Finishing);
    CHECK_EQ(world.cache.held(), 2);
    CHECK_EQ(host.free(), 2);
    CHECK(life.dispatch(RestoreLandedEvent{}, 1) == StateId::Finished);
    CHECK(world.whole());
}

TEST(host_pins_travel_with_the_request_and_go_when_it_ends) {
    HostPool host(4);
    Lifecycle<Role::Fused> life(Submitted<Role::Fused>::fresh());
    CHECK(life.dispatch(PrefetchEvent{HostPins(HostBlocks(host, 3))}, 1) == StateId::Prefetching);
    CHECK_EQ(host.free(), 1);
    CHECK(life.dispatch(PrefetchLandedEvent{}, 1) == StateId::Submitted);
    CHECK_EQ(host.free(), 1);
    CHECK(life.dispatch(AbortEvent{}, 1) == StateId::Finished);
    CHECK(!HostBlocks(host, 5));  // all or nothing
}

TEST(the_roles_of_a_split_deployment_have_their_own_lives) {
    World world;
    {
        Lifecycle<Role::Prefill> life(Submitted<Role::Prefill>::fresh());
        life.dispatch(SchedulePrefillEvent{.grant = world.grant(1), .input_len = 4, .completes = true}, 1);
        CHECK(life.id() == StateId::PrefillAwaitingResult);
        CHECK(life.dispatch(ResultLandedEvent{.first_token = true}, 1) == StateId::PrefillDone);
        CHECK_THROWS(InvalidTransition, "RestoreEvent", life.dispatch(RestoreEvent{}, 1));
    }
    CHECK(world.whole());
    Lifecycle<Role::Decode> life(Submitted<Role::Decode>::fresh());
    life.dispatch(ScheduleRemotePrefillEvent{.grant = world.grant(2), .prompt_len = 8}, 2);
    CHECK(life.id() == StateId::RemotePrefilling);
    CHECK(life.dispatch(AbortEvent{}, 2) == StateId::Finishing);  // the peer may still write
    CHECK_EQ(world.cache.held(), 2);
    CHECK(life.dispatch(RemotePrefillDoneEvent{}, 2) == StateId::Finished);
    CHECK(world.whole());
}
