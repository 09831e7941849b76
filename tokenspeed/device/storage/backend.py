"""What a storage tier must be able to do. A directory is the first; others come behind the same methods."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenspeed.device.handle import StorageUsage


class BlockKey(NamedTuple):
    """The identity of a block's content, within one fingerprint.

    Attributes:
        digest: 32 bytes, the prefix page that the block belongs to, its namespace and all tokens before it included.
        group_id: the cache group.
        offset: the block's place in its page.
    """

    digest: bytes
    group_id: str
    offset: int


class StorageBackend(Protocol):
    """Blocks by key. Called from several threads at once. ``uint8 [n]`` answers hold 1 where it worked.

    A block that cannot be read whole and right is not there; one that cannot be written is not stored. Neither raises;
    what raises is a store that is gone altogether, and then the whole call counts as failed.
    """

    def query(self, keys: Sequence[BlockKey]) -> NDArray[np.uint8]:
        """Which of the keys are there."""
        ...

    def get(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> NDArray[np.uint8]:
        """Reads each block into its buffer, whose content is undefined where that failed."""
        ...

    def put(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> NDArray[np.uint8]:
        """Stores each buffer under its key; 1 where the block is in the store afterwards."""
        ...

    def usage(self) -> StorageUsage:
        """What is in the store, as last counted; never waits."""
        ...
