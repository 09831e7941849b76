"""Retraction by recompute: who goes, who comes back, and that nobody thrashes or idles meanwhile."""

import pytest
from kv_model import expected_output, prompt_of
from played_engine import WITHOUT_BLOCKS, Engine

from tokenspeed_scheduler import Plan, RowKind, State

OVERLAPS = pytest.mark.parametrize("overlap", [0, 1])


def land_due(engine: Engine, plan: Plan) -> None:
    """Lands what the loop would land after ``plan``."""
    while len(engine.flights) > (engine.overlap if plan.num_rows else 0):
        engine.land()


def until_retracted(engine: Engine, rounds: int = 300) -> list[int]:
    """Makes rounds until somebody is retracted, that round included; returns who."""
    for _ in range(rounds):
        plan = engine.plan()
        taken = engine.retracted()
        land_due(engine, plan)
        engine.check()
        if taken:
            return taken
    raise AssertionError("nobody was retracted")


@OVERLAPS
def test_nobody_is_retracted_where_there_is_room(overlap: int) -> None:
    engine = Engine(num_parents=100, overlap=overlap)
    for salt in range(6):
        engine.submit(prompt_of(10, salt), 30, declared=False)
    engine.run()
    assert engine.scheduler.snapshot().retractions == 0


@OVERLAPS
def test_undeclared_lengths_that_outgrow_the_pool_all_end_with_their_own_tokens(overlap: int) -> None:
    engine = Engine(num_parents=14, overlap=overlap)
    handles = [engine.submit(prompt_of(9, salt), 30, declared=False) for salt in range(5)]
    engine.run()
    assert engine.scheduler.snapshot().retractions > 0
    for salt, handle in enumerate(handles):
        assert engine.done[handle].output == expected_output(prompt_of(9, salt), 30)
    engine.assert_whole()


@OVERLAPS
def test_a_retracted_request_holds_no_block_and_no_row(overlap: int) -> None:
    engine = Engine(num_parents=12, budget=32, overlap=overlap)
    for salt in range(3):
        engine.submit(prompt_of(8, salt), 24, declared=False)
    (victim,) = until_retracted(engine)
    rows = {row.handle: row for row in engine.scheduler.requests()}
    assert (rows[victim].blocks, rows[victim].retractions) == (0, 1)
    assert rows[victim].generated_tokens == engine.requests[victim].landed > 0
    snapshot = engine.scheduler.snapshot()
    assert snapshot.retractions == 1
    assert (snapshot.running, snapshot.waiting) == (2, 1)
    assert State(rows[victim].state) in WITHOUT_BLOCKS
    assert sum(count for source, target, count in snapshot.flows if source > target and target in WITHOUT_BLOCKS) == 1
    engine.run()
    engine.assert_whole()


@pytest.mark.parametrize("budget", [4, 64])
@OVERLAPS
def test_it_resumes_with_prompt_and_output_as_what_is_prefilled(budget: int, overlap: int) -> None:
    engine = Engine(num_parents=12, budget=budget, overlap=overlap, prefix_cache=False)
    for salt in range(3):
        engine.submit(prompt_of(8, salt), 24, declared=False)
    (victim,) = until_retracted(engine)
    length = 8 + engine.requests[victim].landed
    seen: list[tuple[int, int]] = []
    while not seen or sum(seen[-1]) < length:
        plan = engine.round()
        for index in [i for i, handle in enumerate(plan.handle.tolist()) if handle == victim]:
            if index in plan.starts.tolist():
                seen.clear()
            assert plan.kind[index] == RowKind.PREFILL
            assert plan.prompt_len[index] == length
            seen.append((int(plan.prefix_len[index]), int(plan.input_len[index])))
            assert plan.samples[index] == (sum(seen[-1]) == length)
    assert seen[0][0] == 0
    assert sum(count for _, count in seen) == length
    engine.run()
    assert engine.done[victim].output == expected_output(prompt_of(8, victim - 1), 24)
    engine.assert_whole()


@OVERLAPS
def test_what_is_still_cached_of_a_victim_is_not_computed_again(overlap: int) -> None:
    """Two grow, one goes and soon the other ends: much of the victim's prefix is still in the cache."""
    engine = Engine(num_parents=16, budget=64, overlap=overlap)
    first = engine.submit(prompt_of(24), 12, declared=False)
    second = engine.submit(prompt_of(24, 1), 12, declared=False)
    (victim,) = until_retracted(engine)
    engine.abort(first if victim == second else second)
    engine.run()
    assert engine.cached(victim) > 0
    assert len(engine.done[victim].cached_at_starts) == 2
    engine.assert_whole()


