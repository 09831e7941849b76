// Blocks from the pool to the table to the bundle and back: ownership, sharing, eviction, and what a state gives back.
#include <memory>

#include "cache/block_pool.h"
#include "cache/block_table.h"
#include "cache/host_pins.h"
#include "cache/tier.h"
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

using Ids = std::vector<BlockId>;

// Fresh blocks of one group, or nothing.
Ids acquire(Tier& tier, int group, HolderId holder, std::size_t count) {
    std::vector<Ids> ids(static_cast<std::size_t>(tier.num_groups()));
    ids[static_cast<std::size_t>(group)].resize(count);
    std::vector<std::span<BlockId>> spans(ids.begin(), ids.end());
    return tier.acquire(holder, spans) ? ids[static_cast<std::size_t>(group)] : Ids{};
}

bool append_fresh(Tier& tier, BlockTable& table, HolderId holder, std::size_t count, int group = 0) {
    const Ids ids = acquire(tier, group, holder, count);
    table.append_acquired(ids);
    return ids.size() == count;
}

std::vector<int> one_group(int children) { return {children}; }

// A tier with one group and rows, as a scheduler has them.
struct World {
    explicit World(int parents = 6, int children = 1, int holders = 4)
        : tier(parents, one_group(children), holders), rows(holders) {}
    Tier tier;
    RowPool rows;

    Grant grant(int blocks) {
        Grant grant{.row = PoolRow(rows), .blocks = {}};
        CHECK(grant.row);
        BlockTable& table = grant.blocks.emplace_back(tier, 0, grant.row.number());
        CHECK(append_fresh(tier, table, grant.row.number(), static_cast<std::size_t>(blocks)));
        return grant;
    }
    ForwardResources bundle(int blocks) { return ForwardResources(grant(blocks), 0, 0); }
    std::int64_t obtainable() const { return tier.obtainable(0, std::vector<std::int64_t>{0}); }
    bool whole() const {
        return tier.held(0) == 0 && tier.free(0) + tier.cached(0) == tier.total(0) && rows.free() == rows.total();
    }
};

// An image of some fresh host blocks.
HostImage image_of(Tier& host, std::int64_t blocks, std::int32_t computed) {
    cache::HostPins pins(host);
    std::vector<Ids> ids;
    CHECK(pins.add_fresh(std::vector<std::int64_t>{blocks}, ids));
    return HostImage(std::move(pins), {{0, ids[0]}}, computed);
}

}  // namespace

TEST(the_pool_gives_empty_parents_first_in_first_out) {
    Tier tier(3, one_group(1), 1);
    CHECK(acquire(tier, 0, 1, 2) == (Ids{1, 2}));
    tier.release(0, 1, 2);
    tier.release(0, 1, 1);
    CHECK(acquire(tier, 0, 1, 3) == (Ids{3, 2, 1}));
    CHECK(acquire(tier, 0, 1, 1).empty());
    CHECK_EQ(tier.pool().check(), "");
}

TEST(holes_of_the_fullest_parent_come_before_empty_parents) {
    Tier tier(3, one_group(4), 1);
    CHECK(acquire(tier, 0, 1, 8) == (Ids{4, 5, 6, 7, 8, 9, 10, 11}));
    for (const BlockId id : {4, 5, 9}) tier.release(0, 1, id);
    // Parent 2 (ids 8 to 11) has one hole, parent 1 two, parent 3 is empty.
    CHECK(acquire(tier, 0, 1, 4) == (Ids{9, 4, 5, 12}));
    CHECK_EQ(tier.pool().check(), "");
}

TEST(acquiring_is_all_or_nothing_over_all_groups) {
    const std::vector<int> children{2, 1};
    Tier tier(2, children, 1);
    CHECK_EQ(acquire(tier, 0, 1, 1).size(), 1u);
    Ids first(2, -1), second(1, -1);
    const std::vector<std::span<BlockId>> too_much{first, second};
    // One hole, one empty parent: two of the first group leave none for the second.
    CHECK(!tier.acquire(1, too_much));
    CHECK(first == (Ids{-1, -1}) && second == (Ids{-1}));
    CHECK_EQ(tier.free(0), 3);
    first.resize(1);
    const std::vector<std::span<BlockId>> fits{first, second};
    CHECK(tier.acquire(1, fits));
    CHECK_EQ(tier.spare_parents(std::vector<std::int64_t>{0, 0}), 0);
}

