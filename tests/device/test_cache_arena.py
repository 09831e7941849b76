"""Cache groups are validated whole; the arena's layout is [parent][child][layer][field][kv_head][token][dim]."""

from typing import Any

import numpy as np
import pytest
import torch
from plan_maker import ints

from tokenspeed.device.cache_arena import ArenaLayout, CacheArena, fold
from tokenspeed.device.placement import HOST
from tokenspeed.layers.cache_spec import CacheFieldSpec, CacheGroupSpec

FIELDS = (CacheFieldSpec(name="k", heads=2, dim=4), CacheFieldSpec(name="v", heads=2, dim=4))


def history(**changes: Any) -> CacheGroupSpec:
    values: dict[str, Any] = {
        "group_id": "full",
        "kind": "full_history",
        "layers": (0, 1),
        "fields": FIELDS,
        "rows_per_page": 8,
        "entry_stride_tokens": 1,
    }
    return CacheGroupSpec(**{**values, **changes})


def state(**changes: Any) -> CacheGroupSpec:
    values: dict[str, Any] = {
        "group_id": "state",
        "kind": "state",
        "layers": (2,),
        "fields": (CacheFieldSpec(name="ssm", heads=1, dim=24),),
        "checkpoint_granularity": 64,
    }
    return CacheGroupSpec(**{**values, **changes})


def test_a_page_is_rows_times_stride() -> None:
    spec = history(rows_per_page=8, entry_stride_tokens=4)
    assert (spec.page_size, spec.block_granularity, spec.rows_per_block) == (32, 32, 8)


@pytest.mark.parametrize(
    ("make", "changes", "words"),
    [
        (history, {"rows_per_page": None}, "'full': rows_per_page is None"),
        (history, {"rows_per_page": 0}, "rows_per_page is 0"),
        (history, {"entry_stride_tokens": None}, "entry_stride_tokens is None"),
        (history, {"checkpoint_granularity": 64}, "checkpoint_granularity is set; a full_history group has none"),
        (history, {"sliding_window_tokens": 64}, "sliding_window_tokens is set"),
        (history, {"kind": "sliding_window"}, "sliding_window_tokens is None"),
        (history, {"kind": "window"}, "kind 'window' is unknown"),
        (history, {"layers": ()}, "layers and fields must not be empty"),
        (history, {"fields": FIELDS + FIELDS}, "fields has a name twice"),
        (state, {"rows_per_page": 8}, "'state': rows_per_page is set; a state group has none"),
        (state, {"entry_stride_tokens": 1}, "entry_stride_tokens is set"),
        (state, {"sliding_window_tokens": 8}, "sliding_window_tokens is set"),
        (state, {"checkpoint_granularity": None}, "checkpoint_granularity is None"),
    ],
)
def test_refused_declarations(make: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**changes)


def test_block_granularity_of_a_state_group_is_a_type_error_passed_or_read() -> None:
    with pytest.raises(TypeError, match="block_granularity"):
        state(block_granularity=64)
    with pytest.raises(TypeError, match="declares checkpoint_granularity"):
        _ = state().block_granularity
    with pytest.raises(TypeError, match="has no pages"):
        _ = state().page_size


def test_declarations_are_frozen() -> None:
    with pytest.raises(AttributeError):
        history().rows_per_page = 3  # type: ignore[misc]


def test_fields_have_a_size() -> None:
    with pytest.raises(ValueError, match="heads 0 and dim 4"):
        CacheFieldSpec(name="k", heads=0, dim=4)


def test_folding_gives_tokens_and_blocks() -> None:
    facts = fold(history(rows_per_page=4, entry_stride_tokens=2), bytes_per_block=10, children_per_parent=3)
    assert (facts.block_granularity, facts.bytes_per_block, facts.children_per_parent) == (8, 10, 3)
    window = fold(history(kind="sliding_window", sliding_window_tokens=99), bytes_per_block=1, children_per_parent=1)
    assert window.sliding_window_tokens == 99
    kept = fold(state(), bytes_per_block=1, children_per_parent=1)
    assert (kept.block_granularity, kept.checkpoint_granularity) == (0, 64)