@OVERLAPS
def test_the_retracted_one_comes_back_before_those_that_wait(overlap: int) -> None:
    """A was retracted; B and C wait: A goes first."""
    engine = Engine(num_parents=14, budget=64, overlap=overlap, max_num_seqs=4)
    for salt in range(3):
        engine.submit(prompt_of(8, salt), 24, declared=False)
    (victim,) = until_retracted(engine)
    late = [engine.submit(prompt_of(8, 10 + salt), 4, declared=False) for salt in range(2)]
    order: list[int] = []
    for _ in range(300):
        plan = engine.round()
        order.extend(plan.handle[plan.starts].tolist())
        if {victim, *late} <= set(order):
            break
    assert min(order.index(handle) for handle in late) > order.index(victim)
    engine.run()
    engine.assert_whole()


@pytest.mark.parametrize("budget", [3, 8])
@OVERLAPS
def test_a_budget_below_a_victims_length_makes_progress_without_ping_pong(budget: int, overlap: int) -> None:
    engine = Engine(num_parents=16, budget=budget, overlap=overlap)
    handles = [engine.submit(prompt_of(20, salt), 36, declared=False) for salt in range(2)]
    engine.run(400)
    retractions = engine.scheduler.snapshot().retractions
    assert 1 <= retractions <= 6
    for salt, handle in enumerate(handles):
        assert engine.done[handle].output == expected_output(prompt_of(20, salt), 36)
    engine.assert_whole()


@OVERLAPS
def test_the_work_that_is_done_twice_stays_in_proportion(overlap: int) -> None:
    """Many in a pool for few: what is computed stays within a small multiple of what is needed."""
    engine = Engine(num_parents=24, budget=32, overlap=overlap, max_num_seqs=8)
    for salt in range(12):
        engine.submit(prompt_of(10, salt), 30, declared=False)
    needed = 12 * (10 + 29)
    engine.run()
    snapshot = engine.scheduler.snapshot()
    assert snapshot.retractions > 0
    assert snapshot.prefill_tokens + snapshot.decode_tokens < 4 * needed
    engine.assert_whole()


@OVERLAPS
def test_a_thousand_retractions_leave_the_pool_whole(overlap: int) -> None:
    engine = Engine(num_parents=13, budget=32, overlap=overlap, max_num_seqs=4)
    served = 0
    while engine.scheduler.snapshot().retractions < 1000:
        assert served < 4000, "the load does not press"
        for _ in range(4):
            engine.submit(prompt_of(7, served % 70), 20, declared=False)
            served += 1
        engine.run(check=False)
        engine.check()
        assert engine.group()[0] == 0
    engine.assert_whole()
    assert engine.count(State.FINISHED) == served


@OVERLAPS
def test_three_choices_of_one_prompt_in_a_pool_for_two(overlap: int) -> None:
    """n choices are n requests that share a prefix; a retracted one resumes with the same text."""
    engine = Engine(num_parents=18, budget=32, overlap=overlap)
    handles = [engine.submit(prompt_of(12), 26, declared=False, choice=choice) for choice in range(3)]
    engine.run()
    assert engine.scheduler.snapshot().retractions > 0
    outputs = [engine.done[handle].output for handle in handles]
    assert outputs == [expected_output(prompt_of(12), 26, choice=choice) for choice in range(3)]
    assert len({tuple(output) for output in outputs}) == 3
    engine.assert_whole()


def test_the_end_of_one_choice_frees_its_own_blocks_only() -> None:
    engine = Engine(num_parents=40, budget=64)
    first = engine.submit(prompt_of(16), 30, choice=0)
    engine.rounds(2)
    others = [engine.submit(prompt_of(16), 30, choice=choice) for choice in (1, 2)]
    engine.rounds(8)
    kept = {block for handle in others for block in engine.table(handle)}
    assert len(kept) < sum(len(engine.table(handle)) for handle in others), "they share the prompt"
    engine.abort(first)
    engine.check()
    assert engine.group()[0] == len(kept)
    engine.run()
    for choice, handle in enumerate(others, 1):
        assert engine.done[handle].output == expected_output(prompt_of(16), 30, choice=choice)


# Nobody idles for a victim.


@OVERLAPS
def test_a_victim_with_a_result_out_is_never_taken(overlap: int) -> None:
    """Engine asserts at every plan that who lost its row has nothing out; here the pool is tight all the time."""
    engine = Engine(num_parents=14, overlap=overlap, budget=32, granularity=2, max_num_seqs=6)
    for salt in range(12):
        engine.submit(prompt_of(5, salt), 18, declared=False)
    engine.run()
    assert engine.scheduler.snapshot().retractions > 5
    engine.assert_whole()


