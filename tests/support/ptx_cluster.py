"""Runs the blocks of a cluster of ptx_machine together; a block alone is a cluster of one."""

from collections.abc import Sequence

from ptx_arithmetic import MachineError
from ptx_machine import Block


def run(blocks: Sequence[Block]) -> None:
    """Until every warp has ended; MachineError where none gets on, or where something is left unfinished."""
    for block in blocks:
        block.cluster = list(blocks)
    running = [warp.run() for block in blocks for warp in block.warps]
    stuck = 0
    while running:
        moved = False
        for one in list(running):
            try:
                moved |= bool(next(one))
            except StopIteration:
                running.remove(one)
                moved = True
        stuck = 0 if moved or _do_something(blocks) else stuck + 1
        if stuck > 2:
            places = [warp.waits_at for block in blocks for warp in block.warps]
            raise MachineError(f"nothing gets on; the warps are at {places}")
    for block in blocks:
        _check_end(block)


def _do_something(blocks: Sequence[Block]) -> bool:
    """The last load that is under way, or else the first product."""
    for queue, last in (("loads", True), ("products", False)):
        for block in reversed(blocks):
            actions = block.under_way[queue]
            if actions:
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
