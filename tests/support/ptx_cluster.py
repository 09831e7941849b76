"""Runs the blocks of a cluster of ptx_machine together; a block alone is a cluster of one."""

from collections.abc import Iterator, Sequence

import numpy as np
from ptx_arithmetic import MachineError
from ptx_machine import Block

PRIORITY = 7
"""Draws the order of warps."""


def run(blocks: Sequence[Block]) -> None:
    """Until every warp has ended; MachineError where none gets on, or where something is left unfinished.

    Of a block's ``late``, "loads" and "products" say that those wait until no warp gets on, the loads the last first
    or, with "in order", the first. Warps take turns, or, with "by priority", the one that comes first in an order drawn
    by lot goes on as long as it can, whenever it can.
    """
    for block in blocks:
        block.cluster = list(blocks)
    running = [warp.run() for block in blocks for warp in block.warps]
    urgent = "by priority" in blocks[0].late
    if urgent:
        running = [running[place] for place in np.random.default_rng(PRIORITY).permutation(len(running))]
    stuck = 0
    while running:
        stuck = 0 if _take_turns(blocks, running, urgent) or _do_something(blocks) else stuck + 1
        if stuck > 2:
            places = [warp.waits_at for block in blocks for warp in block.warps]
            raise MachineError(f"nothing gets on; the warps are at {places}")
    for block in blocks:
        _check_end(block)


def _take_turns(blocks: Sequence[Block], running: list[Iterator[None]], urgent: bool) -> bool:
    """Whether a warp got on: each has a turn, or only the first ones up to one that does."""
    found = False
    for one in list(running):
        before = [block.moves for block in blocks]
        try:
            next(one)
            moved = before != [block.moves for block in blocks]
        except StopIteration:
            running.remove(one)
            moved = True
        found |= moved
        if moved and urgent:
            break
    return found


def _do_something(blocks: Sequence[Block]) -> bool:
    """The last load that is under way, or where they are in order the first; or else the first product."""
    for queue in ("loads", "products"):
        for block in reversed(blocks):
            actions = block.under_way[queue]
            if actions:
                last = queue == "loads" and "in order" not in block.late
                (actions.pop() if last else actions.popleft())()
                return True
    return False


def _check_end(block: Block) -> None:
    if any(block.under_way.values()):
        raise MachineError("the block has ended, and loads or products are under way")
    if block.tensor.columns:
        raise MachineError(f"{block.tensor.columns} columns of tensor memory are not given back")
    for address, barrier in block.barriers.items():
        if barrier.pending != barrier.count or barrier.bytes:
            raise MachineError(f"the mbarrier at {address} is left in mid-phase: {barrier}")
