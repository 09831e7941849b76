"""The tokenizer of models with random weights: small, and built as real ones are.

Ids 0 to 255 are the bytes, then come the family's special tokens and its tags, then pieces of English that were learnt
from this project's own documents (scripts/make_smoke_pieces.py). Small vocabularies have no pieces and no tags.
"""

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from tokenspeed.frontend.family_text import FamilyText
from tokenspeed.frontend.token_bytes import byte_level_alphabet, byte_level_bytes
from tokenspeed.frontend.tokenizer import Tokenizer
from tokenspeed.frontend.tokenizer_bytes import FIRST_SPECIAL, ByteTokenizer
from tokenspeed.frontend.tokenizer_library import LibraryTokenizer

WITH_PIECES = 512
"""Tokens; a vocabulary of so many or more has pieces."""

PIECES = Path(__file__).parent / "smoke_pieces.txt"


class SmokeTokenizer(LibraryTokenizer):
    """A vocabulary of ``WITH_PIECES`` tokens.

    A model's may be larger; the ids beyond are shown as ``⟨id⟩``, because a model with random weights draws them all
    the time and a stream must have something to see.
    """

    def __init__(self, vocab_size: int, text: FamilyText) -> None:
        names = (*text.special, *text.tags)
        library = _library(names, text.special)
        super().__init__(library, byte_level_bytes, text.begin, text.end, surround=([FIRST_SPECIAL], []))
        self._shown = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._shown

    def token_bytes(self, token_id: int) -> bytes:
        return super().token_bytes(token_id) if token_id < WITH_PIECES else self.token_name(token_id).encode()

    def token_name(self, token_id: int) -> str:
        if token_id < WITH_PIECES:
            return super().token_name(token_id)
        return f"⟨{token_id}⟩" if token_id < self._shown else ""


def smoke_tokenizer(vocab_size: int, text: FamilyText) -> Tokenizer:
    """The tokenizer for a random model; raises TokenizerError where the vocabulary is too small for it."""
    if vocab_size < WITH_PIECES:
        return ByteTokenizer(vocab_size, text.special)
    return SmokeTokenizer(vocab_size, text)


def _library(names: tuple[str, ...], special: tuple[str, ...]) -> Library:
    tokens = [stand_in for _, stand_in in sorted((byte, chr(point)) for point, byte in byte_level_alphabet().items())]
    tokens += names
    merges = _pieces()[: WITH_PIECES - len(tokens)]
    tokens += [left + right for left, right in merges]
    library = Library(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=list(merges)))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    library.add_tokens([AddedToken(name, special=False, normalized=False) for name in names if name not in special])
    return library


@cache
def _pieces() -> tuple[tuple[str, str], ...]:
    """The merges, most frequent first, in the stand-in characters of byte-level vocabularies."""
    lines = PIECES.read_text("utf-8").splitlines()
    return tuple((left, right) for left, right in (line.split(" ") for line in lines))