TEST(a_parent_goes_to_another_group_only_when_its_last_child_is_back) {
    const std::vector<int> children{2, 3};
    Tier tier(1, children, 1);
    const Ids ids = acquire(tier, 0, 1, 2);
    CHECK_EQ(tier.free(1), 0);
    tier.release(0, 1, ids[0]);
    CHECK_EQ(tier.free(1), 0);
    CHECK(acquire(tier, 1, 1, 1).empty());
    tier.release(0, 1, ids[1]);
    CHECK_EQ(tier.free(1), 3);
    CHECK(acquire(tier, 1, 1, 3) == (Ids{3, 4, 5}));
    CHECK_EQ(tier.free(0), 0);
    CHECK_EQ(tier.pool().check(), "");
}

TEST(what_one_group_has_cached_gives_way_to_another_as_whole_parents) {
    const std::vector<int> children{2, 1};
    Tier tier(2, children, 1);
    const Ids ids = acquire(tier, 0, 1, 4);
    for (int page = 0; page < 4; ++page) CHECK_EQ(tier.publish(0, ids[static_cast<std::size_t>(page)], key(page)), ids[static_cast<std::size_t>(page)]);
    for (const BlockId id : {ids[3], ids[2], ids[1]}) tier.release(0, 1, id);
    // The first parent has a held child: only the second, all cached, can change its group.
    CHECK_EQ(tier.spare_parents(std::vector<std::int64_t>{0, 1}), 0);
    CHECK(acquire(tier, 1, 1, 2).empty());
    CHECK_EQ(acquire(tier, 1, 1, 1).size(), 1u);
    CHECK(tier.find(0, key(2)) == kNullBlock && tier.find(0, key(3)) == kNullBlock);
    CHECK(tier.find(0, key(1)) != kNullBlock);
    CHECK_EQ(tier.check({{{1, ids[0]}}, {{1, 2}}}), "");
}

TEST(a_joint_admission_leaves_the_parent_that_another_group_depends_on) {
    const std::vector<int> children{2, 1};
    Tier tier(3, children, 1);
    const Ids ids = acquire(tier, 0, 1, 4);
    (void)tier.publish(0, ids[1], key(1));
    tier.release(0, 1, ids[1]);  // cached beside a held one: only its own group can have it
    Ids first(2, 0), second(0, 0);
    tier.release(0, 1, ids[3]);  // a hole
    second.resize(1);
    const std::vector<std::span<BlockId>> both{first, second};
    CHECK(tier.acquire(1, both));
    CHECK(first == (Ids{ids[3], ids[1]}));
    CHECK_EQ(tier.evictions(), 1);
}

TEST(a_groups_geometry_never_changes_even_after_everything_was_freed) {
    BlockPool pool(2);
    pool.declare(0, 2);
    const int parent = pool.bind_empty(0);
    pool.release(0, pool.take(parent));
    pool.declare(0, 2);
    CHECK_THROWS(std::invalid_argument, "2 children a parent since its first use; it cannot change to 4",
                 pool.declare(0, 4));
}

TEST(a_table_gives_everything_back_when_it_goes) {
    World world;
    {
        BlockTable table(world.tier, 0, 1);
        CHECK(append_fresh(world.tier, table, 1, 4));
        CHECK_EQ(world.tier.held(0), 4);
        CHECK_EQ(world.tier.sole_weight(1), 4);
        CHECK(!append_fresh(world.tier, table, 1, 3));  // all or nothing
        CHECK_EQ(table.size(), 4);
        const BlockTable moved = std::move(table);
        CHECK_EQ(moved.size(), 4);
        CHECK(table.empty());  // NOLINT: a moved-from table is empty, by contract
        CHECK_EQ(world.tier.held(0), 4);
    }
    CHECK(world.whole());
    CHECK_EQ(world.tier.free(0), 6);
    CHECK_EQ(world.tier.check({{}}), "");
}

TEST(published_blocks_become_evictable_and_the_suffix_goes_first) {
    World world(3);
    std::vector<BlockId> ids;
    {
        BlockTable table(world.tier, 0, 1);
        CHECK(append_fresh(world.tier, table, 1, 3));
        for (int slot = 0; slot < 3; ++slot) table.publish(slot, key(slot), 0);
        ids.assign(table.ids().begin(), table.ids().end());
    }
    CHECK_EQ(world.tier.cached(0), 3);
    CHECK_EQ(world.obtainable(), 3);
    BlockTable other(world.tier, 0, 2);
    for (int left = 2; left >= 0; --left) {
        CHECK(append_fresh(world.tier, other, 2, 1));
        for (int page = 0; page < 3; ++page) CHECK_EQ(world.tier.find(0, key(page)) != kNullBlock, page < left);
    }
    CHECK_EQ(world.tier.evictions(), 3);
    CHECK_EQ(other.ids()[0], ids[2]);
}

