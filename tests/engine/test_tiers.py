"""The real scheduler and the loop over a token device with tiers: images, write-back and load-back, storage."""

import random
from collections.abc import Sequence

import pytest
from control_plane import ControlPlane, submit
from token_cache import LOADS, MemoryStorage, group
from token_device import expected_tokens

from tokenspeed.recipes.capacity import GroupFacts
from tokenspeed_scheduler import OperationKind

ONE = (group(),)
WITH_WINDOW = (group("full", granularity=4), group("window", "sliding_window", 4, children=2, window=7))
WITH_STATE = (*WITH_WINDOW, group("state", "state", 0, checkpoint=8))
GROUPS = {"one": ONE, "window": WITH_WINDOW, "state": WITH_STATE}
"""Parents of one or two blocks; prefix pages of 4 tokens."""

every_world = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * position + 13 * salt) % 997 for position in range(length)]


def assert_right(plane: ControlPlane, handle: int, prompt: Sequence[int], count: int) -> None:
    assert plane.channel.ends(handle) == ["length"], plane.channel.last(handle)
    assert plane.channel.tokens(handle) == expected_tokens(prompt, count, plane.device.groups)


def run(plane: ControlPlane, handle: int, prompt: Sequence[int], count: int = 6) -> int:
    """Runs one request to its end, checks its tokens and returns how many prompt tokens came from a cache."""
    plane.channel.send_in(submits=[submit(handle, prompt, count)])
    plane.until_quiet()
    assert_right(plane, handle, prompt, count)
    return next(output.cached_tokens for output in plane.channel.outputs if output.handle == handle)


@every_world
@pytest.mark.parametrize("overlap", [0, 1])
def test_images_bring_retracted_requests_back_and_nothing_is_computed_again(
    groups: tuple[GroupFacts, ...], overlap: int
) -> None:
    blocks = 14 * len(groups)
    plane = ControlPlane(overlap=overlap, num_blocks=blocks, max_num_seqs=6, groups=groups, host_parents=200)
    prompts = {handle: prompt_of(9, handle) for handle in range(1, 7)}
    plane.channel.send_in(submits=[submit(h, p, 40, declared=False) for h, p in prompts.items()])
    plane.until_quiet()
    for handle, prompt in prompts.items():
        assert_right(plane, handle, prompt, 40)
    counts = plane.scheduler.snapshot()
    assert min(counts.retractions, counts.restores, counts.image_blocks) > 0
    assert counts.recomputed_tokens == 0
    moved = plane.device.cache.blocks
    assert moved[OperationKind.IMAGE_SAVE] > 0
    # A published block of an image need not be saved: it may lie in the host pool already.
    assert moved[OperationKind.RESTORE] >= moved[OperationKind.IMAGE_SAVE]
    # With a step planned ahead a request may have computed one token more than it had use for.
    exact = sum(len(prompt) + 40 - 1 for prompt in prompts.values())
    assert plane.device.input_tokens - exact in range(1 + overlap * len(prompts))
    plane.assert_pool_is_whole()


@every_world
def test_what_was_evicted_comes_back_from_the_host(groups: tuple[GroupFacts, ...]) -> None:
    plane = ControlPlane(num_blocks=14 * len(groups), groups=groups, host_parents=400, max_model_len=100)
    chat = prompt_of(33)
    assert run(plane, 1, chat) == 0
    for other in range(2, 12):
        run(plane, other, prompt_of(40, other))
    before = plane.scheduler.snapshot().host_hit_tokens
    assert run(plane, 20, [*chat, 5, 6, 7]) == 32
    assert plane.scheduler.snapshot().host_hit_tokens - before == 32
    assert plane.device.cache.blocks[OperationKind.LOAD_BACK] > 0
    plane.assert_pool_is_whole()


@every_world
def test_a_restart_finds_prefixes_in_the_storage(groups: tuple[GroupFacts, ...]) -> None:
    storage = MemoryStorage()
    settings = {"num_blocks": 40 * len(groups), "groups": groups, "host_parents": 100, "storage": storage}
    chat = prompt_of(33)
    first = ControlPlane(**settings)
    run(first, 1, chat)
    assert storage.blocks
    second = ControlPlane(**settings)
    assert run(second, 1, [*chat, 5, 6, 7]) == 32
    assert second.scheduler.snapshot().storage_hit_tokens == 32
    second.assert_pool_is_whole()


