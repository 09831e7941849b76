"""Whether a model gives embeddings: what the recipe says, else what the checkpoint says."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from tokenspeed.frontend.embedding_rules import EmbeddingRules, embedding_rules
from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.resolved import EmbeddingSettings, ModelSource
from tokenspeed.recipes.schema_types import dimension_ranges

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
LATER = {**POOLING, "type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling"}
ALL = [TRANSFORMER, POOLING, NORMALIZE]


def checkpoint(
    folder: Path, modules: Any, pooling: dict[str, Any], config: dict[str, Any] | None = None
) -> ModelSource:
    """A folder with sentence-transformers' files, as far as they are read."""
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config.json").write_text(json.dumps(config or {}))
    return ModelSource(kind="folder", path=str(folder))


def flags(*modes: str) -> dict[str, Any]:
    """The form up to version 5, of which Qwen3-Embedding's is one."""
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {
        "word_embedding_dimension": 64,
        **{f"pooling_mode_{name}": name in modes for name in names},
        "include_prompt": True,
    }


def rules(source: ModelSource, **settings: Any) -> EmbeddingRules:
    return embedding_rules(EmbeddingSettings(**settings), source, 64)


@pytest.mark.parametrize(
    ("modules", "pooling", "found"),
    [
        (ALL, flags("lasttoken"), ("last", True)),
        (ALL, flags("mean_tokens"), ("mean", True)),
        ([TRANSFORMER, POOLING], flags("lasttoken"), ("last", False)),
        ([TRANSFORMER, LATER], {"embedding_dimension": 64, "pooling_mode": "mean"}, ("mean", False)),
        ([TRANSFORMER, LATER, NORMALIZE], {"pooling_mode": ["lasttoken"]}, ("last", True)),
    ],
)
def test_what_sentence_transformers_files_say(tmp_path: Path, modules: Any, pooling: Any, found: Any) -> None:
    source = checkpoint(tmp_path, modules, pooling)
    assert (rules(source).pooling, rules(source).normalize, rules(source).refusal) == (*found, "")
    assert rules(source, normalize=not found[1]).normalize is not found[1], "the recipe has the last word"
    assert rules(source, pooling="none").pooling is None


@pytest.mark.parametrize(
    ("modules", "pooling", "config", "says"),
    [
        (ALL, flags("cls_token"), {}, "1_Pooling/config.json asks for cls"),
        (ALL, flags("mean_tokens", "lasttoken"), {}, "mean and lasttoken"),
        (ALL, flags(), {}, "asks for nothing"),
        ([*ALL, DENSE], flags("mean_tokens"), {}, "modules.json has Dense"),
        ([TRANSFORMER], flags("mean_tokens"), {}, "no Pooling"),
        (ALL, flags("mean_tokens"), {"is_causal": False}, "looks back only"),
        (ALL, flags("mean_tokens"), {"use_bidirectional_attention": True}, "looks back only"),
    ],
)
def test_what_the_engine_does_not_have(tmp_path: Path, modules: Any, pooling: Any, config: Any, says: str) -> None:
    source = checkpoint(tmp_path, modules, pooling, config)
    assert rules(source).pooling is None and says in rules(source).refusal
    assert rules(source, pooling="mean").pooling == "mean", "who says so in a recipe knows the model"


def test_a_checkpoint_that_says_nothing(tmp_path: Path) -> None:
    for source in (ModelSource(kind="folder", path=str(tmp_path)), ModelSource(kind="random", random_config="{}")):
        assert rules(source).pooling is None and "neither recipe nor checkpoint" in rules(source).refusal
        assert rules(source, pooling="last") == EmbeddingRules("last", "", normalize=True, size=64)


@pytest.mark.parametrize(("name", "text"), [("modules.json", "{}"), ("1_Pooling/config.json", "[")])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    source = checkpoint(tmp_path, ALL, flags("mean_tokens"))
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{name}.*api\.embeddings\.pooling"):
        rules(source)
    assert rules(source, pooling="none").pooling is None


@pytest.mark.parametrize(("number", "pooling"), [(None, None), (0, None), (1, "mean"), (2, None), (3, "last")])
def test_what_a_gguf_file_says(tmp_path: Path, number: int | None, pooling: str | None) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    if number is not None:
        writer.add_pooling_type(gguf.PoolingType(number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = rules(ModelSource(kind="gguf", path=str(path)))
    assert found.pooling == pooling
    assert ("pooling type 2" in found.refusal) == (number == 2)


def test_dimensions() -> None:
    found = rules(ModelSource(kind="random"), pooling="last", dimensions="8-16, 32,128")
    assert [size for size in range(1, 200) if found.allows(size)] == [*range(8, 17), 32, 64], (
        "128 is more than there is"
    )
    assert dimension_ranges(" ") == ()
    for text in ("x", "8-", "9-8", "0", "8,,9", "-3"):
        with pytest.raises(ValueError, match="32-1024"):
            dimension_ranges(text)
