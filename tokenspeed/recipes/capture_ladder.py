"""Which forwards a device captures as graphs: the ladder of decode sizes, and the token counts of captured prefills.

Capacity is not performance: ``max_decode_batch`` sizes buffers, the ladder up to ``max_capture_batch`` is a part of it
that is faster. A decode of a number of rows is padded to the next size of the ladder; above the last it runs without a
graph. No torch here: the memory plan counts the sizes, the device captures them.
"""

from collections.abc import Sequence
from typing import Protocol

MOST_CAPTURED = 512
"""The last size of the computed ladder where nobody set max_capture_batch: a decode of so many rows is bound by its
products, and what a graph saves of it is little beside what capturing one more size costs at the start."""

_FEW = (1, 2, 4)
_STEP, _WIDE_STEP, _WIDE_FROM = 8, 16, 256


class CaptureKeys(Protocol):
    """What is read of a recipe's scheduler keys, and of the configuration they become."""

    @property
    def max_seqs(self) -> int: ...
    @property
    def max_capture_batch(self) -> int | None: ...
    @property
    def capture_sizes(self) -> Sequence[int]: ...
    @property
    def chunk(self) -> int: ...
    @property
    def graphs(self) -> str: ...
    @property
    def capture_prefill_tokens(self) -> Sequence[int]: ...


def max_decode_batch(max_seqs: int, data_parallel: int) -> int:
    """The rows that one rank decodes at most."""
    return max(1, max_seqs // data_parallel)


def capture_ladder(keys: CaptureKeys, data_parallel: int = 1) -> tuple[int, ...]:
    """The sizes to capture, ascending: the recipe's own, else 1, 2, 4, 8, 16, 24, … 256, 272, … and the bound itself.

    None is above max_capture_batch or max_decode_batch; empty where max_capture_batch is 0.
    """
    bound = max_decode_batch(keys.max_seqs, data_parallel)
    limit = MOST_CAPTURED if keys.max_capture_batch is None else keys.max_capture_batch
    bound = min(bound, limit)
    if keys.capture_sizes:
        return tuple(size for size in keys.capture_sizes if size <= bound)
    steps = (*_FEW, *range(_STEP, _WIDE_FROM, _STEP), *range(_WIDE_FROM, bound, _WIDE_STEP))
    return (*(size for size in steps if size < bound), bound) if bound else ()


def padded_size(ladder: Sequence[int], count: int) -> int | None:
    """The least size of the ascending ``ladder`` that has room for ``count``; None where none has."""
    return next((size for size in ladder if size >= count), None)


def check_capture_keys(
    *, max_capture_batch: int | None, capture_sizes: Sequence[int], capture_prefill_tokens: Sequence[int]
) -> None:
    """Raises ValueError for sizes that no ladder can have; the message names the key, the value and what would do."""
    for name, sizes in (("capture_sizes", capture_sizes), ("capture_prefill_tokens", capture_prefill_tokens)):
        if list(sizes) != sorted(set(sizes)) or (sizes and sizes[0] < 1):
            right = sorted({size for size in sizes if size > 0})
            raise ValueError(f"{name} {list(sizes)}: give sizes above 0 in ascending order, each once, such as {right}")
    if max_capture_batch is not None and capture_sizes and capture_sizes[-1] > max_capture_batch:
        raise ValueError(
            f"capture_sizes has {capture_sizes[-1]}, above max_capture_batch {max_capture_batch}: raise "
            "max_capture_batch or leave the size out"
        )