TEST(the_least_recently_used_chain_is_evicted_first_and_a_hit_renews_it) {
    World world(4);
    const auto leave_behind = [&](int page) {
        BlockTable table(world.tier, 0, 1);
        CHECK(append_fresh(world.tier, table, 1, 1));
        table.publish(0, key(page), 0);
    };
    leave_behind(0);
    leave_behind(1);
    {
        BlockTable hit(world.tier, 0, 2);
        const BlockId id = world.tier.find(0, key(0));
        hit.append_nulls(1);
        hit.hit(0, id);
        CHECK_EQ(world.tier.cached(0), 1);
        CHECK(!world.tier.is_cached(0, id));
    }
    BlockTable fresh(world.tier, 0, 3);
    CHECK(append_fresh(world.tier, fresh, 3, 3));
    CHECK(world.tier.find(0, key(1)) == kNullBlock);
    CHECK(world.tier.find(0, key(0)) != kNullBlock);
}

TEST(sharing_is_counted_and_only_sole_blocks_would_be_freed) {
    World world;
    auto first = std::make_unique<BlockTable>(world.tier, 0, 1);
    CHECK(append_fresh(world.tier, *first, 1, 2));
    first->publish(0, key(0), 0);
    BlockTable second(world.tier, 0, 2);
    const BlockId shared = world.tier.find(0, key(0));
    second.append_nulls(1);
    second.hit(0, shared);
    CHECK_EQ(world.tier.sole_weight(1), 1);
    CHECK_EQ(world.tier.sole_weight(2), 0);
    first.reset();
    CHECK_EQ(world.tier.sole_weight(1), 0);
    CHECK_EQ(world.tier.sole_weight(2), 1);
    CHECK_EQ(world.tier.held(0), 1);
    CHECK_EQ(world.tier.check({{{2, shared}}}), "");
    CHECK(world.tier.check({{}}) != "");  // a count that nobody's table explains is found
}

TEST(equal_blocks_are_deduplicated_and_the_duplicate_outlives_the_forwards_that_read_it) {
    World world;
    BlockTable first(world.tier, 0, 1), second(world.tier, 0, 2);
    CHECK(append_fresh(world.tier, first, 1, 1));
    CHECK(append_fresh(world.tier, second, 2, 2));
    first.mark_sent();
    second.mark_sent();
    first.publish(0, key(0), 5);
    second.publish(0, key(0), 6);
    CHECK_EQ(second.ids()[0], first.ids()[0]);
    CHECK_EQ(second.changed_from(), 0);
    CHECK(!first.changed());
    CHECK_EQ(world.tier.held(0), 3);
    second.forward_landed(5);
    CHECK_EQ(world.tier.held(0), 3);
    second.forward_landed(6);
    CHECK_EQ(world.tier.held(0), 2);
    std::vector<std::pair<HolderId, BlockId>> held;
    first.collect(held);
    second.collect(held);
    CHECK_EQ(world.tier.check({held}), "");
}

TEST(a_window_lets_go_of_what_it_has_left_behind) {
    World world;
    BlockTable table(world.tier, 0, 1);
    CHECK(append_fresh(world.tier, table, 1, 4));
    table.mark_sent();
    (void)table.publish(0, key(0), 0);
    table.expire(2);
    table.expire(1);  // already gone
    CHECK_EQ(table.size(), 4);
    CHECK_EQ(table.blocks(), 2);
    CHECK(table.at(0) == kNullBlock && table.at(1) == kNullBlock && table.at(2) != kNullBlock);
    CHECK_EQ(table.changed_from(), 0);
    CHECK_EQ(world.tier.held(0), 2);
    CHECK_EQ(world.tier.cached(0), 1);
    table.release();
    CHECK(world.whole());
}

