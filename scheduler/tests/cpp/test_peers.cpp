// Prefill and decode apart: the handshake, the hand-off, what is pinned while a peer touches it, and ends on both sides.
#include "check.h"
#include "engine.h"

using namespace tokenspeed;
using engine::Engine;
using engine::prompt;

namespace {

constexpr engine::ConfigOptions kPrefill{.parents = 40, .budget = 16, .window = 6, .checkpoint = 8, .role = fsm::Role::Prefill};
constexpr engine::ConfigOptions kDecode{.parents = 40, .budget = 16, .window = 6, .checkpoint = 8, .role = fsm::Role::Decode};

const CacheOperation* operation_of(const Plan& plan, OperationKind kind) {
    for (const CacheOperation& operation : plan.operations) {
        if (operation.kind == kind) return &operation;
    }
    return nullptr;
}

// Lets the prefill role compute a prompt; returns the plan that hands it off.
std::shared_ptr<const Plan> until_handed_off(Engine& plane, int handle, std::int32_t& first_token) {
    for (int round = 0; round < 50; ++round) {
        const auto plan = plane.scheduler.plan();
        plane.scheduler.check_invariants();
        if (const auto* operation = operation_of(*plan, OperationKind::HandOff); operation && operation->handle == handle) return plan;
        std::vector<Event> events = plane.device.execute(*plan);
        for (const Event& event : events) {
            if (const auto* result = std::get_if<ForwardResult>(&event)) {
                for (const std::int32_t token : result->tokens) first_token = std::max(first_token, token);
            }
        }
        plane.scheduler.advance(events);
    }
    check::fail(__FILE__, __LINE__, "the prompt was never handed off");
}

}  // namespace

TEST(a_prompt_is_computed_handed_off_and_released_when_the_peer_has_it) {
    Engine plane(kPrefill);
    plane.submit(1, prompt(40), {.max_new_tokens = 100});
    CHECK_EQ(plane.state(1), "Bootstrapping");
    CHECK_EQ(plane.scheduler.plan()->num_rows(), 0);
    CHECK_EQ(plane.scheduler.explain(1).code, "bootstrapping");
    plane.scheduler.advance({Bootstrapped{1}, Bootstrapped{1}, Bootstrapped{7}});
    CHECK_EQ(plane.scheduler.snapshot().ignored_results, 2);
    std::int32_t first_token = -1;
    const auto plan = until_handed_off(plane, 1, first_token);
    CHECK(first_token >= 0);
    const CacheOperation& hand_off = *operation_of(*plan, OperationKind::HandOff);
    // All of the history, the window, the live state.
    CHECK_EQ(std::count(hand_off.group.begin(), hand_off.group.end(), 0), 10);
    CHECK_EQ(std::count(hand_off.group.begin(), hand_off.group.end(), 1), 2);
    CHECK_EQ(std::count(hand_off.group.begin(), hand_off.group.end(), 2), 1);
    CHECK_EQ(plane.state(1), "Decoding");
    CHECK(plane.scheduler.snapshot().groups[0].pinned > 0);
    CHECK_EQ(plane.scheduler.plan()->num_rows(), 0);
    // An end waits for the peer.
    plane.end(1, false);
    CHECK_EQ(plane.state(1), "Finishing");
    plane.scheduler.advance({OperationDone{hand_off.op_id, {}}});
    plane.scheduler.check_invariants();
    CHECK_EQ(plane.state(1), "gone");
    plane.check_pool_whole();
    // And without one the acknowledgement is the end.
    plane.submit(2, prompt(10, 2), {.max_new_tokens = 100});
    plane.scheduler.advance({Bootstrapped{2}});
    const auto second = until_handed_off(plane, 2, first_token);
    plane.scheduler.advance({OperationDone{operation_of(*second, OperationKind::HandOff)->op_id, {}}});
    CHECK_EQ(plane.state(2), "gone");
    plane.check_pool_whole();
}

TEST(the_prefill_role_bounds_only_the_prompt_and_makes_nobody_give_way) {
    Engine plane({.parents = 8, .budget = 16, .role = fsm::Role::Prefill});
    CHECK_THROWS(RequestRefused, "more than the 32", plane.scheduler.submit(1, prompt(32), {.max_new_tokens = 500}));
    for (int handle = 1; handle <= 3; ++handle) {
        plane.submit(handle, prompt(16, handle), {.max_new_tokens = 500});
        plane.scheduler.advance({Bootstrapped{handle}});
    }
    std::int32_t token = -1;
    std::deque<std::int64_t> out;
    int ended = 0;
    for (int round = 0; round < 60 && ended < 3; ++round) {
        const auto plan = plane.scheduler.plan();
        plane.scheduler.check_invariants();
        for (const CacheOperation& operation : plan->operations) out.push_back(operation.op_id);
        if (plan->num_rows() > 0) {
            for (Event& event : plane.device.execute(*plan)) {
                if (std::get_if<ForwardResult>(&event) != nullptr) plane.scheduler.advance({event});
            }
        }
        // The peer is slow: it reads one prompt every fifth round.
        if (round % 5 == 4 && !out.empty()) {
            plane.scheduler.advance({OperationDone{out.front(), {}}});
            out.pop_front();
            ++ended;
        }
    }
    CHECK_EQ(ended, 3);
    CHECK_EQ(plane.scheduler.snapshot().retractions, 0);
    (void)token;
    plane.check_pool_whole();
}

