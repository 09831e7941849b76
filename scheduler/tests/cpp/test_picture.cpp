// What a screen is shown must be so: maps agree with counts, head-room with what is admitted, timelines with the table.
#include <algorithm>
#include <random>

#include "check.h"
#include "engine.h"

using namespace tokenspeed;
using engine::Engine;
using engine::prompt;
using fsm::StateId;

namespace {

std::int64_t letters(const std::string& map, char letter) { return std::count(map.begin(), map.end(), letter); }

// Where every block has a letter of its own, the letters are the counts; where not, all that there is shows.
void check_maps(const std::vector<GroupCounts>& counts, const std::vector<std::string>& maps, int cells) {
    CHECK_EQ(counts.size(), maps.size());
    for (std::size_t i = 0; i < counts.size(); ++i) {
        const GroupCounts& group = counts[i];
        CHECK_EQ(group.held + group.cached + group.free + group.elsewhere, group.total);
        CHECK_EQ(static_cast<std::int64_t>(maps[i].size()), std::min<std::int64_t>(cells, group.total));
        const std::vector<std::pair<char, std::int64_t>> uses = {
            {'p', group.pinned}, {'h', group.held - group.pinned}, {'c', group.cached}, {'.', group.free}, {'-', group.elsewhere}};
        for (const auto& [letter, count] : uses) {
            if (group.total <= cells) {
                CHECK_EQ(letters(maps[i], letter), count);
            } else if (count == 0) {
                CHECK_EQ(letters(maps[i], letter), 0);
            }
        }
    }
}

// Every step of a life is an arrow of the table, and none comes before the one it follows.
void check_life(const Description& life) {
    for (std::size_t i = 1; i < life.timeline.visits.size(); ++i) {
        const Visit &from = life.timeline.visits[i - 1], &to = life.timeline.visits[i];
        bool arrow = false;
        for (std::size_t event = 0; event < fsm::kEventCount; ++event) {
            arrow = arrow || fsm::successors(from.state, static_cast<fsm::EventId>(event)).contains(to.state);
        }
        CHECK(arrow);
        CHECK(from.round <= to.round);
        CHECK(from.time <= to.time);
    }
    if (life.timeline.omitted == 0 && !life.timeline.visits.empty()) CHECK(life.timeline.visits.front().state == StateId::Submitted);
}

}  // namespace

TEST(maps_timelines_and_rows_agree_with_the_books) {
    for (int seed = 0; seed < 24; ++seed) {
        std::mt19937 random(static_cast<unsigned>(seed));
        const auto draw = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most)); };
        Engine plane({.parents = 14 + draw(8),
                      .children = 1 + seed % 2,
                      .seqs = 5,
                      .overlap = seed / 2 % 2,
                      .window = seed % 3 == 0 ? 8 : 0,
                      .checkpoint = seed % 4 == 1 ? 8 : 0,
                      .window_children = 2,
                      .host_parents = seed % 3 == 1 ? 40 : 0});
        const std::int64_t bound = plane.scheduler.max_single_request_tokens();
        int handle = 0;
        for (int round = 0; round < 120; ++round) {
            plane.scheduler.set_time(round);
            if (draw(3) == 0) {
                const int length = 1 + draw(static_cast<int>(std::min<std::int64_t>(bound - 1, 24)));
                const int most = static_cast<int>(std::min<std::int64_t>(bound - length, 20));
                plane.submit(++handle, prompt(length, draw(4)), {.max_new_tokens = 1 + draw(most), .declared = draw(2) == 0});
            }
            if (draw(12) == 0 && !plane.live.empty()) plane.end(plane.live.begin()->first, true);
            plane.round();
            const Snapshot counts = plane.scheduler.snapshot();
            for (const int cells : {1, 5, 256}) {
                const PoolMaps maps = plane.scheduler.maps(cells);
                check_maps(counts.groups, maps.device, cells);
                check_maps(counts.host, maps.host, cells);
            }
            std::int64_t rows = 0;
            for (const RequestRow& row : plane.scheduler.requests(1000)) {
                const Description life = plane.scheduler.describe(row.handle);
                CHECK(life.alive);
                CHECK(life.timeline.visits.back().state == row.state);
                CHECK_EQ(life.row.reason, row.reason);
                CHECK(!life.lines.empty());
                check_life(life);
                ++rows;
            }
            CHECK_EQ(rows, counts.live);
        }
        plane.run();
        for (int ended = std::max(1, handle - 20); ended <= handle; ++ended) {
            const Description life = plane.scheduler.describe(ended);
            CHECK(!life.alive);
            CHECK(life.timeline.visits.back().state == StateId::Finished);
            check_life(life);
        }
    }
}

