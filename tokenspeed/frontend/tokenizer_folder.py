"""Chooses how a model folder's tokenizer is read: tokenizer.json, else tiktoken.model, else tokenizer.model."""

from pathlib import Path

from tokenspeed.frontend.tokenizer import TokenizerError
from tokenspeed.frontend.tokenizer_library import LibraryTokenizer, load_tokenizer_json, read_special_names
from tokenspeed.frontend.tokenizer_sentencepiece import load_sentencepiece
from tokenspeed.frontend.tokenizer_tiktoken import load_tiktoken

_READERS = {
    "tokenizer.json": load_tokenizer_json,
    "tiktoken.model": load_tiktoken,
    "tokenizer.model": load_sentencepiece,
}


def load_folder_tokenizer(folder: Path) -> LibraryTokenizer:
    """Reads the first of the known files, and tokenizer_config.json and special_tokens_map.json beside it.

    Raises TokenizerError where there is none, or where it is damaged or of an unknown kind.
    """
    for name, read in _READERS.items():
        if (folder / name).is_file():
            return read(folder / name, read_special_names(folder))
    others = sorted(path.name for path in folder.glob("*") if path.name in ("vocab.json", "vocab.txt", "tekken.json"))
    others += sorted(path.name for path in folder.glob("*.tiktoken"))
    found = f"; {', '.join(others)} is there, but that format is not read" if others else ""
    raise TokenizerError(f"{folder}: no {', '.join(_READERS)}{found}. Copy the model's tokenizer.json into the folder")
