"""Plans for machines that are not here: pinned worked examples, divisibility, and each known box."""

import pytest

from tokenspeed.recipes.activation_type import ACTIVATIONS_VARIABLE
from tokenspeed.recipes.boxes import nearest_boxes, render_boxes
from tokenspeed.recipes.capacity import BLOCK_ALIGNMENT, MOST_LARGEST, cache_shape, share_parents
from tokenspeed.recipes.catalogue import configs_directory, find_recipe, load_hardware, load_recipe, recipe_names
from tokenspeed.recipes.dimensions import CacheGroup, Dimensions, Experts, LinearAttention
from tokenspeed.recipes.divisibility import indivisible
from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.machine import described_machine
from tokenspeed.recipes.memory import LATER_TERMS, device_terms
from tokenspeed.recipes.overrides import set_values
from tokenspeed.recipes.parameters import count_parameters
from tokenspeed.recipes.plan import Plan, make_plan
from tokenspeed.recipes.plan_text import render_plan
from tokenspeed.recipes.resolve import resolve
from tokenspeed.recipes.resolved import GIB
from tokenspeed.recipes.schema import Parallel, SchedulerKeys


def plan(target: str, hardware: str, *assignments: str, profile: str | None = None) -> Plan:
    machine = described_machine(load_hardware(hardware))
    return make_plan(resolve(target, machine, profile=profile, overrides=set_values(list(assignments))), machine)


def test_kimi_on_b200_is_the_published_arithmetic() -> None:
    found = plan("kimi-k2.5", "b200")
    assert found.resolution.profile == "b200-nvfp4"
    # The latent is replicated: tensor parallelism does not make it smaller.
    assert found.bytes_per_token == 35_136
    assert plan("kimi-k2.5", "b200", "kv.dtype=bfloat16").bytes_per_token == 70_272
    assert plan("kimi-k2.5", "b200", "parallel.tp=8 parallel.ep=8").bytes_per_token == 35_136
    text = "\n".join(render_plan(found))
    assert "35,136 B a token on each rank in float8_e4m3, whole on every rank" in text
    assert "8-bit KV cache" not in text
    assert "model family" not in text and "weight format" not in text


def test_an_npu_has_no_cache_of_eight_bits() -> None:
    missing = plan("kimi-k2.5", "a3", "kv.dtype=float8_e4m3").resolution.missing
    assert "an 8-bit KV cache on an NPU (kv.dtype = float8_e4m3; set kv.dtype to auto)" in missing
    assert not any("KV cache" in each for each in plan("kimi-k2.5", "a3").resolution.missing)


def test_half_of_gpt_oss_is_windowed() -> None:
    found = plan("gpt-oss-120b", "h100", profile="h100-mxfp4")
    full, sliding = found.groups
    assert (full.bytes, sliding.bytes) == (18 * 1024 * 2, 18 * 1024 * 2)
    # 2048 blocks and the overlap's for the layers that see everything; the 128 tokens of a window lie in at most three
    # blocks, however long the request is.
    assert found.pool is not None
    assert found.pool.per_request == 2049 + 3
    short = plan("gpt-oss-120b", "h100", "scheduler.max_len=65536", profile="h100-mxfp4")
    assert short.pool is not None
    assert short.pool.per_request == 1025 + 3


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("kimi-k2.5", 1.026e12),
        ("deepseek-v3.2", 671e9),
        ("gpt-oss-120b", 116.829e9),
        ("qwen3-8b", 8.19e9),
        ("deepseek-v4-flash", 284e9),
    ],
)
def test_dimensions_amount_to_the_published_parameters(name: str, published: float) -> None:
    dimensions = load_recipe(find_recipe(name)).recipe.dimensions
    assert dimensions is not None
    assert count_parameters(dimensions).total == pytest.approx(published, rel=0.004)


@pytest.mark.parametrize("name", recipe_names())
def test_every_profile_divides_its_model(name: str) -> None:
    recipe = load_recipe(find_recipe(name)).recipe
    if recipe.dimensions is None:
        pytest.skip("it has parts that no dimension says")
    for profile in recipe.profiles.values():
        assert indivisible(recipe.dimensions, profile.parallel or Parallel()) == []


def test_dense_checkpoints_are_counted_to_the_byte() -> None:
    recipe = load_recipe(find_recipe("qwen3-8b")).recipe
    assert recipe.dimensions is not None
    assert 2 * count_parameters(recipe.dimensions).total == recipe.weights.bytes


def test_experts_alone_are_small_in_kimis_checkpoint() -> None:
    # 4 bits and a 16-bit scale for 32 weights; all else in 16 bits: the published size within a hundredth.
    dimensions = load_recipe(find_recipe("kimi-k2.5")).recipe.dimensions
    assert dimensions is not None
    count = count_parameters(dimensions)
    assert count.experts * 0.5625 + 2 * (count.sharded + count.replicated) == pytest.approx(595e9, rel=0.01)


