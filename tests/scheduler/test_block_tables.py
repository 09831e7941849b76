"""Block tables as deltas, and plans as read-only arrays that keep their memory alive."""

import gc
import random

import numpy as np
import pytest
from engine_settings import Settings
from kv_model import prompt_of
from plan_checks import plan_arrays
from played_engine import Engine

from tokenspeed_scheduler import Scheduler

OVERLAPS = pytest.mark.parametrize("overlap", [0, 1])


def deltas(plan: object) -> list[tuple[int, int, list[int], int, int]]:
    """(row, first_slot, ids, version_from, version_to) of every entry."""
    (delta,) = plan.tables  # type: ignore[attr-defined]
    ends = np.cumsum(delta.count)
    ids = [delta.ids[end - count : end].tolist() for end, count in zip(ends, delta.count, strict=True)]
    first, begin, end = (column.tolist() for column in (delta.first_slot, delta.version_from, delta.version_to))
    return list(zip(delta.row.tolist(), first, ids, begin, end, strict=True))


def test_a_table_grows_by_what_is_new() -> None:
    engine = Engine(budget=4, granularity=4)
    engine.submit(prompt_of(8), 12)
    entries = [entry for plan in engine.rounds(10) for entry in deltas(plan)]
    assert {row for row, *_ in entries} == {1}
    assert [version for *_, version, _ in entries] == list(range(len(entries)))
    ids = [block for _, _, ids, _, _ in entries for block in ids]
    assert len(set(ids)) == len(ids), "no block is told twice"
    assert engine.table(1) == ids
    slots = [first for _, first, *_ in entries]
    assert slots == sorted(slots)


def test_a_decode_inside_its_block_has_no_delta() -> None:
    engine = Engine(granularity=16, budget=64)
    engine.submit(prompt_of(17), 12)
    engine.rounds(2)
    assert [deltas(plan) for plan in engine.rounds(10)] == [[]] * 10
    engine.assert_whole()


def test_the_number_of_deltas_is_the_number_of_blocks_and_not_of_rows() -> None:
    engine = Engine(granularity=8, num_parents=200, budget=64)
    for salt in range(8):
        engine.submit(prompt_of(8, salt), 64)
    engine.run()
    assert engine.tables.entries <= 8 * (1 + 72 // 8)


def test_a_prefix_hit_shares_its_blocks() -> None:
    engine = Engine(budget=64)
    first = engine.submit(prompt_of(18), 20)
    engine.rounds(2)
    second = engine.submit(prompt_of(18), 20)
    engine.rounds(2)
    assert engine.table(first)[:4] == engine.table(second)[:4]
    assert not set(engine.table(first)[4:]) & set(engine.table(second)[4:])
    engine.plan()
    assert engine.group()[0] == len({*engine.table(first), *engine.table(second)}), "a shared block is counted once"
    engine.land()
    engine.abort(first)
    engine.check()
    engine.run()
    engine.assert_whole()


def test_versions_begin_anew_when_a_row_is_taken_again() -> None:
    engine = Engine(max_num_seqs=1)
    for salt in range(3):
        engine.submit(prompt_of(6, salt), 4)
    begun = []
    for _ in range(15):
        plan = engine.round()
        begun.extend(entry[3] for entry in deltas(plan) if len(plan.starts))
    assert begun == [0, 0, 0]


def test_no_null_block_is_handed_out_and_ids_stay_in_the_pool() -> None:
    engine = Engine(num_parents=9, max_num_seqs=3)
    for salt in range(6):
        engine.submit(prompt_of(10, salt), 6, declared=False)
    seen = {block for plan in engine.rounds(80) for _, _, ids, _, _ in deltas(plan) for block in ids}
    assert not engine.requests
    assert seen == set(range(1, 10))


@pytest.mark.parametrize("seed", range(4))
@OVERLAPS
def test_tables_never_show_a_block_that_another_request_owns(seed: int, overlap: int) -> None:
    """Random load over few prompts, much sharing and a tight pool; Engine holds every plan to the rule."""
    chance = random.Random(seed)
    engine = Engine(num_parents=24, overlap=overlap, budget=10, max_num_seqs=5)
    for _ in range(40):
        length = chance.randrange(1, 30)
        engine.submit(prompt_of(length, chance.randrange(3)), chance.randrange(1, 20), declared=chance.random() < 0.3)
        for _ in range(chance.randrange(5)):
            engine.round()
            engine.check()
        if chance.random() < 0.2 and engine.requests:
            engine.abort(chance.choice(sorted(engine.requests)))
    engine.run()
    engine.assert_whole()


def test_256_requests_at_once_never_free_more_than_there_is() -> None:
    engine = Engine(num_parents=600, granularity=16, budget=256, max_num_seqs=256)
    for salt in range(256):
        engine.submit(prompt_of(1 + salt % 40, salt), 1 + salt % 24, declared=bool(salt % 2))
    while engine.requests:
        engine.round()
        held, cached, free = engine.group()
        assert held + cached + free == 600
        assert 0 <= free <= 600
    engine.assert_whole()


def test_200_tokens_at_granularity_one_and_chunk_four() -> None:
    for overlap in (0, 1):
        engine = Engine(granularity=1, num_parents=230, budget=4, overlap=overlap)
        engine.submit(prompt_of(9), 200)
        engine.run()
        engine.assert_whole()


# Memory.


def planned() -> tuple[Scheduler, list[object]]:
    """A scheduler and four plans of it, made by hand: Engine would keep references of its own."""
    scheduler = Scheduler(Settings(budget=32).config())
    for handle in range(1, 5):
        scheduler.submit(handle, np.asarray(prompt_of(8, handle), dtype=np.int32), max_new_tokens=9)
    return scheduler, [scheduler.plan()]


def test_arrays_outlive_plan_and_scheduler() -> None:
    scheduler, plans = planned()
    arrays = plan_arrays(plans[0])  # type: ignore[arg-type]
    copies = {name: array.copy() for name, array in arrays.items()}
    assert arrays["handle"].tolist() == [1, 2, 3, 4]
    assert arrays["tables[0].ids"].size >= 8
    del scheduler, plans
    gc.collect()
    ballast = [planned() for _ in range(20)]
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, copies[name], err_msg=name)
    assert len(ballast) == 20


def test_arrays_are_read_only_and_no_copies() -> None:
    _, (plan,) = planned()
    first, second = plan_arrays(plan), plan_arrays(plan)  # type: ignore[arg-type]
    for name, array in first.items():
        assert array.dtype == np.int32, name
        if array.size:
            assert np.shares_memory(array, second[name]), f"{name} is copied at every access"
            with pytest.raises(ValueError, match="read-only"):
                array.flat[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.flags.writeable = True


def test_plans_coexist() -> None:
    """Depth + 2 plans are alive at once and none writes into another."""
    engine = Engine(overlap=1, budget=8)
    for salt in range(3):
        engine.submit(prompt_of(10, salt), 8)
    kept = []
    for plan in engine.rounds(12):
        kept.append((plan, {name: array.copy() for name, array in plan_arrays(plan).items()}))
        for earlier, copies in kept:
            for name, array in plan_arrays(earlier).items():
                np.testing.assert_array_equal(array, copies[name], err_msg=name)


def test_an_empty_plan_has_empty_arrays() -> None:
    plan = Scheduler(Settings().config()).plan()
    assert (plan.forward_id, plan.num_rows, plan.aborts) == (0, 0, [])
    assert {name: array.shape[0] for name, array in plan_arrays(plan).items()} == dict.fromkeys(plan_arrays(plan), 0)
    assert all(array.dtype == np.int32 for array in plan_arrays(plan).values())
