// Why is it not running? The answer has a code, its figures, and the knob; rounds leave records.
#include "check.h"
#include "engine.h"

using namespace tokenspeed;
using engine::Engine;
using engine::prompt;

namespace {

bool says(const Explanation& explanation, const std::string& part) {
    return explanation.text.find(part) != std::string::npos;
}

}  // namespace

TEST(it_says_that_there_is_no_row) {
    Engine plane({.seqs = 1});
    plane.submit(1, prompt(4, 1), {.max_new_tokens = 9});
    plane.submit(2, prompt(4, 2), {.max_new_tokens = 9});
    plane.round();
    CHECK_EQ(plane.scheduler.explain(1).code, "running");
    CHECK_EQ(plane.scheduler.explain(2).code, "no_row");
    CHECK(says(plane.scheduler.explain(2), "all 1 are taken (scheduler.max_seqs)"));
}

TEST(it_says_which_group_is_short_and_by_how_much) {
    Engine plane({.parents = 20, .seqs = 4, .window = 8});
    plane.submit(1, prompt(30, 1), {.max_new_tokens = 20});
    plane.submit(2, prompt(30, 2), {.max_new_tokens = 20});
    plane.round();
    plane.round();
    const Explanation why = plane.scheduler.explain(2);
    CHECK_EQ(why.code, "capacity");
    CHECK_EQ(why.group_id, "full");
    CHECK(why.short_by > 0);
    CHECK(says(why, "short by " + std::to_string(why.short_by) + " block"));
    CHECK(says(why, "of group full"));
}

TEST(it_says_who_holds_or_seals_the_line) {
    Engine plane({.parents = 30, .seqs = 6, .budget = 8});
    plane.submit(1, prompt(30, 1), {.max_new_tokens = 3});
    plane.submit(2, prompt(4, 2), {.max_new_tokens = 3});
    plane.round();
    CHECK_EQ(plane.scheduler.explain(2).code, "line_held");
    CHECK_EQ(plane.scheduler.explain(2).other, 1);

    Engine sealed({.parents = 12, .seqs = 6, .overtakes = 0});
    sealed.submit(1, prompt(20, 1), {.max_new_tokens = 20});
    sealed.round();
    sealed.submit(2, prompt(40, 2), {.max_new_tokens = 2});
    sealed.round();
    sealed.submit(3, prompt(2, 3), {.max_new_tokens = 2, .priority = 1});
    sealed.round();
    CHECK_EQ(sealed.scheduler.explain(3).other, 2);
    CHECK(says(sealed.scheduler.explain(3), "(max_overtakes)"));
}

TEST(it_says_for_whom_a_request_gave_way) {
    Engine plane({.parents = 14, .seqs = 6, .overlap = 1, .host_parents = 60});
    for (int handle = 1; handle <= 6; ++handle) {
        plane.submit(handle, prompt(9, handle), {.max_new_tokens = 24, .declared = false});
    }
    bool retracted = false, armed = false;
    while (plane.scheduler.has_work()) {
        plane.round();
        for (const RequestRow& row : plane.scheduler.requests(10)) {
            const Explanation why = plane.scheduler.explain(row.handle);
            CHECK_EQ(why.text, row.reason);
            if (why.code == "armed") armed = armed || (why.other > 0 && why.other != row.handle);
            if (why.code == "retracted") retracted = retracted || (why.other > 0 && why.other != row.handle);
        }
    }
    CHECK(retracted);
    CHECK(armed);
    CHECK_EQ(plane.scheduler.explain(1).code, "ended");
}

TEST(rounds_leave_records_in_a_ring) {
    Engine plane({.parents = 14, .seqs = 6, .host_parents = 60});
    for (int handle = 1; handle <= 6; ++handle) {
        plane.submit(handle, prompt(9, handle), {.max_new_tokens = 24, .declared = false});
    }
    plane.run();
    const std::vector<Decision> all = plane.scheduler.decisions(5000);
    std::int64_t decodes = 0, retracted = 0, restored = 0, blocked = 0;
    for (const Decision& decision : all) {
        decodes += decision.decode_rows;
        retracted += static_cast<std::int64_t>(decision.retracted.size());
        restored += static_cast<std::int64_t>(decision.restored.size());
        blocked += static_cast<std::int64_t>(decision.blocked.size());
        CHECK_EQ(decision.free_blocks.size(), 1u);
    }
    const Snapshot snapshot = plane.scheduler.snapshot();
    CHECK_EQ(decodes, snapshot.decode_tokens);
    CHECK_EQ(retracted, snapshot.retractions);
    CHECK_EQ(restored, snapshot.restores);
    CHECK(blocked > 0);
    CHECK_EQ(plane.scheduler.decisions(3).size(), 3u);
    for (int round = 0; round < 2000; ++round) {
        if (plane.live.empty()) plane.submit(100 + round, prompt(4, round), {.max_new_tokens = 5});
        plane.round();
    }
    CHECK_EQ(plane.scheduler.decisions(5000).size(), 1024u);
}

namespace {

bool any_says(const std::vector<std::string>& lines, const std::string& part) {
    for (const std::string& line : lines) {
        if (line.find(part) != std::string::npos) return true;
    }
    return false;
}

}  // namespace

TEST(who_is_not_looked_at_says_behind_whom_it_stands_and_why_that_one_waits) {
    Engine plane({.parents = 30, .seqs = 1});
    plane.submit(1, prompt(4, 1), {.max_new_tokens = 9});
    plane.submit(2, prompt(4, 2), {.max_new_tokens = 9});
    plane.submit(3, prompt(4, 3), {.max_new_tokens = 9});
    plane.round();
    const Explanation why = plane.scheduler.explain(3);
    CHECK_EQ(why.code, "queued");
    CHECK_EQ(why.other, 2);
    CHECK_EQ(why.text, "behind request 2 in the line: no row: all 1 are taken (scheduler.max_seqs)");
    // What it was told stays no longer than it is so.
    plane.end(2, true);
    CHECK_EQ(plane.scheduler.explain(3).other, 0);
    plane.round();
    CHECK_EQ(plane.scheduler.explain(3).code, "no_row");
}

