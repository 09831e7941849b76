"""The ladder of captured sizes: computed, given, bounded by what can come up, checked where a recipe names it."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from pydantic import ValidationError

from tokenspeed.recipes.capture_ladder import MOST_CAPTURED, capture_ladder, max_decode_batch, padded_size
from tokenspeed.recipes.catalogue import find_recipe, load_recipe
from tokenspeed.recipes.memory import GRAPH_BYTES_PER_LAYER, device_terms
from tokenspeed.recipes.schema import Parallel, Recipe, SchedulerKeys


@dataclass(frozen=True)
class Keys:
    max_seqs: int
    max_capture_batch: int | None = None
    capture_sizes: list[int] = field(default_factory=list)


@pytest.mark.parametrize(
    ("keys", "ladder"),
    [
        (Keys(1), (1,)),
        (Keys(3), (1, 2, 3)),
        (Keys(20), (1, 2, 4, 8, 16, 20)),
        (Keys(32), (1, 2, 4, 8, 16, 24, 32)),
        (Keys(32, max_capture_batch=0), ()),
        (Keys(32, max_capture_batch=5), (1, 2, 4, 5)),
        (Keys(4, max_capture_batch=64), (1, 2, 4)),
        (Keys(32, capture_sizes=[1, 3, 32, 48]), (1, 3, 32)),
    ],
)
def test_the_ladder(keys: Keys, ladder: tuple[int, ...]) -> None:
    assert capture_ladder(keys) == ladder


def test_a_long_ladder_has_wider_steps_and_an_end() -> None:
    ladder = capture_ladder(Keys(4096))
    assert ladder[-1] == MOST_CAPTURED
    assert ladder[:5] == (1, 2, 4, 8, 16)
    assert {high - low for low, high in pairwise(ladder) if 8 <= low < 256} == {8}
    assert {high - low for low, high in pairwise(ladder) if low >= 256} == {16}
    assert capture_ladder(Keys(4096, max_capture_batch=1000))[-1] == 1000


def test_data_parallel_ranks_share_the_rows() -> None:
    assert max_decode_batch(64, 8) == 8
    assert capture_ladder(Keys(64), data_parallel=8) == (1, 2, 4, 8)
    assert max_decode_batch(4, 8) == 1


def test_a_count_is_padded_to_the_next_size() -> None:
    assert [padded_size((1, 4, 8), count) for count in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, None]
    assert padded_size((), 1) is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"capture_sizes": [4, 2]}, r"capture_sizes \[4, 2\]: give sizes above 0 in ascending order.*\[2, 4\]"),
        ({"capture_sizes": [2, 2]}, r"each once, such as \[2\]"),
        ({"capture_sizes": [0, 2]}, "greater than or equal to 1"),
        ({"capture_prefill_tokens": [64, 32]}, r"capture_prefill_tokens \[64, 32\]"),
        ({"capture_sizes": [8, 16], "max_capture_batch": 8}, "has 16, above max_capture_batch 8: raise"),
        ({"max_capture_batch": -1}, "greater than or equal to 0"),
        ({"graphs": "cuda"}, "'auto', 'off' or 'dispatch'"),
    ],
)
def test_a_ladder_that_cannot_be_is_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SchedulerKeys.model_validate(keys)


def test_the_memory_plan_counts_what_is_captured() -> None:
    recipe: Recipe = load_recipe(find_recipe("kimi-k2.6")).recipe
    model = recipe.dimensions
    assert model is not None

    def graphs(**keys: object) -> dict[str, int]:
        terms = device_terms(model, Parallel(), SchedulerKeys.model_validate({"max_seqs": 16, "chunk": 512, **keys}))
        return {
            term.detail: term.bytes // (model.layers * GRAPH_BYTES_PER_LAYER) for term in terms if term.name == "graphs"
        }

    assert graphs() == {"5 captured sizes": 5}
    assert graphs(capture_sizes=[2, 16]) == {"2 captured sizes": 2}
    assert graphs(capture_prefill_tokens=[64, 256, 1024]) == {"5 captured sizes, and 2 of prefills": 7}
    assert graphs(graphs="off") == {}
    assert graphs(max_capture_batch=0) == {}