def test_parents_are_the_least_size_that_all_blocks_divide() -> None:
    layout = ArenaLayout.of([history(), state()], torch.float32)
    assert layout.block_bytes == (2 * 2 * 2 * 8 * 4 * 4, 24 * 4)
    assert layout.parent_bytes == 3072
    assert [facts.children_per_parent for facts in layout.facts] == [3, 32]
    with pytest.raises(ValueError, match="unique ids"):
        ArenaLayout.of([history(), history()], torch.float32)
    with pytest.raises(ValueError, match="at least one"):
        ArenaLayout.of([], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layout_of_the_bytes(dtype: torch.dtype) -> None:
    layout = ArenaLayout.of([history(), state()], dtype)
    arena = CacheArena(HOST, layout, num_parents=2)
    shape = (3, layout.facts[0].children_per_parent, 2, 2, 2, 8, 4)
    plain = arena._bytes.view(dtype).view(shape)
    assert not plain.any()
    for layer in range(2):
        for place, name in enumerate(("k", "v")):
            view = arena.field(0, layer, name)
            assert view.shape == (arena.num_blocks(0), 2, 8, 4)
            assert view.stride(-1) == 1
            view.copy_(torch.rand(view.shape))
            assert torch.equal(plain[:, :, layer, place].flatten(0, 1), view)
    with pytest.raises(KeyError, match="no field 'q'"):
        arena.field(0, 0, "q")


def test_zeroing_and_copying_whole_blocks() -> None:
    arena = CacheArena(HOST, ArenaLayout.of([history()], torch.float32), num_parents=4)
    views = [arena.field(0, layer, name) for layer in (0, 1) for name in ("k", "v")]
    for view in views:
        for block in range(5):
            view[block] = block
    arena.copy(0, np.array([[1, 2], [2, 1]], np.int32))  # as if all at once: a swap
    arena.zero(0, ints([4]))
    arena.copy(0, np.zeros((0, 2), np.int32))
    arena.zero(0, ints())
    for view in views:
        assert [float(view[block].mean()) for block in range(5)] == [0.0, 2.0, 1.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("dtype", "layers", "element"),
    [
        (torch.float8_e4m3fn, 1, torch.uint8),
        (torch.bfloat16, 1, torch.int16),
        (torch.float32, 1, torch.int32),
        (torch.float32, 2, torch.int64),
    ],
)
def test_blocks_of_any_size_are_moved_by_the_widest_element_that_they_are_whole_of(
    dtype: torch.dtype, layers: int, element: torch.dtype
) -> None:
    fields = (CacheFieldSpec(name="k", heads=1, dim=3),)
    odd = history(fields=fields, rows_per_page=1, layers=tuple(range(layers)))
    arena = CacheArena(HOST, ArenaLayout.of([odd, state(layers=(9,))], dtype), num_parents=3)
    assert [view.dtype for view in arena._elements] == [element, torch.int64]
    for group in (0, 1):
        arena._bytes.random_(0, 256)
        blocks = arena.blocks(group).numpy()
        expected, last = blocks.copy(), arena.num_blocks(group) - 1
        expected[[2, last]] = expected[[last, 2]]
        expected[1] = 0
        arena.copy(group, np.array([[2, last], [last, 2]], np.int32))
        arena.zero(group, ints([1]))
        np.testing.assert_array_equal(blocks, expected)


def test_poison_reads_as_nan_outside_the_null_parent() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        arena = CacheArena(HOST, ArenaLayout.of([history()], dtype), num_parents=2)
        arena.poison()
        view = arena.field(0, 0, "k")
        assert view[1:].isnan().all()
        assert not view[0].isnan().any()


def test_an_arena_without_a_usable_parent_is_refused() -> None:
    with pytest.raises(ValueError, match="0 parents"):
        CacheArena(HOST, ArenaLayout.of([history()], torch.float32), num_parents=0)