def test_ranks_hold_their_part_of_the_weights() -> None:
    weights = {
        tp: next(
            term.bytes
            for term in plan("kimi-k2.5", "h200", f"parallel.tp={tp}", profile="h200-int4").terms
            if term.name == "weights"
        )
        for tp in (4, 8)
    }
    # What every rank holds whole (1.5 B weights in 16 bits: compressed projections, routers, the vision encoder) makes
    # twice the ranks less than half the weights.
    replicated = 2 * weights[8] - weights[4]
    assert replicated == pytest.approx(3.04e9, rel=0.01)
    assert weights[8] == pytest.approx((595e9 - replicated) / 8 + replicated, rel=0.001)


def test_rows_that_entries_are_made_of_keep_sixteen_bits() -> None:
    found = plan("deepseek-v4-flash", "b200", "kv.dtype=float8_e4m3")
    assert [(part.group.id, part.bytes, part.dtype) for part in found.groups] == [
        ("sliding_attention", 43 * 512, "float8_e4m3"),
        ("sparse_entries", 21 * 640 // 4, "float8_e4m3"),
        ("sparse_inputs", 21 * 2560 * 2, "bfloat16"),
        ("heavy_entries", 20 * 512 // 128, "float8_e4m3"),
        ("heavy_inputs", 20 * 1024 * 2, "bfloat16"),
    ]
    wider = plan("deepseek-v4-flash", "b200", "kv.dtype=float32")
    assert [part.dtype for part in wider.groups] == ["float32"] * 5


def test_a_groups_own_type_does_not_follow_the_caches() -> None:
    found = plan("qwen3.8-27b", "b200", "kv.dtype=float8_e4m3")
    assert [(part.group.id, part.dtype) for part in found.groups] == [
        ("attention", "float8_e4m3"),
        ("state", "float32"),
    ]


def test_a_state_is_one_block_a_request() -> None:
    state = CacheGroup(id="state", kind="state", layers=3, values_per_layer=1000, checkpoint=256, dtype="float32")
    full = CacheGroup(id="attention", layers=1, values_per_layer=375)
    shape = cache_shape([full, state], "bfloat16", granularity=64)
    assert [facts.bytes_per_block for facts in shape.facts] == [48_000, 12_000]
    assert shape.parent_bytes == 48_000
    assert [(facts.block_granularity, facts.checkpoint_granularity) for facts in shape.facts] == [(64, 0), (0, 256)]


DENSE = Dimensions(layers=4, hidden=52 * 64, heads=52, kv_heads=4, head_dim=64, intermediate=1536, vocab=1000)
STATES = LinearAttention(layers=2, key_heads=6, value_heads=8, key_dim=64, value_dim=64, conv_width=4)
SPARSE = DENSE.model_copy(update={"experts": Experts(layers=4, count=24, active=4, intermediate=1536)})


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        (DENSE, Parallel(tp=3), "52 attention heads are not a multiple of 3; tp may be 1, 2, 4"),
        (DENSE, Parallel(tp=8), "52 attention heads are not a multiple of 8"),
        (DENSE, Parallel(tp=2, ep=2), "the model has no experts"),
        (DENSE, Parallel(pp=5), "the model has 4 layers"),
        (DENSE.model_copy(update={"heads": 60, "kv_heads": 6}), Parallel(tp=4), "6 key-value heads"),
        (
            DENSE.model_copy(update={"quantisation_block": 512}),
            Parallel(tp=2),
            "3 intermediate columns in blocks of 512",
        ),
        (
            SPARSE,
            Parallel(tp=4, dp=4, ep=16),
            "24 experts are not a multiple of 16; ep may be 1, 2, 3, 4, 6, 8, 12, 24",
        ),
        (
            DENSE.model_copy(update={"quantisation_block": 256, "intermediate": 2048}),
            Parallel(tp=2),
            "13 columns of the heads in blocks of 256",
        ),
        (
            DENSE.model_copy(update={"linear": STATES}),
            Parallel(tp=4),
            "6 key heads of layers with a state are not a multiple of 4",
        ),
        (DENSE.model_copy(update={"linear": STATES, "heads": 48, "kv_heads": 48}), Parallel(tp=6), "8 value heads"),
        (SPARSE, Parallel(tp=4, ep=8), "experts are divided among the ranks of one or of all replicas: 4"),
    ],
)
def test_what_cannot_be_divided_is_named_with_what_can(model: Dimensions, parallel: Parallel, message: str) -> None:
    assert any(message in problem for problem in indivisible(model, parallel))


def test_what_can_be_divided_passes() -> None:
    assert indivisible(DENSE, Parallel(tp=4)) == []
    # Fewer KV heads than ranks are repeated.
    assert indivisible(DENSE.model_copy(update={"kv_heads": 2}), Parallel(tp=4)) == []
    assert indivisible(SPARSE, Parallel(tp=4, dp=2, ep=8)) == []
    # Under expert parallelism an expert stays whole: its 3 blocks of columns need not be divided.
    whole = SPARSE.model_copy(update={"quantisation_block": 512, "intermediate": 2048})
    assert indivisible(whole, Parallel(tp=4, ep=4)) == []
    assert any("3 expert columns" in problem for problem in indivisible(whole, Parallel(tp=4)))


