"""Every model file exposes the same things in the same order, and its weights are those of the real architecture."""

import ast
from pathlib import Path

import pytest
from tiny_models import random_config, transformers_model

import tokenspeed.models
from tokenspeed.layers.cache_spec import CacheFieldSpec, CacheGroupSpec, group_of_layers
from tokenspeed.models import MODELS, architecture
from tokenspeed.recipes.model_config import ARCHITECTURES, CheckpointError, read_model_config
from tokenspeed.recipes.resolved import ModelSource

FOLDER = Path(tokenspeed.models.__file__).parent


def test_the_folder_holds_the_architectures_and_nothing_else() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__") == sorted(MODELS)
    assert sorted(ARCHITECTURES.values()) == sorted(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_things_in_the_same_order(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))
    public = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert public == ["cache_groups", "weights", "Model"]
    model = architecture(name).Model
    for method in ("bind_cache", "forward", "logits"):
        assert callable(getattr(model, method))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_names_and_shapes_are_those_of_the_real_architecture(
    family: str, tied: bool, bias: bool, tmp_path: Path
) -> None:
    changes: dict[str, object] = {"tie_word_embeddings": tied, "attention_bias": bias}
    if family == "llama":
        changes["mlp_bias"] = bias
    model = transformers_model(family, **changes)
    model.config.save_pretrained(tmp_path)
    config = read_model_config(ModelSource(kind="folder", path=str(tmp_path)))
    specs = architecture(family).weights(config, rank=0, world=1)
    theirs = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if tied:
        theirs.pop("lm_head.weight")
    assert {spec.name: spec.shape for spec in specs} == theirs


@pytest.mark.parametrize("family", MODELS)
def test_cache_group(family: str, tmp_path: Path) -> None:
    model = transformers_model(family)
    model.config.save_pretrained(tmp_path)
    config = read_model_config(ModelSource(kind="folder", path=str(tmp_path)))
    (group,) = architecture(family).cache_groups(config, granularity=32)
    assert (group.kind, group.block_granularity, group.layers) == ("full_history", 32, (0, 1))
    assert [(field.name, field.heads, field.dim) for field in group.fields] == [("k", 2, 16), ("v", 2, 16)]


@pytest.mark.parametrize(
    ("sliding", "groups"),
    [
        ((), [("attention", (0, 1, 2), None)]),
        ((1,), [("attention", (0, 2), None), ("sliding_attention", (1,), 20)]),
        ((0, 1, 2), [("sliding_attention", (0, 1, 2), 20)]),
    ],
)
def test_layers_with_a_window_have_a_group_of_their_own(
    sliding: tuple[int, ...], groups: list[tuple[str, tuple[int, ...], int | None]]
) -> None:
    kinds = ["sliding_attention" if layer in sliding else "full_attention" for layer in range(3)]
    text = random_config(
        architectures=["Qwen3ForCausalLM"],
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=20,
        layer_types=kinds,
    )
    config = read_model_config(ModelSource(kind="random", random_config=text))
    specs = architecture("qwen3").cache_groups(config, granularity=16)
    assert [(spec.group_id, spec.layers, spec.sliding_window_tokens) for spec in specs] == groups
    owners = group_of_layers(specs)
    assert [specs[owner].group_id for owner in owners] == [
        "sliding_attention" if layer in sliding else "attention" for layer in range(3)
    ]


def test_a_layer_in_no_group_or_in_two_is_refused() -> None:
    def spec(name: str, *layers: int) -> CacheGroupSpec:
        fields = (CacheFieldSpec(name="k", heads=1, dim=2),)
        return CacheGroupSpec(
            group_id=name, kind="full_history", layers=layers, fields=fields, rows_per_page=4, entry_stride_tokens=1
        )

    for groups in ([spec("a", 0, 1), spec("b", 1, 2)], [spec("a", 0), spec("b", 2)]):
        with pytest.raises(ValueError, match=r"each layer from 0 on once; they hold 'a': \[0.*'b': "):
            group_of_layers(groups)


def test_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"'mamba' is not supported; supported are llama, qwen3"):
        architecture("mamba")
