"""Which files of a repository the engine needs: one format of the weights, and what reads text for it."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from tokenspeed.recipes.weights.manifest import HubFile
from tokenspeed.recipes.weights.places import FetchError

_INDEX = "model.safetensors.index.json"
_BESIDE = (
    "config.json",
    "generation_config.json",
    "*_config.json",  # tokenizer, processors, quantisation
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "*.model",  # sentencepiece, and tiktoken.model
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_SHOWN = 6


def wanted_files(repository: str, files: Sequence[HubFile], weight_format: str) -> tuple[HubFile, ...]:
    """Chooses from all files of a repository; ``weight_format`` is the recipe's.

    Safetensors where there are any and the format is no GGUF's: the numbered shards if there is an index, else
    model.safetensors, else all. A GGUF otherwise: the only one, or the one with the format in its name. Copies in other
    formats and in subfolders stay away; of a GGUF that is split over several files all are taken.

    Raises FetchError where nothing the engine reads is there, or where several would do.
    """
    top = [file for file in files if "/" not in file.path]
    if not weight_format.startswith("gguf"):
        weights = _safetensors(top)
        if weights:
            beside = [file for file in top if any(fnmatchcase(file.path, pattern) for pattern in _BESIDE)]
            return (*beside, *weights)
    return _gguf(repository, files, weight_format)


def _safetensors(top: Sequence[HubFile]) -> list[HubFile]:
    found = [file for file in top if file.path.endswith(".safetensors")]
    index = [file for file in top if file.path == _INDEX]
    if index and found:
        # Names, not the index itself: it is not here yet. Vendors' own copies (consolidated.safetensors) have others.
        shards = [file for file in found if _SHARD.fullmatch(file.path)]
        return [*index, *(shards or found)]
    return [file for file in found if file.path == "model.safetensors"] or found


def _gguf(repository: str, files: Sequence[HubFile], weight_format: str) -> tuple[HubFile, ...]:
    """The file, or the files of a model that is split over several, the first of them first."""
    models: dict[str, list[HubFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        if file.path.lower().endswith(".gguf"):
            models.setdefault(_PART.sub(r".gguf", file.path), []).append(file)
    found = list(models)
    kind = weight_format.removeprefix("gguf").lstrip("-").lower()
    named = [name for name in found if kind and re.search(rf"(^|[-./]){re.escape(kind)}\.gguf$", name.lower())]
    chosen = named or found
    if len(chosen) == 1:
        return tuple(models[chosen[0]])
    if not found:
        pickles = any(file.path.endswith((".bin", ".pt", ".pth")) for file in files)
        only = "; its .bin files can run code when they are read, so they never are" if pickles else ""
        raise FetchError(
            f"{repository} holds neither *.safetensors nor *.gguf{only}; name a repository with converted weights"
        )
    shown = ", ".join(chosen[:_SHOWN]) + (f" and {len(chosen) - _SHOWN} more" if len(chosen) > _SHOWN else "")
    raise FetchError(
        f"{repository} holds {len(chosen)} GGUF files ({shown}); say which by the recipe's weights: "
        "format: gguf-q8_0 takes the one that ends in q8_0.gguf"
    )
