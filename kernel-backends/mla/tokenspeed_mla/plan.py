"""How a decode is cut into blocks, and what it needs beside its operands."""

from dataclasses import dataclass

from tokenspeed_kernel.ops.mla_tiling import fold_sq_factor, partial_workspace_bytes, split_count, tile_rows_padded
from tokenspeed_mla.addressing import LATENT, PAIR_ROWS, TILE_ROWS

MOST_BLOCKS = 65535
"""Of a launch, along y and z."""


def tile_rows_of(pairs: bool, heads: int, q_len: int) -> int:
    """Rows of a tile: a pair's where there are ``pairs`` and the last tile of a group fills more than one block of
    one."""
    rows = fold_sq_factor(heads, q_len, PAIR_ROWS) * heads
    return PAIR_ROWS if pairs and (rows - 1) % PAIR_ROWS >= TILE_ROWS else TILE_ROWS


@dataclass(frozen=True)
class DecodePlan:
    """A decode of ``batch`` requests with ``q_len`` queries of ``heads`` heads each, its keys in ``splits`` parts, by
    tiles of ``tile_rows``: a block's, or a pair's of blocks (tile_rows_of).

    Raises ValueError where a number is below 1 (batch: below 0), or where a launch would have too many blocks.
    """

    batch: int
    q_len: int
    heads: int
    splits: int
    tile_rows: int = TILE_ROWS

    def __post_init__(self) -> None:
        if min(self.batch + 1, self.q_len, self.heads, self.splits) < 1:
            raise ValueError(f"{self}: q_len, heads and splits must be at least 1, batch at least 0")
        if self.tile_rows not in (TILE_ROWS, PAIR_ROWS):
            raise ValueError(f"{self}: tiles have {TILE_ROWS} or {PAIR_ROWS} rows")
        if max(self.grid[1:]) > MOST_BLOCKS:
            raise ValueError(f"{self}: {self.grid} blocks; a launch has at most {MOST_BLOCKS} along its last two axes")

    @staticmethod
    def choose(
        batch: int, q_len: int, heads: int, pages: int, processors: int, tile_rows: int = TILE_ROWS
    ) -> "DecodePlan":
        """The plan with the split count that keeps ``processors`` multiprocessors busy, the longest request having
        ``pages`` pages. A tile takes as many of them as it has blocks."""
        at_once = processors * TILE_ROWS // tile_rows
        splits = split_count(batch, heads, q_len, pages, at_once, tile_rows)
        return DecodePlan(batch, q_len, heads, splits, tile_rows)

    @property
    def fold(self) -> int:
        """Query tokens of a group."""
        return fold_sq_factor(self.heads, self.q_len, self.tile_rows)

    @property
    def groups(self) -> int:
        """Of a request."""
        return self.q_len // self.fold

    @property
    def rows(self) -> int:
        """Of a group: its tokens' heads."""
        return self.fold * self.heads

    @property
    def padded_rows(self) -> int:
        """Of a group, in whole tiles."""
        return tile_rows_padded(self.heads, self.q_len, self.tile_rows) // self.groups

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks: those of a group's tiles, groups of all requests, splits."""
        return self.padded_rows // TILE_ROWS, self.batch * self.groups, self.splits

    @property
    def workspace_bytes(self) -> int:
        """Of the partial outputs and their lse; 0 where there is one split, for then the output is written at once."""
        return partial_workspace_bytes(self.batch, self.heads, self.q_len, self.splits, LATENT, self.tile_rows)
