"""Copies between the device arena and the host pool move whole blocks, byte for byte, and fail block by block."""

import numpy as np
import pytest
import torch
from plan_maker import ints

from tokenspeed.device.cache_arena import ArenaLayout, CacheArena
from tokenspeed.device.host_arena import HostArena
from tokenspeed.device.placement import HOST
from tokenspeed.layers.cache_spec import CacheFieldSpec, CacheGroupSpec

FIELDS = (CacheFieldSpec(name="k", heads=2, dim=4), CacheFieldSpec(name="v", heads=2, dim=4))
LAYOUT = ArenaLayout.of(
    [
        CacheGroupSpec(
            group_id="full", kind="full_history", layers=(0, 1), fields=FIELDS, rows_per_page=8, entry_stride_tokens=1
        ),
        CacheGroupSpec(
            group_id="state",
            kind="state",
            layers=(2,),
            fields=(CacheFieldSpec(name="ssm", heads=1, dim=128),),
            checkpoint_granularity=64,
        ),
    ],
    torch.float32,
)
FULL, STATE = 0, 1
"""1 and 2 blocks a parent."""


def made(parents: int = 4, host: int = 3) -> tuple[CacheArena, HostArena]:
    """A device arena of which every byte differs from its neighbours, and an empty host pool."""
    assert [facts.children_per_parent for facts in LAYOUT.facts] == [1, 2]
    arena = CacheArena(HOST, LAYOUT, parents)
    for group in (FULL, STATE):
        view = arena.blocks(group)
        view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))
    return arena, HostArena(HOST, LAYOUT, host)


def test_blocks_go_to_the_host_and_come_back_elsewhere() -> None:
    arena, host = made()
    before = {(group, block): arena.blocks(group)[block].clone() for group, block in ((FULL, 1), (FULL, 2), (STATE, 7))}
    group, source, target = ints([FULL, FULL, STATE]), ints([1, 2, 7]), ints([2, 3, 3])
    assert host.save(arena, group, source, target) is None
    arena.zero(FULL, ints([1, 2, 3, 4]))
    assert host.load(arena, group, target, ints([4, 3, 5])) is None
    assert torch.equal(arena.blocks(FULL)[4], before[FULL, 1])
    assert torch.equal(arena.blocks(FULL)[3], before[FULL, 2])
    assert torch.equal(arena.blocks(STATE)[5], before[STATE, 7])
    assert not arena.blocks(FULL)[1].any()


def test_ids_of_a_group_are_parent_times_children_plus_child() -> None:
    arena, host = made()
    host.save(arena, ints([STATE]), ints([2 * 3 + 1]), ints([2 * 2 + 1]))
    half = LAYOUT.block_bytes[STATE]
    assert torch.equal(host._bytes.view(4, 2, half)[2, 1], arena._bytes.view(5, 2, half)[3, 1])
    assert not host._bytes.view(4, 2, half)[2, 0].any()


def test_long_runs_and_scattered_blocks_are_the_same_to_it() -> None:
    arena, host = made(parents=40, host=40)
    chance = np.random.default_rng(3)
    for source in (np.arange(2, 80), chance.permutation(np.arange(2, 80))):
        target = np.sort(chance.permutation(np.arange(2, 80)))
        group = np.full(78, STATE, np.int32)
        assert host.save(arena, group, source.astype(np.int32), target.astype(np.int32)) is None
        assert torch.equal(host.blocks(STATE)[target], arena.blocks(STATE)[source])


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0), (9, 1), (1, 9), (-1, 1)])
def test_a_copy_that_fails_fails_for_its_blocks_only(source: int, target: int) -> None:
    arena, host = made()
    done = host.save(arena, ints([FULL, FULL, FULL]), ints([1, source, 3]), ints([1, target, 3]))
    assert done is not None
    assert done.tolist() == [1, 0, 1]
    assert torch.equal(host.blocks(FULL)[3], arena.blocks(FULL)[3])
    assert not host.blocks(FULL)[0].any() and not host.blocks(FULL)[2].any()


def test_an_unknown_group_fails_and_raises_nothing() -> None:
    arena, host = made()
    done = host.load(arena, ints([7]), ints([1]), ints([1]))
    assert done is not None
    assert done.tolist() == [0]


def test_a_buffer_is_the_block_itself() -> None:
    arena, host = made()
    host.save(arena, ints([FULL]), ints([1]), ints([2]))
    buffer = host.buffer(FULL, 2)
    assert bytes(buffer) == arena.blocks(FULL)[1].numpy().tobytes()
    buffer[:] = bytes(len(buffer))
    assert not host.blocks(FULL)[2].any()
    for block in (0, 4):
        with pytest.raises(IndexError, match=f"host block {block} of group 0: there are 1 to 3"):
            host.buffer(FULL, block)


def test_a_pool_without_a_usable_parent_is_refused() -> None:
    with pytest.raises(ValueError, match="0 parents"):
        HostArena(HOST, LAYOUT, 0)
