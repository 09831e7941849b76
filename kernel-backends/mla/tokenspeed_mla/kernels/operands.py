"""The operands as the kernels' host code sees them, tensors made of addresses, sizes and strides; their loads; a
prefill's tiles."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from tokenspeed_mla.addressing import LATENT, WIDTH, ceil_div, visible_keys

COLUMNS = 64
"""Of one TMA load: 128 bytes, the width of the swizzle."""

WORDS = 2 * COLUMNS // 8
"""Of 8 bytes, in a row of one load."""


def tiled_load(
    operation: cpasync.CopyBulkTensorTileG2SOp, tensor: cute.Tensor, swizzled: cute.ComposedLayout, rows: int
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """The load of ``rows`` by COLUMNS of a tensor into shared memory, and the tensor of the coordinates that it
    takes."""
    shape = (rows, COLUMNS)
    atom, coordinates = cpasync.make_tiled_tma_atom(
        operation, tensor, cute.tile_to_shape(swizzled, shape, order=(0, 1)), shape
    )
    return atom, coordinates


def words_of(stages: cute.Tensor, keys: int, width: int, count: int) -> cute.Tensor:
    """``count`` stages of ``keys`` by ``width`` as words of 8 bytes, [16, keys, loads, count]. A key's 128 bytes of one
    load are whole whatever the swizzle does to their order."""
    load, loads = WORDS * keys, width // COLUMNS
    return cute.make_tensor(
        cute.recast_ptr(stages.iterator, cute.make_swizzle(0, 4, 3), dtype=Int64),
        cute.make_layout((WORDS, keys, loads, count), stride=(1, WORDS, load, load * loads)),
    )


def group_queries(q: cute.Pointer, rows: Int32, groups: Int32) -> cute.Tensor:
    """Queries [rows, 576, groups] of all requests' groups.

    Folding is this view: a group's tokens and their heads lie one behind the other. TMA fills rows beyond the group's
    last with zeros.
    """
    group_stride = Int64(rows) * WIDTH
    return cute.make_tensor(
        q, cute.make_layout((rows, WIDTH, groups), stride=(WIDTH, 1, cute.assume(group_stride, WIDTH)))
    )


def cache_entries(
    cache: cute.Pointer, page_size: int, pages: Int32, block_stride: Int64, token_stride: Int64
) -> cute.Tensor:
    """Entries [page_size, 576, pages]. Each begins at a multiple of 16 bytes, as TMA wants it: checked by the
    caller."""
    aligned = 128 // cache.dtype.width
    strides = (cute.assume(token_stride, aligned), 1, cute.assume(block_stride, aligned))
    return cute.make_tensor(cache, cute.make_layout((page_size, WIDTH, pages), stride=strides))


def group_outputs(
    out: cute.Pointer, rows: Int32, groups: Int32, splits: Int32, group_stride: Int64, split_stride: Int64
) -> cute.Tensor:
    """Outputs [rows, 512, groups, splits]."""
    strides = (LATENT, 1, cute.assume(group_stride, LATENT), cute.assume(split_stride, LATENT))
    return cute.make_tensor(out, cute.make_layout((rows, LATENT, groups, splits), stride=strides))


def group_sums(
    lse: cute.Pointer, rows: Int32, groups: Int32, splits: Int32, group_stride: Int64, split_stride: Int64
) -> cute.Tensor:
    """Logarithms of the sums of the exponentials [rows, groups, splits]."""
    return cute.make_tensor(lse, cute.make_layout((rows, groups, splits), stride=(1, group_stride, split_stride)))


def head_rows(
    address: cute.Pointer, rows: Int32, width: int, heads: Int32, row_stride: Int64, head_stride: Int64
) -> cute.Tensor:
    """Queries, keys or values of every head, [rows, width, heads], both strides multiples of 16 bytes, as TMA wants
    them: checked by the caller."""
    strides = (cute.assume(row_stride, 8), 1, cute.assume(head_stride, 8))
    return cute.make_tensor(address, cute.make_layout((rows, width, heads), stride=strides))


@cute.jit
def find_tile(starts: cute.Tensor, rows: Int32, flat_tile: Int32, queries: int) -> tuple[Int32, Int32]:
    """The row of the batch that has tile ``flat_tile`` of all rows' tiles of ``queries``, and which of its own that is;
    ``rows`` where there are fewer tiles."""
    row, tile = Int32(0), flat_tile
    found = Int32(0)
    for index in cutlass.range(rows, unroll=1):
        tiles = ceil_div(starts[index + 1] - starts[index], queries)
        if found == 0:
            if tile < tiles:
                found = Int32(1)
            else:
                tile -= tiles
                row += 1
    return row, tile


@cute.jit
def prefill_extent(
    starts: cute.Tensor,
    key_starts: cute.Tensor,
    rows: Int32,
    flat_tile: Int32,
    queries: int,
    keys: int,
    causal: bool,
) -> tuple[Int32, Int32, Int32, Int32, Int32, Int32]:
    """What a block of a prefill is to do: the tile of its row, the row's first query and their number, its first key
    and their number, and how many steps of ``keys`` the tile sees; nothing where there is no such tile."""
    row, tile = find_tile(starts, rows, flat_tile, queries)
    first, first_key = Int32(0), Int32(0)
    q_len, key_len, steps = Int32(0), Int32(0), Int32(0)
    if row < rows:
        first, first_key = starts[row], key_starts[row]
        q_len, key_len = starts[row + 1] - first, key_starts[row + 1] - first_key
        stop = key_len
        if cutlass.const_expr(causal):
            stop = cutlass.min(key_len, visible_keys(key_len, q_len, (tile + 1) * queries - 1))
        steps = ceil_div(cutlass.max(stop, 0), keys)
    return tile, first, q_len, first_key, key_len, steps