TEST(a_whole_prompt_is_left_to_the_peer_and_decoded_here) {
    Engine plane(kDecode);
    plane.submit(1, prompt(21), {.max_new_tokens = 6});
    plane.submit(2, prompt(9, 2), {.max_new_tokens = 6});
    plane.scheduler.advance({Bootstrapped{1}, Bootstrapped{2}});
    const auto plan = plane.scheduler.plan();
    plane.scheduler.check_invariants();
    const CacheOperation& remote = *operation_of(*plan, OperationKind::RemotePrefill);
    CHECK_EQ(remote.handle, 1);
    CHECK_EQ(plan->operations.size(), 1u);  // at most one a round
    CHECK_EQ(std::count(remote.group.begin(), remote.group.end(), 0), 6);
    CHECK_EQ(plane.state(1), "RemotePrefilling");
    CHECK_EQ(plane.state(2), "Submitted");
    const auto second = plane.scheduler.plan();
    CHECK_EQ(operation_of(*second, OperationKind::RemotePrefill)->handle, 2);
    CHECK_EQ(second->num_rows(), 0);
    plane.scheduler.advance({RemotePrefillDone{1, 55}, RemotePrefillDone{1, 56}, RemotePrefillDone{9, 1}});
    CHECK_EQ(plane.scheduler.snapshot().ignored_results, 2);
    CHECK_EQ(plane.state(1), "PrefillDone");
    const auto decode = plane.scheduler.plan();
    CHECK_EQ(decode->num_rows(), 1);
    CHECK_EQ(decode->input_ids[0], 55);
    CHECK_EQ(decode->prefix_len[0], 21);
    CHECK_EQ(decode->starts.size(), 1u);
    CHECK(!decode->tables[0].ids.empty());
}

TEST(what_the_peer_writes_is_held_until_it_reports_even_after_an_abort) {
    Engine plane(kDecode);
    for (const std::int32_t report : {7, -1}) {
        plane.submit(1, prompt(21), {.max_new_tokens = 6});
        plane.scheduler.advance({Bootstrapped{1}});
        (void)plane.scheduler.plan();
        plane.end(1, true);
        CHECK_EQ(plane.state(1), "Finishing");
        CHECK(plane.scheduler.snapshot().groups[0].held > 0);
        plane.scheduler.advance({RemotePrefillDone{1, report}});
        plane.scheduler.check_invariants();
        CHECK_EQ(plane.state(1), "gone");
        plane.check_pool_whole();
    }
}

TEST(a_peer_that_fails_ends_that_request_with_a_reason) {
    Engine plane(kDecode);
    plane.submit(1, prompt(21), {.max_new_tokens = 6});
    plane.scheduler.advance({Bootstrapped{1}});
    (void)plane.scheduler.plan();
    plane.scheduler.advance({RemotePrefillDone{1, -1}});
    const auto plan = plane.scheduler.plan();
    CHECK_EQ(plan->aborts.size(), 1u);
    CHECK_EQ(plan->aborts[0].reason, "failed");
    plane.check_pool_whole();
}

TEST(the_decode_role_retracts_and_restores_by_itself) {
    Engine plane({.parents = 14, .seqs = 6, .budget = 16, .host_parents = 60, .role = fsm::Role::Decode});
    for (int handle = 1; handle <= 5; ++handle) {
        plane.submit(handle, prompt(9, handle), {.max_new_tokens = 20, .declared = false});
        plane.scheduler.advance({Bootstrapped{handle}});
    }
    std::map<int, int> produced;
    for (int round = 0; round < 400 && plane.scheduler.has_work(); ++round) {
        const auto plan = plane.scheduler.plan();
        plane.scheduler.check_invariants();
        std::vector<Event> events;
        for (const CacheOperation& operation : plan->operations) {
            events.push_back(OperationDone{operation.op_id, {}});
            if (operation.kind == OperationKind::RemotePrefill) events.push_back(RemotePrefillDone{operation.handle, 5});
        }
        ForwardResult result{plan->forward_id, std::vector<std::int32_t>(plan->handle.size(), 7), {}};
        if (plan->num_rows() > 0) events.emplace_back(result);
        for (const std::int32_t handle : plan->handle) {
            if (++produced[handle] == 19) events.push_back(Finish{handle});
        }
        plane.scheduler.advance(events);
        plane.scheduler.check_invariants();
    }
    CHECK(!plane.scheduler.has_work());
    const Snapshot snapshot = plane.scheduler.snapshot();
    CHECK(snapshot.retractions > 0);
    CHECK_EQ(snapshot.restores, snapshot.retractions);
    CHECK_EQ(snapshot.prefill_tokens, 0);
    plane.check_pool_whole();
}