TEST(a_state_table_rotates_and_keeps_the_old_input_for_the_forwards_that_read_it) {
    World world;
    const auto fresh = [&] {
        BlockTable one(world.tier, 0, 1);
        CHECK(append_fresh(world.tier, one, 1, 1));
        return one;
    };
    BlockTable table(world.tier, 0, 1, TableKind::State);
    table.append_nulls(2);
    table.fill(1, acquire(world.tier, 0, 1, 1)[0]);
    CHECK_EQ(table.blocks(), 1);
    const BlockId first = table.at(1);
    table.rotate(fresh(), 8, 1);
    CHECK_EQ(table.at(0), first);
    CHECK_EQ(table.boundary(), 8);
    CHECK_EQ(table.blocks(), 2);
    table.rotate(fresh(), 16, 2);
    CHECK_EQ(world.tier.held(0), 3);
    table.forward_landed(1);
    CHECK_EQ(world.tier.held(0), 3);
    table.forward_landed(2);
    CHECK_EQ(world.tier.held(0), 2);
    table.release();
    CHECK(world.whole());
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
    CHECK_EQ(world.tier.held(0), 2);
    CHECK(life.dispatch(FinishEvent{}, 1) == StateId::Finishing);
    CHECK(life.dispatch(AbortEvent{}, 1) == StateId::Finishing);
    CHECK(life.dispatch(ResultLandedEvent{}, 1) == StateId::Finishing);
    CHECK_EQ(world.tier.held(0), 2);
    CHECK(life.dispatch(ResultLandedEvent{}, 1) == StateId::Finished);
    CHECK(world.whole());
}

TEST(a_retracted_request_holds_no_device_block_and_comes_back_where_it_was) {
    World world;
    Tier host(4, one_group(1), kPinHolder);
    Lifecycle<Role::Fused> life(Submitted<Role::Fused>::fresh());
    life.dispatch(SchedulePrefillEvent{.grant = world.grant(3), .input_len = 10, .completes = true}, 1);
    life.dispatch(ResultLandedEvent{.first_token = true}, 1);
    HostImage image = image_of(host, 3, 10);
    CHECK(life.dispatch(RetractEvent{.image = std::move(image), .epoch = 1}, 1) == StateId::Retracted);
    CHECK(world.whole());
    CHECK_EQ(host.free(0), 1);
    CHECK(life.dispatch(RestoreEvent{.grant = world.grant(3)}, 1) == StateId::Restoring);
    CHECK_EQ(life.bundle()->progress().scheduled, 10);
    CHECK_EQ(host.free(0), 1);
    CHECK(life.dispatch(RestoreLandedEvent{}, 1) == StateId::PrefillDone);
    CHECK_EQ(host.free(0), 4);
    CHECK(life.dispatch(RetractEvent{}, 1) == StateId::Submitted);  // without an image it computes again
    CHECK(world.whole());
}

TEST(an_end_while_an_image_flows_back_waits_for_the_copy) {
    World world;
    Tier host(4, one_group(1), kPinHolder);
    Lifecycle<Role::Fused> life(Submitted<Role::Fused>::fresh());
    life.dispatch(SchedulePrefillEvent{.grant = world.grant(2), .input_len = 4}, 1);
    life.dispatch(ResultLandedEvent{}, 1);
    life.dispatch(RetractEvent{.image = image_of(host, 2, 4), .epoch = 1}, 1);
    life.dispatch(RestoreEvent{.grant = world.grant(2)}, 1);
    CHECK(life.dispatch(AbortEvent{}, 1) == StateId::Finishing);
    CHECK_EQ(world.tier.held(0), 2);
    CHECK_EQ(host.free(0), 2);
    CHECK(life.dispatch(RestoreLandedEvent{}, 1) == StateId::Finished);
    CHECK(world.whole());
}

TEST(host_pins_travel_with_the_request_and_go_when_it_ends) {
    Tier host(4, one_group(1), kPinHolder);
    Lifecycle<Role::Fused> life(Submitted<Role::Fused>::fresh());
    cache::HostPins pins(host);
    std::vector<Ids> ids;
    CHECK(pins.add_fresh(std::vector<std::int64_t>{3}, ids));
    CHECK(life.dispatch(PrefetchEvent{fsm::HostPins(std::move(pins))}, 1) == StateId::Prefetching);
    CHECK_EQ(host.free(0), 1);
    CHECK(life.dispatch(PrefetchLandedEvent{}, 1) == StateId::Submitted);
    CHECK_EQ(host.free(0), 1);
    CHECK(life.dispatch(AbortEvent{}, 1) == StateId::Finished);
    CHECK_EQ(host.free(0), 4);
    cache::HostPins more(host);
    CHECK(!more.add_fresh(std::vector<std::int64_t>{5}, ids));  // all or nothing
    CHECK_EQ(host.free(0), 4);
}

TEST(the_roles_of_a_split_deployment_have_their_own_lives) {
    World world;
    {
        Lifecycle<Role::Prefill> life(Bootstrapping<Role::Prefill>::fresh());
        CHECK(life.dispatch(BootstrappedEvent{}, 1) == StateId::Submitted);
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
    CHECK_EQ(world.tier.held(0), 2);
    CHECK(life.dispatch(RemotePrefillDoneEvent{}, 2) == StateId::Finished);
    CHECK(world.whole());
}
