"""Cache entries of 8 bits on their way into the stages, where a block's products take them as 16 bits.

TMA copies what it finds, and beside queries and two stages of 16 bits there is no room for bytes. So a warpgroup holds
them in its registers: four threads have a key, each every fourth 16 bytes of it, so that a warp reads 64 bytes of eight
keys at once. One half of a step's keys comes while the other is converted, and both halves' conversion goes on while
the products are at the step before. Every element of e4m3 is one of bfloat16 and of float16.

There are two orders. Either all of the next half is asked for before a free stage is waited for, into registers of its
own, so that the wait hides its way from memory. Or, ``in_place``, each piece is asked for once the one whose registers
it takes was converted: that needs half as many registers, and hides less.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from tokenspeed_mla.addressing import TILE_KEYS, WIDTH
from tokenspeed_mla.kernels.operands import COLUMNS

CONVERTING_WARPS = 4
CONVERTING_THREADS = 32 * CONVERTING_WARPS
CONVERTING_REGISTERS = 104
"""Of a thread: for its bytes of two halves of a step, and what it converts at once."""

KEY_THREADS = 4
PART_KEYS = CONVERTING_THREADS // KEY_THREADS
PARTS = TILE_KEYS // PART_KEYS
"""Of a step: the keys that are loaded and converted at once."""

ARRIVALS = PARTS * CONVERTING_WARPS
"""At the barrier of a full stage."""

PIECE = 16
"""Elements, and bytes, that a thread loads at once."""

PIECES = WIDTH // (PIECE * KEY_THREADS)
"""Of a key, that a thread has: one of each COLUMNS."""

CHUNK = 8
CHUNKS = COLUMNS // CHUNK
"""Of 16 bytes, what the swizzle leaves together."""


@cute.jit
def convert_keys(
    entries: cute.Tensor,
    table: cute.Tensor,
    s_kv: cute.Tensor,
    full: cute.Pointer,
    free: cute.Pointer,
    first: Int32,
    stop: Int32,
    steps: Int32,
    page_size: int,
    thread: Int32,
    in_place: bool,
) -> None:
    """All steps' keys by CONVERTING_THREADS threads, of which this is number ``thread``, each step into a stage that is
    ``free``; every warp arrives at its barrier ``full`` with every part. Keys from ``stop`` on are zeros."""
    stages, chunks = cute.size(s_kv, mode=[2]), chunks_of(s_kv)
    key, quarter = thread // KEY_THREADS, thread % KEY_THREADS
    found, next_found = (cute.make_rmem_tensor((PIECE // 4, PIECES), Int32) for _ in range(2))
    found.fill(0)
    next_found.fill(0)
    page = find_page(table, first + key, stop, page_size)
    fetch(entries, page, found, first + key, stop, quarter, page_size)
    page = find_page(table, first + PART_KEYS + key, stop, page_size)
    for part in cutlass.range(steps * PARTS, unroll=1):
        stage, phase = part // PARTS % stages, (part // (PARTS * stages) + 1) % 2
        position = first + part * PART_KEYS + key
        if cutlass.const_expr(not in_place):
            fetch(entries, page, next_found, position + PART_KEYS, stop, quarter, page_size)
        next_page = find_page(table, position + 2 * PART_KEYS, stop, page_size)
        cute.arch.mbarrier_wait(free + stage, phase)
        place = chunks[None, None, part % PARTS * PART_KEYS + key, None, stage]
        if cutlass.const_expr(in_place):
            exchange(entries, page, found, position + PART_KEYS, stop, place, quarter, key, page_size)
        else:
            store(found, place, quarter, key, position < stop)
        # What was written is read by products, which go another way to shared memory.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full + stage)
        page = next_page
        if cutlass.const_expr(not in_place):
            found.store(next_found.load())


@cute.jit
def find_page(table: cute.Tensor, position: Int32, stop: Int32, page_size: int) -> Int32:
    """The page of a position; from ``stop`` on the null page. Looked up a part ahead, so that no load waits for it."""
    page = Int32(0)
    if position < stop:
        page = table[position // page_size]
    return page


@cute.jit
def fetch(
    entries: cute.Tensor,
    page: Int32,
    found: cute.Tensor,
    position: Int32,
    stop: Int32,
    quarter: Int32,
    page_size: int,
) -> None:
    """This thread's pieces of the entry at ``position``; none from ``stop`` on."""
    if position < stop:
        cute.autovec_copy(pieces_of(entries, page, position, quarter, page_size), found)


