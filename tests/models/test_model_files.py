"""Every model file exposes the same things in the same order, and its weights are those of the real architecture."""

import ast
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sparse_models import compressed_config, sparse_config
from tiny_models import TINY, random_config, save, tiny_config, transformers_model

import tokenspeed.models
from tokenspeed.layers.cache_spec import CacheFieldSpec, CacheGroupSpec, groups_of_layers
from tokenspeed.models import MODELS, architecture
from tokenspeed.recipes.model_config import ARCHITECTURES, CheckpointError, ModelConfig, read_model_config
from tokenspeed.recipes.resolved import ModelSource
from tokenspeed.recipes.safetensors_file import read_safetensors_header
from tokenspeed.recipes.stored_weights import decoder_name

FOLDER = Path(tokenspeed.models.__file__).parent

CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    **{family: partial(tiny_config, family) for family in TINY},
    **{family: partial(sparse_config, family) for family in ("deepseek_v32", "glm_moe_dsa")},
    "deepseek_v4": partial(compressed_config, "all-kinds"),
}
"""Of each architecture with a decoder of its own, what makes a tiny one's."""


def test_the_folder_holds_the_architectures_and_nothing_else() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__") == sorted(MODELS)
    assert sorted(set(ARCHITECTURES.values())) == sorted(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_things_in_the_same_order(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))
    public = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert public == ["cache_groups", "weights", "Model"]
    model = architecture(name).Model
    for method in ("attention_specs", "bind_cache", "forward", "logits"):
        assert callable(getattr(model, method))


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {
        decoder_name(name): tensor.shape
        for path in folder.glob("*.safetensors")
        for name, tensor in read_safetensors_header(path).items()
    }


def declared_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    specs = architecture(config.architecture).weights(config, rank=0, world=1)
    return {tensor.name: tensor.stored or tensor.shape for spec in specs for tensor in spec.tensors}


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_are_those_of_the_real_architecture(family: str, tied: bool, tmp_path: Path) -> None:
    folder = save(transformers_model(family, tie_word_embeddings=tied), tmp_path)
    config = read_model_config(ModelSource(kind="folder", path=str(folder)))
    ignored = re.compile("|".join(config.ignored_weights) or "(?!)")
    theirs = {name: shape for name, shape in stored_shapes(folder).items() if not ignored.fullmatch(name)}
    assert declared_shapes(config) == theirs


@pytest.mark.parametrize(
    ("family", "names"), {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",)}.items()
)
def test_biases_are_weights_too(family: str, names: tuple[str, ...], tmp_path: Path) -> None:
    folder = save(transformers_model(family, **dict.fromkeys(names, True)), tmp_path)
    config = read_model_config(ModelSource(kind="folder", path=str(folder)))
    assert declared_shapes(config) == stored_shapes(folder)


def test_a_model_within_another_goes_by_its_own_names() -> None:
    """Kimi K2.5: the decoder's weights have a place of their own, those of the vision encoder are left out."""
    text = json.loads(random_config(architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3"))
    text |= {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 8}
    whole = {"architectures": ["Kimi_K25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    config = read_model_config(ModelSource(kind="random", random_config=json.dumps(whole)))
    assert config.architecture == "kimi_k25"
    assert decoder_name("language_model.model.layers.0.self_attn.o_proj.weight") in declared_shapes(config)
    assert decoder_name("language_model.lm_head.weight") == "lm_head.weight"
    ignored = re.compile("|".join(config.ignored_weights))
    assert ignored.fullmatch("vision_tower.encoder.blocks.0.wo.weight")
    assert ignored.fullmatch("mm_projector.proj.0.weight")
    assert not ignored.fullmatch("model.layers.0.self_attn.o_proj.weight")


def test_every_decoder_has_a_tiny_configuration() -> None:
    assert set(MODELS) - set(CONFIGURATIONS) == {"kimi_k25"}, "the decoder of Kimi K2.5 is deepseek_v3's"


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_every_layer_has_its_cache(family: str, tmp_path: Path) -> None:
    CONFIGURATIONS[family]().save_pretrained(tmp_path)
    config = read_model_config(ModelSource(kind="folder", path=str(tmp_path)))
    groups = architecture(family).cache_groups(config, granularity=32)
    assert len(groups_of_layers(groups)) == config.num_layers
    for group in groups:
        assert group.kind == "state" or group.block_granularity == 32


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
    owners = groups_of_layers(specs)
    assert [specs[owner].group_id for (owner,) in owners] == [
        "sliding_attention" if layer in sliding else "attention" for layer in range(3)
    ]


def test_a_layer_in_no_group_is_refused_and_one_in_two_has_both() -> None:
    def spec(name: str, *layers: int) -> CacheGroupSpec:
        fields = (CacheFieldSpec(name="k", heads=1, dim=2),)
        return CacheGroupSpec(
            group_id=name, kind="full_history", layers=layers, fields=fields, rows_per_page=4, entry_stride_tokens=1
        )

    assert groups_of_layers([spec("a", 0, 1), spec("b", 1, 2)]) == ((0,), (0, 1), (1,))
    with pytest.raises(ValueError, match=r"each layer from 0 on; they hold 'a': \[0\], 'b': \[2\]"):
        groups_of_layers([spec("a", 0), spec("b", 2)])
    with pytest.raises(ValueError, match="'a' has a layer twice"):
        groups_of_layers([spec("a", 0, 0)])


def test_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"'mamba' is not supported; supported are .*, llama, "):
        architecture("mamba")
