"""Reads tiktoken files: a vocabulary of byte strings in the order in which they merge, one a line, in base64.

The file does not say how text is split into words before that; it stands in the code beside it, which is never run.
Kimi's way is known.
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from tokenspeed.frontend.rank_merges import merges_of
from tokenspeed.frontend.token_bytes import byte_level_alphabet, byte_level_bytes
from tokenspeed.frontend.tokenizer import TokenizerError
from tokenspeed.frontend.tokenizer_library import LibraryTokenizer, token_text

_LETTERS = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_UPPER, _LOWER = rf"[\p{{Lu}}\p{{Lt}}{_LETTERS}]", rf"[\p{{Ll}}{_LETTERS}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_WORDS = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Runs of Chinese characters, words with a change of case and an English ending, three digits, marks, lines, spaces."""

KIMI_SPECIAL = 256
"""Ids behind the vocabulary that are special tokens; those without a name are reserved."""


def load_tiktoken(path: Path, config: Mapping[str, Any]) -> LibraryTokenizer:
    """Returns the tokenizer of a model folder of Kimi's.

    Args:
        path: tiktoken.model.
        config: what tokenizer_config.json says; its added_tokens_decoder names the special tokens.

    Raises:
        TokenizerError: the file is damaged, or not Kimi's.
    """
    if not _is_kimi(config):
        raise TokenizerError(
            f"{path}: how this model splits text into words stands in its own code, which is never run; known is "
            "Kimi's way. Add a tokenizer.json to the folder"
        )
    tokens = read_ranks(path)
    stand_ins = {byte: chr(point) for point, byte in byte_level_alphabet().items()}
    ranked = ["".join(stand_ins[byte] for byte in token) for token in tokens]
    vocabulary = {token: at for at, token in enumerate(ranked)}
    merges = merges_of(ranked, frozenset(ranked))
    library = Library(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KIMI_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    library.add_tokens(_special(config, len(ranked), path))
    begin, end = token_text(config.get("bos_token")), token_text(config.get("eos_token"))
    return LibraryTokenizer(library, byte_level_bytes, begin, end, surround=([], []))


def read_ranks(path: Path) -> list[bytes]:
    """Returns the byte strings of a tiktoken file, by rank; TokenizerError names the line that makes no sense."""
    found: dict[int, bytes] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TokenizerError(f"{path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            found[int(rank)] = base64.b64decode(token, validate=True)
        except ValueError as error:
            raise TokenizerError(f"{path}, line {number}: not a token in base64 and its rank ({error})") from error
    tokens = [found[rank] for rank in sorted(found)]
    if sorted(found) != list(range(len(tokens))) or len(set(tokens)) != len(tokens):
        raise TokenizerError(f"{path}: ranks are not 0, 1, 2 ... with a token each: the file is damaged")
    if not {bytes((byte,)) for byte in range(256)} <= set(tokens):
        raise TokenizerError(f"{path}: not every byte is a token: the file is damaged")
    return tokens


def _is_kimi(config: Mapping[str, Any]) -> bool:
    code = (config.get("auto_map") or {}).get("AutoTokenizer") or ""
    return "tokenization_kimi" in str(code) or config.get("tokenizer_class") == "TikTokenTokenizer"


def _special(config: Mapping[str, Any], first: int, path: Path) -> list[AddedToken]:
    """The tokens behind the vocabulary, in order; what is not marked as special is text that a client may want."""
    try:
        named = {int(at): entry for at, entry in (config.get("added_tokens_decoder") or {}).items()}
        texts = {at: str(entry["content"]) for at, entry in named.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TokenizerError(f"{path.parent / 'tokenizer_config.json'}: added_tokens_decoder: {error!r}") from error
    if any(at < first for at in texts):
        raise TokenizerError(
            f"{path}: tokenizer_config.json names a special token with id {min(texts)}, which is one of the {first} of "
            "the vocabulary: the files do not belong together"
        )
    ends = max(first + KIMI_SPECIAL, *(at + 1 for at in texts), first)
    return [
        AddedToken(
            texts.get(at, f"<|reserved_token_{at}|>"),
            special=bool(named[at].get("special", True)) if at in named else True,
            normalized=False,
        )
        for at in range(first, ends)
    ]