// Two deployments and a loopback between them: prompts are computed here, decoded there, with the tokens of a fused one.
TEST(prompts_computed_by_one_and_decoded_by_the_other_give_the_same_tokens) {
    for (const int overlap : {0, 1}) {
        engine::ConfigOptions here = kPrefill, there = kDecode;
        here.overlap = there.overlap = overlap;
        here.parents = 60;
        there.parents = 26;  // tight: the decode side retracts, too
        there.host_parents = 60;
        const SchedulerConfig config = engine::config(there);
        Engine prefill(here), decode(there);
        std::map<int, std::vector<std::int32_t>> sequences;
        for (int handle = 1; handle <= 8; ++handle) {
            sequences[handle] = prompt(11 + 3 * handle, handle % 3);
            prefill.scheduler.submit(handle, sequences[handle], {.max_new_tokens = 12});
            decode.scheduler.submit(handle, sequences[handle], {.max_new_tokens = 12, .declared = false});
            prefill.scheduler.advance({Bootstrapped{handle}});
            decode.scheduler.advance({Bootstrapped{handle}});
        }
        std::map<int, CacheOperation> hand_offs, remotes;
        std::map<int, std::int32_t> first_tokens;
        std::deque<std::vector<Event>> prefill_out, decode_out;
        std::map<std::int64_t, std::shared_ptr<const Plan>> plans;
        std::size_t ended = 0;
        for (int round = 0; round < 600 && ended < 8; ++round) {
            const auto first = prefill.scheduler.plan();
            for (const CacheOperation& operation : first->operations) hand_offs.emplace(operation.handle, operation);
            std::vector<Event> events;
            for (Event& event : prefill.device.execute(*first)) {
                const auto* result = std::get_if<ForwardResult>(&event);
                if (result == nullptr) continue;  // a hand-off is acknowledged when the peer has it
                for (std::size_t i = 0; i < result->tokens.size(); ++i) {
                    if (result->tokens[i] >= 0) first_tokens[first->handle[i]] = result->tokens[i];
                }
                events.push_back(event);
            }
            prefill_out.push_back(events);
            while (prefill_out.size() > static_cast<std::size_t>(overlap)) {
                prefill.scheduler.advance(prefill_out.front());
                prefill_out.pop_front();
            }
            prefill.scheduler.check_invariants();

            const auto second = decode.scheduler.plan();
            plans[second->forward_id] = second;
            for (const CacheOperation& operation : second->operations) {
                if (operation.kind == OperationKind::RemotePrefill) remotes.emplace(operation.handle, operation);
            }
            decode_out.push_back(decode.device.execute(*second));
            while (decode_out.size() > static_cast<std::size_t>(second->num_rows() > 0 ? overlap : 0)) {
                std::vector<Event> due = decode_out.front();
                decode_out.pop_front();
                const ForwardResult* result = due.empty() ? nullptr : std::get_if<ForwardResult>(&due.back());
                std::vector<Event> ends;
                for (std::size_t i = 0; result != nullptr && i < result->tokens.size(); ++i) {
                    const std::int32_t handle = plans[result->forward_id]->handle[i];
                    std::vector<std::int32_t>& sequence = sequences[handle];
                    const auto want = static_cast<std::size_t>(11 + 3 * handle + 12);
                    if (sequence.size() == want) continue;  // one more was out
                    CHECK_EQ(result->tokens[i], engine::next_token(sequence, config));
                    sequence.push_back(result->tokens[i]);
                    if (sequence.size() < want) continue;
                    ends.push_back(Finish{handle});
                    ++ended;
                }
                due.insert(due.end(), ends.begin(), ends.end());
                decode.scheduler.advance(due);
                decode.scheduler.check_invariants();
            }
            for (auto remote = remotes.begin(); remote != remotes.end();) {
                const int handle = remote->first;
                if (!hand_offs.contains(handle)) {
                    ++remote;
                    continue;
                }
                prefill.device.send(hand_offs.at(handle), decode.device, remote->second);
                prefill.scheduler.advance({OperationDone{hand_offs.at(handle).op_id, {}}});
                CHECK_EQ(first_tokens.at(handle), engine::next_token(sequences[handle], config));
                sequences[handle].push_back(first_tokens.at(handle));
                decode.scheduler.advance({RemotePrefillDone{handle, first_tokens.at(handle)}});
                remote = remotes.erase(remote);
            }
        }
        CHECK_EQ(ended, 8u);
        CHECK(decode.scheduler.snapshot().retractions > 0);
        CHECK_EQ(decode.scheduler.snapshot().prefill_tokens, 0);
        while (decode.scheduler.has_work()) {
            const auto rest = decode.scheduler.plan();
            for (; !decode_out.empty(); decode_out.pop_front()) decode.scheduler.advance(decode_out.front());
            decode.scheduler.advance(decode.device.execute(*rest));
        }
        prefill.check_pool_whole();
        decode.check_pool_whole();
    }
}
