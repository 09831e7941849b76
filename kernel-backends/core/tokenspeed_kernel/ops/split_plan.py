"""Into how many splits attention over a paged cache is cut, so that every processor of a device has work.

The blocks of a kernel are (query tile, split) pairs, splits outermost. Each takes its split's pages: as many as the
first, but for the last, which may have fewer, and those behind it, which have none. A device gives the next block to
the first processor that is free; how long all of them take, in pages, is simulated here.
"""

import heapq
from functools import lru_cache

MAX_SPLITS = 512
"""Of one row: as many lse as a block of the merging kernel reads at once."""

MAX_WAVES = 20
"""Blocks for each processor at most. With as many, some split count keeps nine tenths of the processors busy whatever
the number of tiles (a test tries them), and they bound the workspace."""

BUSY_SHARE = 0.9
"""The share of the processors' time that the chosen split count fills, where any does."""


def split_shares(pages: int, splits: int) -> tuple[int, int, int]:
    """Pages of a full split, how many are full, and the pages of the one behind them (0: there is none): the rule of
    attention.mla_decode_partial. Raises ValueError for less than one split or for less than no pages."""
    if splits < 1 or pages < 0:
        raise ValueError(f"{pages} pages cannot be cut into {splits} splits; give at least 1 split and 0 pages")
    share = -(-pages // splits)
    return (share, pages // share, pages % share) if share else (0, 0, 0)


def makespan(tiles: int, pages: int, splits: int, processors: int) -> int:
    """Until the last block ends, in pages, for ``tiles`` tiles of rows that all have ``pages`` pages."""
    share, full, rest = split_shares(pages, splits)
    rounds, late = divmod(tiles * full, processors)
    if not rest or not tiles:
        return (rounds + (late > 0)) * share
    # All full blocks are of one length, so ``late`` processors are free a share after the others. The shorter blocks
    # of the last split follow.
    free = [(rounds + (index < late)) * share for index in range(processors)]
    heapq.heapify(free)
    for _ in range(tiles):
        heapq.heapreplace(free, free[0] + rest)
    return max(free)


def busy_share(tiles: int, pages: int, splits: int, processors: int) -> float:
    """The share of the processors' time that is work; 1.0 where there is none."""
    ends = makespan(tiles, pages, splits, processors)
    return tiles * pages / (processors * ends) if ends else 1.0


@lru_cache(maxsize=4096)
def best_split_count(tiles: int, pages: int, processors: int) -> int:
    """The fewest splits that keep BUSY_SHARE of the processors busy; where none does, the fewest of the busiest.

    tiles: query tiles of the call. pages: of its longest row, which all are taken to have. At least 1 and at most the
    pages, MAX_SPLITS, and MAX_WAVES * processors blocks.
    """
    most = max(1, min(pages, MAX_SPLITS, MAX_WAVES * processors // max(1, tiles)))
    best, best_share = 1, 0.0
    for splits in range(1, most + 1):
        share = busy_share(tiles, pages, splits, processors)
        if share > best_share:
            best, best_share = splits, share
        if share >= BUSY_SHARE:
            break
    return best
