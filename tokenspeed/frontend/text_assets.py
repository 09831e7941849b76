"""Reads what a model brings for its text side: the tokenizer and the chat template."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.frontend.tokenizer import Tokenizer, TokenizerError
from tokenspeed.frontend.tokenizer_bytes import CHAT_TEMPLATE, ByteTokenizer
from tokenspeed.frontend.tokenizer_gguf import build_gguf_tokenizer
from tokenspeed.frontend.tokenizer_library import load_folder_tokenizer, read_json
from tokenspeed.recipes.gguf_file import GgufError, read_gguf_header
from tokenspeed.recipes.resolved import ModelSource


@dataclass(frozen=True)
class TextAssets:
    """The tokenizer, and the source text of the chat template ("" where the model has none)."""

    tokenizer: Tokenizer
    chat_template: str


def load_text_assets(source: ModelSource) -> TextAssets:
    """Reads tokenizer and chat template of ``source``; raises TokenizerError where they cannot be used."""
    if source.kind == "gguf":
        return _from_gguf(Path(source.path))
    if source.kind == "folder":
        folder = Path(source.path)
        return TextAssets(load_folder_tokenizer(folder), folder_chat_template(folder))
    return _built_in(source)


def _from_gguf(path: Path) -> TextAssets:
    try:
        metadata = read_gguf_header(path).metadata
    except GgufError as error:
        raise TokenizerError(str(error)) from error
    template = metadata.get("tokenizer.chat_template", "")
    return TextAssets(build_gguf_tokenizer(metadata, str(path)), template if isinstance(template, str) else "")


def _built_in(source: ModelSource) -> TextAssets:
    try:
        config = json.loads(source.random_config)
        vocab_size = int(config["vocab_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise TokenizerError(f"the random model's configuration has no usable vocab_size: {error!r}") from error
    return TextAssets(ByteTokenizer(vocab_size), CHAT_TEMPLATE)


def folder_chat_template(folder: Path) -> str:
    """Returns the template of a model folder: chat_template.jinja, else tokenizer_config.json; "" without one."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{path}: {error}") from error
    path = folder / "tokenizer_config.json"
    return _named_or_plain(read_json(path).get("chat_template"), path) if path.is_file() else ""


def _named_or_plain(entry: Any, path: Path) -> str:
    """A template is given as text, or as a list of named ones, of which "default" is the one for a chat."""
    if entry is None or isinstance(entry, str):
        return entry or ""
    try:
        named = {str(item["name"]): str(item["template"]) for item in entry}
    except (TypeError, KeyError) as error:
        raise TokenizerError(f"{path}: chat_template is neither text nor a list of named templates") from error
    if "default" not in named:
        raise TokenizerError(f"{path}: chat_template has {', '.join(named) or 'no templates'}, but no 'default'")
    return named["default"]
