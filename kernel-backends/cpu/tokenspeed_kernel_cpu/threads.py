"""How many threads the kernels use.

They have a pool of their own (src/pool.hpp says why). Its size is torch's number of threads, taken whenever a linear or
an embedding is bound, so that ``torch.set_num_threads`` and OMP_NUM_THREADS mean here what they mean there.
"""

import torch

from tokenspeed_kernel_cpu import _native


def set_num_threads(count: int) -> None:
    """Limits every kernel of this process to ``count`` threads, its caller's included.

    The next binding of a linear or an embedding takes torch's number again. Raises ValueError below 1.
    """
    if count < 1:
        raise ValueError(f"thread count {count}: a kernel needs at least 1")
    _native.set_thread_limit(count)


def num_threads() -> int:
    """The most threads a kernel uses."""
    return _native.thread_limit()


def follow_torch() -> None:
    """Takes torch's number of threads."""
    _native.set_thread_limit(torch.get_num_threads())