def test_an_impossible_parallelism_names_the_place() -> None:
    with pytest.raises(RecipeError, match=r"SET parallel\.tp: kimi-k2\.5: parallel\.tp is 6: 64 attention heads"):
        plan("kimi-k2.5", "h200", "parallel.tp=6")


def test_more_ranks_than_devices_do_not_fit() -> None:
    found = plan("gpt-oss-120b", "gb200", "parallel.tp=8 parallel.ep=8", profile="h100-mxfp4-tp2")
    assert found.problems == ["8 ranks (tp x dp x pp) need a device each, there are 4"]
    assert plan("gpt-oss-120b", "gb200", "parallel.tp=4 parallel.ep=4", profile="h100-mxfp4-tp2").problems == []
    assert plan("kimi-k2.5", "a2", profile="a2-w4a8-two-nodes").problems == []


def test_each_known_box_says_how_near_it_comes() -> None:
    boxes = {box.hardware.name: box for box in nearest_boxes(load_recipe(find_recipe("kimi-k2.5")))}
    assert set(boxes) == {
        path.stem for path in (configs_directory() / "hardware").glob("*.yaml") if not path.stem.startswith("cpu")
    }
    assert boxes["mi355x"].verdict == "fits"
    assert boxes["h100"].verdict == "short"
    assert boxes["h100"].reason.endswith("short on each device")
    assert boxes["rtx-4090"].reason == "needs 8 devices, it has 1"
    lines = render_boxes(list(boxes.values()))
    assert lines[0].lstrip().startswith("AMD Instinct MI355X")
    assert any("NVIDIA H100" in line and "short on each device" in line for line in lines)


def test_the_drivers_figure_wins_over_the_data_sheets() -> None:
    assert plan("qwen3-8b", "h100", profile="rtx-4090").memory_bytes == int(0.92 * (81_559 << 20))
    assert load_hardware("mi355x").device_bytes == 288 * 10**9
    assert load_hardware("h100").device_bytes == 81_559 << 20 > 79 * GIB


@pytest.mark.parametrize(
    "sizes",
    [
        (79_036_416, 1_572_864),  # a state of 36 layers and keys of 12
        (1_000_003, 999_983),  # two primes
        (4_096, 79_036_420, 1_003_904),
    ],
)
def test_blocks_without_a_small_common_multiple_are_padded_and_waste_little(sizes: tuple[int, ...]) -> None:
    padded, parent = share_parents(sizes)
    assert all(parent % size == 0 and size % BLOCK_ALIGNMENT == 0 for size in padded)
    assert all(real <= size < real * 1.12 + BLOCK_ALIGNMENT for real, size in zip(sizes, padded, strict=True))
    assert parent <= (MOST_LARGEST + 1) * max(padded)


def test_blocks_with_a_small_common_multiple_are_left_as_they_are() -> None:
    assert share_parents((48_000, 12_000)) == ((48_000, 12_000), 48_000)
    assert share_parents((6, 4)) == ((6, 4), 12)


def test_what_goes_into_products_and_who_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*assignments: str, profile: str = "h200-int4") -> list[str]:
        lines = render_plan(plan("kimi-k2.5", "h200", *assignments, profile=profile))
        return [line for line in lines if line.startswith("products  ")]

    monkeypatch.delenv(ACTIVATIONS_VARIABLE, raising=False)
    assert said() == ["products  of bfloat16 activations: auto for int4 weights on a device (default)"]
    assert said(profile="smoke") == ["products  of float32 activations: auto for float32 weights on the CPU (default)"]
    assert said("activations=float32") == ["products  of float32 activations (SET activations)"]
    assert said("activations=fp4") == [
        "products  of fp4 activations where weights have four bits (SET activations), else of bfloat16 activations: "
        "auto for int4 weights on a device"
    ]
    monkeypatch.setenv(ACTIVATIONS_VARIABLE, "float32")
    assert said("activations=bfloat16") == [f"products  of float32 activations ({ACTIVATIONS_VARIABLE})"]


@pytest.mark.parametrize("ranks", [1, 4])
def test_what_layers_with_a_state_take_beside_their_inputs(ranks: int) -> None:
    """The delta rule over chunks of 64: 48 value heads in all, keys and values of 128."""
    recipe = load_recipe(find_recipe("qwen3.8-27b")).recipe
    assert recipe.dimensions is not None and recipe.dimensions.linear is not None
    linear = recipe.dimensions.linear
    assert (linear.value_heads, linear.key_dim, linear.value_dim) == (48, 128, 128)
    keys = SchedulerKeys.model_validate({"max_seqs": 16, "chunk": 2048})
    terms = {term.name: term.bytes for term in device_terms(recipe.dimensions, Parallel(tp=ranks), keys)}
    assert terms["state workspace"] == 4 * (48 // ranks) * (2064 * (2 * 64 + 128 + 128) + 16 * 128 * 128)
    assert "state workspace" in LATER_TERMS