TEST(a_run_shows_what_most_of_it_is_and_nothing_is_lost_from_sight) {
    Engine plane({.parents = 64, .seqs = 4, .model_len = 256});
    CHECK_EQ(plane.scheduler.maps(8).device[0], "........");
    plane.submit(1, prompt(100, 1), {.max_new_tokens = 60, .declared = false});
    plane.round();
    plane.round();
    CHECK_EQ(plane.scheduler.maps(8).device[0], "hhh.....");
    plane.end(1, true);
    plane.submit(2, prompt(3, 9), {.max_new_tokens = 60, .declared = false});
    plane.round();
    plane.round();
    // 25 blocks were published and are cached; the new request holds one or two of the 64.
    const std::string map = plane.scheduler.maps(8).device[0];
    CHECK_EQ(letters(map, 'h'), 1);
    CHECK(letters(map, 'c') >= 2);
    CHECK_EQ(plane.scheduler.maps(1).device[0].size(), 1u);
}

TEST(the_largest_that_fits_is_admitted_at_once_and_one_more_token_is_not) {
    for (const int window : {0, 8}) {
        Engine plane({.parents = 24, .seqs = 4, .budget = 256, .window = window});
        plane.submit(1, prompt(18, 1), {.max_new_tokens = 12});
        plane.round();
        plane.round();
        const Headroom room = plane.scheduler.headroom(0);
        CHECK(room.largest > 2);
        CHECK(room.largest < plane.scheduler.max_single_request_tokens());
        CHECK_EQ(room.typical_tokens, plane.row(1).prompt_tokens + plane.row(1).generated_tokens);
        for (const std::int64_t more : {0, 1}) {
            Engine other({.parents = 24, .seqs = 4, .budget = 256, .window = window});
            other.submit(1, prompt(18, 1), {.max_new_tokens = 12});
            other.round();
            other.round();
            other.submit(2, prompt(static_cast<int>(room.largest + more) - 1, 2), {.max_new_tokens = 1});
            other.round();
            CHECK_EQ(other.state(2) == "Submitted", more == 1);
        }
    }
}

TEST(as_many_of_a_size_fit_as_are_said_to) {
    Engine plane({.parents = 30, .seqs = 8});
    plane.submit(1, prompt(18, 1), {.max_new_tokens = 12});
    plane.round();
    const std::int64_t fit = plane.scheduler.headroom(16).requests;
    CHECK(fit > 0 && fit < 7);
    for (int handle = 2; handle < 9; ++handle) plane.submit(handle, prompt(15, handle), {.max_new_tokens = 1});
    plane.round();
    std::int64_t waiting = 0;
    for (int handle = 2; handle < 9; ++handle) waiting += plane.state(handle) == "Submitted" ? 1 : 0;
    CHECK_EQ(waiting, 7 - fit);
}

TEST(with_nothing_held_the_largest_is_the_bound_and_without_a_row_there_is_none) {
    Engine plane({.parents = 12, .seqs = 1});
    CHECK_EQ(plane.scheduler.headroom(0).largest, plane.scheduler.max_single_request_tokens());
    CHECK_EQ(plane.scheduler.headroom(0).tokens, 48);
    CHECK_EQ(plane.scheduler.headroom(8).requests, 1);
    plane.submit(1, prompt(4, 1), {.max_new_tokens = 9});
    plane.round();
    CHECK_EQ(plane.scheduler.headroom(0).largest, 0);
    CHECK_EQ(plane.scheduler.headroom(8).requests, 0);
}

TEST(who_waits_longest_is_first_and_who_holds_most_follows) {
    Engine plane({.parents = 40, .seqs = 2});
    plane.submit(1, prompt(4, 1), {.max_new_tokens = 20});
    plane.submit(2, prompt(30, 2), {.max_new_tokens = 20});
    plane.submit(3, prompt(4, 3), {.max_new_tokens = 20});
    plane.round();
    plane.submit(4, prompt(4, 4), {.max_new_tokens = 20});
    plane.round();
    std::vector<std::int32_t> handles;
    for (const RequestRow& row : plane.scheduler.requests(10)) handles.push_back(row.handle);
    CHECK(handles == (std::vector<std::int32_t>{3, 4, 2, 1}));
    CHECK_EQ(plane.scheduler.requests(2).size(), 2u);
}

TEST(a_long_life_keeps_its_newest_states_and_counts_the_rest) {
    Timeline timeline;
    for (int round = 0; round < 200; ++round) timeline.add({StateId::Decoding, round, 0.5 * round});
    CHECK_EQ(timeline.visits.size(), kMaxVisits);
    CHECK_EQ(timeline.omitted, 200 - static_cast<std::int64_t>(kMaxVisits));
    CHECK_EQ(timeline.visits.front().round, timeline.omitted);
    CHECK_EQ(timeline.visits.back().round, 199);
}
