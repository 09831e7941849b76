"""Where one forward begins and ends, for kernels that plan a forward once for all its layers.

A wrapped library may want a plan on the host (how the rows of a batch are cut, which pages they read) before it can
run. The layers of a cache group call such a kernel with the same page table and lengths, so one plan serves them all,
but only as long as nobody writes to these tensors. That cannot be seen from the tensors themselves: a kernel or a
replayed graph may have written them. So whoever runs forwards says where each begins and ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count

_numbers = count(1)
_present: ContextVar[int | None] = ContextVar("tokenspeed_kernel_forward", default=None)


@contextmanager
def one_forward() -> Iterator[None]:
    """Within the block, in this thread, page tables and lengths stay as they are once a kernel has seen them."""
    token = _present.set(next(_numbers))
    try:
        yield
    finally:
        _present.reset(token)


def present_forward() -> int | None:
    """The number of the present forward, which a plan may be kept under; None outside of one: keep none."""
    return _present.get()