def pieces_of(entries: cute.Tensor, page: Int32, position: Int32, quarter: Int32, page_size: int) -> cute.Tensor:
    """This thread's pieces of the entry at ``position``, as they lie in memory: [words, pieces]."""
    entry = entries[position % page_size, None, page]
    words = cute.make_tensor(
        cute.recast_ptr(entry.iterator, dtype=Int32),
        cute.make_layout((PIECE // 4, KEY_THREADS, PIECES), stride=(1, PIECE // 4, PIECE // 4 * KEY_THREADS)),
    )
    return words[None, quarter, None]


@cute.jit
def exchange(
    entries: cute.Tensor,
    page: Int32,
    found: cute.Tensor,
    position: Int32,
    stop: Int32,
    entry: cute.Tensor,
    quarter: Int32,
    key: Int32,
    page_size: int,
) -> None:
    """The pieces into their places of an entry (store), and each piece of the entry at ``position`` in place of its
    own; from ``stop`` on zeros, which are zeros once they are converted."""
    pieces = pieces_of(entries, page, position, quarter, page_size)
    places = places_of(entry, quarter, key)
    converted = cute.make_rmem_tensor((CHUNK, 2), entry.element_type)
    for piece in cutlass.range_constexpr(PIECES):
        convert(found, piece, converted, places)
        if position < stop:
            cute.autovec_copy(pieces[None, piece], found[None, piece])
        else:
            found[None, piece].fill(0)


@cute.jit
def store(found: cute.Tensor, entry: cute.Tensor, quarter: Int32, key: Int32, there: Boolean) -> None:
    """The pieces into their places of an entry [8, chunks, loads] of a stage, converted, or zeros where the key is not
    ``there``."""
    places = places_of(entry, quarter, key)
    converted = cute.make_rmem_tensor((CHUNK, 2), entry.element_type)
    if there:
        for piece in cutlass.range_constexpr(PIECES):
            convert(found, piece, converted, places)
    else:
        converted.fill(0.0)
        for piece in cutlass.range_constexpr(PIECES):
            for half in cutlass.range_constexpr(2):
                cute.autovec_copy(converted[None, half], places[half][None, piece])


def places_of(entry: cute.Tensor, quarter: Int32, key: Int32) -> list[cute.Tensor]:
    """Where the two halves of a thread's pieces come in an entry [8, chunks, loads] of a stage: [8, pieces] each."""
    # The swizzle by hand: a thread has two places, and the others are at distances from them that the compiler knows.
    return [entry[None, (quarter * 2 + half) ^ key % CHUNKS, None] for half in range(2)]


def convert(found: cute.Tensor, piece: int, converted: cute.Tensor, places: list[cute.Tensor]) -> None:
    """One piece by way of ``converted`` into its places."""
    elements = cute.recast_tensor(found[None, piece], cutlass.Float8E4M3FN)
    converted.store(elements.load().to(converted.element_type).reshape((CHUNK, 2)))
    for half in range(2):
        cute.autovec_copy(converted[None, half], places[half][None, piece])


def chunks_of(s_kv: cute.Tensor) -> cute.Tensor:
    """The stages as they lie in memory: [8, chunks of 16 bytes in a row of one load, keys, loads, stages]. Chunk c of
    key k lies at place c ^ k % 8."""
    stages, loads = cute.size(s_kv, mode=[2]), WIDTH // COLUMNS
    return cute.make_tensor(
        cute.recast_ptr(s_kv.iterator, cute.make_swizzle(0, 4, 3), dtype=s_kv.element_type),
        cute.make_layout(
            (CHUNK, CHUNKS, TILE_KEYS, loads, stages),
            stride=(1, CHUNK, COLUMNS, COLUMNS * TILE_KEYS, COLUMNS * TILE_KEYS * loads),
        ),
    )