@pytest.mark.parametrize(("granularity", "share"), [(4, 0.85), (16, 0.9)])
@OVERLAPS
def test_an_armed_victim_idles_nobody_else(granularity: int, share: float, overlap: int) -> None:
    """In a tight pool nearly every resident decoder gets its row in nearly every round.

    With blocks of 4 tokens and a result out many are at the end of a block together, and a victim needs one round to
    become quiet: a round may be empty then, but never two.
    """
    parents = 400 // granularity
    engine = Engine(num_parents=parents, granularity=granularity, overlap=overlap, budget=64, max_num_seqs=12)
    for salt in range(12):
        engine.submit(prompt_of(6 + salt % 5, salt), 80, declared=False)
    ran, able, empty = 0, 0, 0
    while engine.requests:
        could = {h for h, r in engine.requests.items() if r.row and 0 < r.samples < r.max_new_tokens}
        plan = engine.plan()
        could -= set(engine.retracted())
        empty = 0 if plan.num_rows or not could else empty + 1
        assert empty < 2, f"two empty rounds with {len(could)} able decoders"
        ran += len(set(plan.handle.tolist()) & could)
        able += len(could)
        land_due(engine, plan)
    assert engine.scheduler.snapshot().retractions >= 3
    assert ran / able >= share
    engine.assert_whole()


@OVERLAPS
def test_the_room_goes_to_the_blocked_in_the_round_in_which_it_is_made(overlap: int) -> None:
    """Evict and grant are one: in the round in which somebody is taken, all that stay get their row."""
    engine = Engine(num_parents=12, budget=32, overlap=overlap, granularity=4)
    for salt in range(3):
        engine.submit(prompt_of(8, salt), 24, declared=False)
    for _ in range(200):
        able = {h for h, r in engine.requests.items() if 0 < r.samples < r.max_new_tokens}
        plan = engine.plan()
        taken = engine.retracted()
        if taken:
            break
        land_due(engine, plan)
    assert len(taken) == 1
    assert set(plan.handle.tolist()) == able - set(taken)
    engine.run()


@OVERLAPS
def test_an_incomplete_prefill_goes_before_a_decoder(overlap: int) -> None:
    """Two decoders grow beside a prompt that is prefilled in small chunks: the prompt gives way."""
    engine = Engine(num_parents=20, budget=4, overlap=overlap, max_overtakes=0)
    decoders = [engine.submit(prompt_of(4, salt), 24, declared=False) for salt in range(2)]
    engine.rounds(4)
    large = engine.submit(prompt_of(60, 5), 4, declared=False)
    taken = until_retracted(engine)
    assert taken == [large]
    engine.run()
    for salt, handle in enumerate(decoders):
        assert engine.done[handle].output == expected_output(prompt_of(4, salt), 24)
    assert engine.done[large].output == expected_output(prompt_of(60, 5), 4)
    engine.assert_whole()


@OVERLAPS
def test_an_incomplete_prefill_goes_even_where_a_decoder_would_free_more(overlap: int) -> None:
    engine = Engine(num_parents=26, budget=4, overlap=overlap, prefix_cache=False)
    decoders = [engine.submit(prompt_of(36, salt), 30, declared=False) for salt in range(2)]
    while any(request.samples == 0 for request in engine.requests.values()):
        engine.round()
    late = engine.submit(prompt_of(40, 5), 4, declared=False)
    sizes: dict[int, int] = {}
    for _ in range(60):
        plan = engine.plan()
        if engine.retracted():
            break
        sizes = {handle: len(engine.table(handle)) for handle, r in engine.requests.items() if r.row}
        land_due(engine, plan)
    assert engine.retracted() == [late]
    assert sizes[late] < min(sizes[handle] for handle in decoders)
    engine.run()
    engine.assert_whole()


def rounds_without_finish(engine: Engine, count: int) -> None:
    for _ in range(count):
        plan = engine.plan()
        while len(engine.flights) > (engine.overlap if plan.num_rows else 0):
            engine.land(finish=False)
        engine.check()


@OVERLAPS
def test_the_last_token_of_a_victim_is_not_sampled_twice(overlap: int) -> None:
    """A request whose every token is scheduled waits only for its Finish; pressure on it must not make it sample on."""
    engine = Engine(num_parents=12, budget=32, overlap=overlap)
    ended = engine.submit(prompt_of(16), 4, declared=False)
    rounds_without_finish(engine, 8)
    assert engine.requests[ended].landed == 4
    other = engine.submit(prompt_of(20, 1), 24, declared=False)
    rounds_without_finish(engine, 60)
    assert engine.requests[ended].samples == 4
    engine.run()
    assert engine.done[other].output == expected_output(prompt_of(20, 1), 24)
    engine.assert_whole()
