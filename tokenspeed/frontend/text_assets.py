"""Reads what a model brings for its text side: the tokenizer and the chat template."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.frontend.family_text import WITHOUT_TEMPLATE, family_text
from tokenspeed.frontend.tokenizer import Tokenizer, TokenizerError
from tokenspeed.frontend.tokenizer_folder import load_folder_tokenizer
from tokenspeed.frontend.tokenizer_gguf import build_gguf_tokenizer
from tokenspeed.frontend.tokenizer_library import read_json
from tokenspeed.frontend.tokenizer_smoke import smoke_tokenizer
from tokenspeed.recipes.gguf_file import GgufError, read_gguf_header
from tokenspeed.recipes.model_config import named_architecture
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
    """A small vocabulary and a template in the manner of the family."""
    try:
        config = json.loads(source.random_config)
        inner = config.get("text_config", config)
        vocab_size = int(inner["vocab_size"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerError(f"the random model's configuration has no usable vocab_size: {error!r}") from error
    text = family_text(named_architecture(config))
    return TextAssets(smoke_tokenizer(vocab_size, text), text.chat_template())


def folder_chat_template(folder: Path) -> str:
    """Returns the template of a model folder: chat_template.jinja, else tokenizer_config.json, else one of ours for an
    architecture whose checkpoints bring an encoder instead; "" without any."""
    return _own_template(folder) or _template_for(folder)


def _template_for(folder: Path) -> str:
    path = folder / "config.json"
    architecture = named_architecture(read_json(path)) if path.is_file() else ""
    return family_text(architecture).chat_template() if architecture in WITHOUT_TEMPLATE else ""


def _own_template(folder: Path) -> str:
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
