"""Every model file exposes the same things in the same order, and its weights are those of the real architecture."""

import ast
from pathlib import Path

import pytest
from tiny_models import transformers_model

import tokenspeed.models
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


def test_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"'mamba' is not supported; supported are llama, qwen3"):
        architecture("mamba")