TEST(a_waiting_request_names_what_it_needs_what_there_is_and_what_would_free_it) {
    Engine plane({.parents = 20, .seqs = 4});
    plane.submit(1, prompt(30, 1), {.max_new_tokens = 20});
    plane.submit(2, prompt(30, 2), {.max_new_tokens = 20});
    plane.submit(3, prompt(8, 3), {.max_new_tokens = 8});
    plane.round();
    plane.round();
    const std::vector<std::string> lines = plane.scheduler.describe(2).lines;
    // 30 tokens are 8 blocks of 4; of 20 output tokens 19 are written: 49 tokens are 13 blocks, 5 more.
    CHECK(any_says(lines, "place 1 of "));
    CHECK(any_says(lines, "group full: its first chunk of 30 tokens needs 8 blocks, and beside it 5 blocks must be left for its "
                          "output (scheduler.headroom 4096)"));
    const Snapshot counts = plane.scheduler.snapshot();
    CHECK(any_says(lines, std::to_string(counts.groups[0].free) + " are free and " + std::to_string(counts.groups[0].cached) +
                              " cached"));
    CHECK(any_says(lines, "would make room; more blocks (kv.bytes), or a smaller reserve (scheduler.headroom 4096), would help"));
    plane.end(3, true);
    CHECK(any_says(plane.scheduler.describe(2).lines,
                   "of group full: the end of request 1 would make room; none gives way to it, for all that run are before it "
                   "in the line"));
    // And so it is.
    plane.end(1, true);
    plane.round();
    plane.round();
    CHECK_EQ(plane.state(2) == "Submitted", false);
    CHECK(any_says(plane.scheduler.describe(2).lines, "group full: holds "));
    CHECK(any_says(plane.scheduler.describe(2).lines, "its whole output is promised"));
}

TEST(a_waiting_request_that_lacks_a_row_only_says_so) {
    Engine plane({.parents = 30, .seqs = 1});
    plane.submit(1, prompt(4, 1), {.max_new_tokens = 9});
    plane.submit(2, prompt(4, 2), {.max_new_tokens = 9});
    plane.round();
    CHECK(any_says(plane.scheduler.describe(2).lines,
                   "there are blocks enough, but no row: it begins when one of the 1 (scheduler.max_seqs) is free"));
    CHECK_EQ(plane.scheduler.describe(77).alive, false);
    CHECK(plane.scheduler.describe(77).timeline.visits.empty());
}

TEST(a_retraction_leaves_a_note_with_both_sides_and_what_becomes_of_it) {
    for (const int host : {0, 60}) {
        Engine plane({.parents = 14, .seqs = 6, .host_parents = host});
        for (int handle = 1; handle <= 6; ++handle) {
            plane.submit(handle, prompt(9, handle), {.max_new_tokens = 24, .declared = false});
        }
        std::vector<Note> notes;
        bool image = false;
        while (plane.scheduler.has_work()) {
            plane.scheduler.set_time(7.5);
            plane.round();
            for (Note& note : plane.scheduler.take_notes()) notes.push_back(std::move(note));
            for (const RequestRow& row : plane.scheduler.requests(10)) {
                if (row.state != fsm::StateId::Retracted) continue;
                CHECK(row.host_blocks > 0);
                image = image || any_says(plane.scheduler.describe(row.handle).lines, "lies in the host pool (kv.host_bytes)");
            }
        }
        CHECK_EQ(static_cast<std::int64_t>(notes.size()), plane.scheduler.snapshot().retractions);
        CHECK(!notes.empty());
        CHECK_EQ(notes[0].kind, "retraction");
        CHECK_EQ(notes[0].time, 7.5);
        CHECK(notes[0].text.find("which was short by ") != std::string::npos);
        const std::string fate = host > 0 ? "of its image are copied to the host pool" : "there is no host pool (kv.host_bytes)";
        CHECK(notes[0].text.find(fate) != std::string::npos);
        CHECK_EQ(image, host > 0);
        CHECK(plane.scheduler.take_notes().empty());
    }
}

TEST(what_waits_for_a_copy_or_for_the_storage_says_so) {
    Engine stored({.parents = 20, .host_parents = 40, .storage = true});
    stored.submit(1, prompt(9, 1), {.max_new_tokens = 2});
    (void)stored.scheduler.plan();
    CHECK_EQ(stored.state(1), "Prefetching");
    CHECK(any_says(stored.scheduler.describe(1).lines, "after 100 ms it is computed without, whatever the storage does"));

    Engine plane({.parents = 14, .seqs = 6, .overlap = 1, .host_parents = 60});
    for (int handle = 1; handle <= 6; ++handle) {
        plane.submit(handle, prompt(9, handle), {.max_new_tokens = 24, .declared = false});
    }
    bool going = false, coming = false, alone = false;
    while (plane.scheduler.has_work()) {
        plane.round();
        for (const RequestRow& row : plane.scheduler.requests(10)) {
            const std::vector<std::string> lines = plane.scheduler.describe(row.handle).lines;
            going = going || any_says(lines, "is on the way to the host pool; it can come back when the copy has ended");
            coming = coming || any_says(lines, "is on the way from the host pool to the device");
            alone = alone || any_says(lines, "nobody gives way to one that comes back");
        }
    }
    CHECK(going && coming && alone);
}
