"""How a decode is cut into blocks, and what it needs beside its operands."""

from dataclasses import dataclass

from tokenspeed_kernel.ops.mla_tiling import fold_sq_factor, partial_workspace_bytes, split_count, tile_rows_padded
from tokenspeed_mla.addressing import LATENT, TILE_ROWS, ceil_div

MOST_BLOCKS = 65535
"""Of a launch, along y and z."""


@dataclass(frozen=True)
class DecodePlan:
    """A decode of ``batch`` requests with ``q_len`` queries of ``heads`` heads each, its keys in ``splits`` parts.

    Raises ValueError where a number is below 1 (batch: below 0), or where a launch would have too many blocks.
    """

    batch: int
    q_len: int
    heads: int
    splits: int

    def __post_init__(self) -> None:
        if min(self.batch + 1, self.q_len, self.heads, self.splits) < 1:
            raise ValueError(f"{self}: q_len, heads and splits must be at least 1, batch at least 0")
        if max(self.grid[1:]) > MOST_BLOCKS:
            raise ValueError(f"{self}: {self.grid} blocks; a launch has at most {MOST_BLOCKS} along its last two axes")

    @staticmethod
    def choose(batch: int, q_len: int, heads: int, pages: int, processors: int) -> "DecodePlan":
        """The plan with the split count that keeps ``processors`` multiprocessors busy, the longest request having
        ``pages`` pages."""
        return DecodePlan(batch, q_len, heads, split_count(batch, heads, q_len, pages, processors, TILE_ROWS))

    @property
    def fold(self) -> int:
        """Query tokens of a group."""
        return fold_sq_factor(self.heads, self.q_len, TILE_ROWS)

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
        return tile_rows_padded(self.heads, self.q_len, TILE_ROWS) // self.groups

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks: tiles of a group, groups of all requests, splits."""
        return ceil_div(self.rows, TILE_ROWS), self.batch * self.groups, self.splits

    @property
    def workspace_bytes(self) -> int:
        """Of the partial outputs and their lse; 0 where there is one split, for then the output is written at once."""
        return partial_workspace_bytes(self.batch, self.heads, self.q_len, self.splits, LATENT, TILE_ROWS)
