"""Where everything of a decode lies: the arithmetic that the kernels and their twin in the tests share.

Only +, -, *, // and %, the latter two on numbers of 0 and more, so that Python's integers and the DSL's traced ones
both pass through. A test runs the whole algorithm in PyTorch on these functions.

Words: a *group* is the F consecutive query tokens of a request that are folded into the head axis, so it has F * H
rows; row r is head r % H of its token r // H. A *block* of a kernel takes TILE_ROWS rows of one group and one split of
the keys, and walks over them TILE_KEYS at a time.
"""

from typing import Any

LATENT = 512
"""Elements of the latent: the values, and the first part of a key."""

HALF_LATENT = LATENT // 2
"""Columns of one product of weights and values."""

ROTARY = 64
"""Elements of the rotated part of a key."""

WIDTH = LATENT + ROTARY
"""Elements of a cache entry and of a query."""

TILE_ROWS = 64
"""Rows of a block on Hopper: M of a wgmma."""

TILE_KEYS = 64
"""Keys of one step of a block's walk."""

PAIR_ROWS = 128
"""Rows of a pair of blocks on Blackwell: M of a product of both."""

PAIR_KEYS = 128
"""Keys of one step of a pair's walk."""

VALUE = 128
"""Elements of a head's value, and of the plain part of its key, once they are out of the latent."""

EXPANDED = VALUE + ROTARY
"""Elements of a head's key, and of a query of the prefill."""

PREFILL_QUERIES = 128
"""Queries of a block of the prefill."""

PREFILL_KEYS = 128
"""Keys of one step of its walk."""

DOUBLE_QUERIES = 256
"""Queries of a block of the prefill on Blackwell: two tiles."""

DOUBLE_KEYS = 64
"""Keys of one step of its walk."""

PAGE_SIZES = (16, 32, 64, 128)
"""Tokens of a page: those that cut a step into whole pages, or are cut into whole steps."""

Number = Any
"""A Python int, or the DSL's Int32 while a kernel is traced."""


def ceil_div(number: Number, divisor: Number) -> Number:
    """How many times ``divisor`` begins in ``number``."""
    return (number + divisor - 1) // divisor


def split_keys(seq_len: Number, page_size: int, split: Number, splits: Number) -> tuple[Number, Number]:
    """First position of a split, and how many it takes of a row that is long enough: the rule of
    attention.mla_decode_partial."""
    share = ceil_div(ceil_div(seq_len, page_size), splits) * page_size
    return split * share, share


def visible_keys(seq_len: Number, q_len: Number, token: Number) -> Number:
    """How many keys the query ``token`` of the last ``q_len`` sees; 0 or less where it lies before the first."""
    return seq_len - q_len + token + 1


def page_of(position: Number, page_size: int, box_keys: int) -> tuple[Number, Number]:
    """The entry of a row's page table that holds ``position``, and which box of ``box_keys`` within its page."""
    return position // page_size, (position % page_size) // box_keys
