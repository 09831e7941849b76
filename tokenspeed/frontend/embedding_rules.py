"""Whether a model gives embeddings, and which: what its recipe says, else what its checkpoint says."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenspeed.recipes.checkpoint_error import CheckpointError
from tokenspeed.recipes.gguf_file import GgufError, read_gguf_header
from tokenspeed.recipes.resolved import EmbeddingSettings, ModelSource
from tokenspeed.recipes.schema_types import dimension_ranges

KEY = "api.embeddings.pooling"
_MODULES = "modules.json"
_MODES = {"lasttoken": "last", "mean": "mean"}
_GGUF_MODES = {1: "mean", 3: "last"}
"""llama.cpp's numbers of POOLING_TYPE; 0 is none, 2 that of a first token, 4 that of a ranking model."""


@dataclass(frozen=True)
class EmbeddingRules:
    """What ``/v1/embeddings`` of the served model gives.

    Attributes:
        pooling: how the hidden states of a text become one vector; None: it gives no embeddings.
        refusal: why it gives none; "" where it does.
        normalize: vectors have length 1.
        size: elements of a whole vector.
        dimensions: the sizes below that which a request may ask for; each range with its end.
    """

    pooling: Literal["last", "mean"] | None
    refusal: str
    normalize: bool
    size: int
    dimensions: tuple[range, ...] = ()

    def allows(self, dimensions: int) -> bool:
        """Whether a vector may have so many elements: all, or its first ones where the model was trained for that."""
        return dimensions == self.size or (
            dimensions < self.size and any(dimensions in sizes for sizes in self.dimensions)
        )


@dataclass(frozen=True)
class _Stored:
    """What a checkpoint says; ``pooling`` None with the reason where it cannot be had, or nothing is said."""

    pooling: Literal["last", "mean"] | None = None
    reason: str = "neither recipe nor checkpoint says how its hidden states become one vector"
    normalize: bool = True


def embedding_rules(settings: EmbeddingSettings, source: ModelSource, size: int) -> EmbeddingRules:
    """What the model at ``source``, of hidden size ``size``, gives.

    Raises CheckpointError where the checkpoint is asked and its files cannot be read.
    """
    if settings.pooling == "none":
        stored = _Stored(reason=f"{KEY} is none")
    elif settings.pooling == "auto":
        stored = _stored(source)
    else:
        stored = _Stored(pooling=settings.pooling)
    return EmbeddingRules(
        pooling=stored.pooling,
        refusal="" if stored.pooling else stored.reason,
        normalize=stored.normalize if settings.normalize is None else settings.normalize,
        size=size,
        dimensions=dimension_ranges(settings.dimensions),
    )


def _stored(source: ModelSource) -> _Stored:
    path = Path(source.path)
    if source.kind == "gguf":
        return _of_gguf(path)
    if source.kind == "folder" and (path / _MODULES).is_file():
        return _of_sentence_transformers(path)
    return _Stored()


def _of_gguf(path: Path) -> _Stored:
    try:
        metadata = read_gguf_header(path).metadata
    except GgufError as error:
        raise CheckpointError(str(error)) from error
    number = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    pooling = _GGUF_MODES.get(number) if isinstance(number, int) else None
    if pooling is None and number:
        return _Stored(reason=f"{path.name} has the pooling type {number}, and the engine has mean (1) and last (3)")
    return _Stored(pooling=pooling)  # type: ignore[arg-type]


def _of_sentence_transformers(folder: Path) -> _Stored:
    """What modules.json, and the configuration of the pooling it names, say: a transformer, a pooling, and perhaps a
    normalisation; the form of sentence-transformers up to version 5 and that of later ones."""
    modules = _read(folder / _MODULES, list)
    places = {str(module.get("type", "")).rpartition(".")[2]: module for module in modules if isinstance(module, dict)}
    strange = sorted(set(places) - {"Transformer", "Pooling", "Normalize"})
    if strange or "Pooling" not in places:
        what = f"has {', '.join(strange)}" if strange else "has no Pooling"
        return _Stored(reason=f"its {_MODULES} {what}; the engine runs a transformer, a pooling and a normalisation")
    config = _read(folder / "config.json", dict)
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        return _Stored(reason="its tokens see those behind them, and attention looks back only here")
    place = f"{places['Pooling'].get('path', '')}/config.json"
    modes = _modes(_read(folder / place, dict))
    if len(modes) != 1 or modes[0] not in _MODES:
        return _Stored(
            reason=f"its {place} asks for {' and '.join(modes) or 'nothing'}; the engine has lasttoken and mean"
        )
    return _Stored(pooling=_MODES[modes[0]], normalize="Normalize" in places)  # type: ignore[arg-type]


def _modes(pooling: dict[str, Any]) -> list[str]:
    """The modes whose vectors are joined: one flag each, or one text or list."""
    given = pooling.get("pooling_mode")
    if given is not None:
        return [str(mode) for mode in (given if isinstance(given, list) else [given])]
    flags = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True]
    return [flag.removeprefix("pooling_mode_").removesuffix("_tokens") for flag in flags]


def _read(path: Path, kind: type) -> Any:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}; {KEY} none, last or mean leaves it unread") from error
    if not isinstance(value, kind):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}; {KEY} none, last or mean leaves it unread")
    return value
