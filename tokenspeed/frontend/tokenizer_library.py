"""A tokenizer on the ``tokenizers`` library, and its reading from a tokenizer.json."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from tokenspeed.frontend.token_bytes import TokenToBytes, token_to_bytes_for
from tokenspeed.frontend.tokenizer import TokenizerError, without_doubled_begin

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""One text at a time is encoded: the library's pool, a thread for each core, would stand idle."""


class LibraryTokenizer:
    """A ``tokenizers.Tokenizer`` and what it does not say itself.

    Args:
        library: the tokenizer; its truncation and padding are switched off, because nothing is cut in silence.
        token_to_bytes: for tokens of the vocabulary proper; added tokens stand for their own text.
        bos_token, eos_token: their text or "".
        surround: ids put before and behind a plain text by ``add_special_tokens``; None leaves that to the library's
            own post-processor.
        prepare: what is done to a whole text before special tokens are looked for in it.
    """

    def __init__(
        self,
        library: Library,
        token_to_bytes: TokenToBytes,
        bos_token: str,
        eos_token: str,
        surround: tuple[list[int], list[int]] | None = None,
        prepare: Callable[[str], str] | None = None,
    ) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._token_to_bytes = token_to_bytes
        self._surround = surround
        self._prepare = prepare
        added = library.get_added_tokens_decoder()
        self._bytes = {token_id: token.content.encode() for token_id, token in added.items()}
        self._vocab_size: int = library.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.bos_token_id: int | None = library.token_to_id(bos_token) if bos_token else None

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._prepare is not None:
            text = self._prepare(text)
        if self._surround is None:
            ids = self._encoded(text, add_special_tokens)
        else:
            ids = self._encoded(text, add_special_tokens=False)
            if add_special_tokens:
                ids = [*self._surround[0], *ids, *self._surround[1]]
        return without_doubled_begin(ids, self.bos_token_id) if add_special_tokens else ids

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        """The library's own encoding. Its batches leave the interpreter to other threads meanwhile, ``encode`` does
        not: a megabyte of text stops every stream for most of a second."""
        (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self._token_to_bytes(self.token_name(token_id))
            self._bytes[token_id] = found
        return found

    def token_name(self, token_id: int) -> str:
        return (self._library.id_to_token(token_id) or "") if token_id >= 0 else ""


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object from a file; raises TokenizerError naming the file where that fails."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: an object was expected, it holds a {type(value).__name__}")
    return value


def read_special_names(folder: Path) -> dict[str, Any]:
    """What special_tokens_map.json and tokenizer_config.json say, the latter first; empty without them."""
    names: dict[str, Any] = {}
    for beside in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / beside).is_file():
            names.update({key: value for key, value in read_json(folder / beside).items() if value is not None})
    return names


def load_tokenizer_json(path: Path, names: Mapping[str, Any]) -> LibraryTokenizer:
    """Reads a tokenizer.json; ``names`` are read_special_names'.

    Raises TokenizerError where it is damaged or of an unknown kind.
    """
    document = read_json(path)
    try:
        library = Library.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path}: {error}") from error
    return LibraryTokenizer(
        library,
        token_to_bytes_for(document.get("decoder"), str(path)),
        bos_token=token_text(names.get("bos_token")),
        eos_token=token_text(names.get("eos_token")),
    )


def token_text(entry: Any) -> str:
    """A special token's text, which is given as such or as an object with a ``content``."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else ""