def test_a_storage_that_does_not_answer_is_not_waited_for() -> None:
    now = 100.0
    plane = ControlPlane(host_parents=100, storage=MemoryStorage(), clock=lambda: now)
    plane.device.storage_answers = False
    plane.channel.send_in(submits=[submit(1, prompt_of(33), 6)])
    for _ in range(10):
        plane.loop.round()
    assert plane.channel.outputs == []
    now += 60.0
    for _ in range(30):
        plane.loop.round()
    assert_right(plane, 1, prompt_of(33), 6)
    assert plane.scheduler.snapshot().storage_timeouts == 1
    plane.device.storage_answers = True  # and what comes too late does no harm
    plane.until_quiet()
    plane.assert_pool_is_whole()


@pytest.mark.parametrize("kind", [OperationKind.WRITE_BACK, OperationKind.IMAGE_SAVE, OperationKind.RESTORE])
def test_a_copy_that_fails_costs_time_or_its_request_and_nobody_else(kind: OperationKind) -> None:
    plane = ControlPlane(num_blocks=14, max_num_seqs=6, host_parents=200)
    plane.device.cache.fail_copy = lambda operation: operation.kind == kind and operation.op_id % 2 == 0
    prompts = {handle: prompt_of(9, handle) for handle in range(1, 7)}
    plane.channel.send_in(submits=[submit(h, p, 40, declared=False) for h, p in prompts.items()])
    plane.until_quiet()
    for handle, prompt in prompts.items():
        tokens = plane.channel.tokens(handle)
        assert tokens == expected_tokens(prompt, len(tokens))
        assert plane.channel.ends(handle) in (["length"], ["abort"])
        if kind == OperationKind.WRITE_BACK:
            assert len(tokens) == 40
    assert plane.channel.snapshots[-1].counters.failed_copies > 0
    plane.assert_pool_is_whole()


def test_a_load_that_fails_ends_its_request_with_an_error() -> None:
    plane = ControlPlane(num_blocks=14, host_parents=400, max_model_len=100)
    chat = prompt_of(33)
    run(plane, 1, chat)
    for other in range(2, 12):
        run(plane, other, prompt_of(40, other))
    plane.device.cache.fail_copy = lambda operation: operation.kind in LOADS
    plane.channel.send_in(submits=[submit(20, [*chat, 5], 6), submit(21, prompt_of(6, 60), 6)])
    plane.until_quiet()
    assert plane.channel.last(20).error_code == "cache_load_failed"
    assert plane.channel.tokens(20) == []
    assert_right(plane, 21, prompt_of(6, 60), 6)
    plane.device.cache.fail_copy = lambda operation: False
    run(plane, 30, [*chat, 5])
    plane.assert_pool_is_whole()


@every_world
@pytest.mark.parametrize("overlap", [0, 1])
def test_random_lives_under_pressure_with_all_tiers(groups: tuple[GroupFacts, ...], overlap: int) -> None:
    """Shared beginnings, aborts, a small host pool, copies that fail and a storage that is slow at times."""
    chance = random.Random(overlap + 10 * len(groups))
    plane = ControlPlane(
        overlap=overlap,
        num_blocks=20 * len(groups),
        chunk=12,
        groups=groups,
        host_parents=30,
        storage=MemoryStorage(),
        max_model_len=80,
    )
    plane.device.cache.fail_copy = lambda operation: operation.op_id % 17 == 0
    prompts = {handle: prompt_of(chance.randrange(1, 40), chance.randrange(4)) for handle in range(1, 81)}
    gone = set()
    for handle, prompt in prompts.items():
        plane.channel.send_in(submits=[submit(handle, prompt, chance.randrange(1, 30), declared=bool(handle % 2))])
        plane.device.storage_answers = chance.random() < 0.7
        for _ in range(chance.randrange(5)):
            plane.loop.round()
            plane.scheduler.check_invariants()
        if chance.random() < 0.3:
            victim = chance.randrange(1, handle + 1)
            gone.add(victim)
            plane.channel.send_in(aborts=[victim])
    plane.device.storage_answers = True
    plane.until_quiet()
    for handle, prompt in prompts.items():
        tokens = plane.channel.tokens(handle)
        assert tokens == expected_tokens(prompt, len(tokens), groups)
        if handle not in gone and plane.channel.ends(handle) != ["length"]:
            assert plane.channel.last(handle).error_code in ("cache_load_failed", "failed")
    assert sum(plane.channel.ends(handle) == ["length"] for handle in prompts) > 40
    plane.assert_pool_is_whole()
