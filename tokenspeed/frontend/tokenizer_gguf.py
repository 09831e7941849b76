"""Builds the tokenizer that a GGUF file describes: byte-level BPE, or SentencePiece's pieces."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from tokenspeed.frontend.sentencepiece_file import Piece, PieceKind, SentencePieceModel
from tokenspeed.frontend.token_bytes import byte_level_bytes
from tokenspeed.frontend.tokenizer import TokenizerError
from tokenspeed.frontend.tokenizer_library import LibraryTokenizer
from tokenspeed.frontend.tokenizer_sentencepiece import added_tokens, build_from_pieces, own_tokens

_CONTROL, _USER_DEFINED = 3, 4

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _WORDS + r"\p{N}" + _REST
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST

_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}


def build_gguf_tokenizer(metadata: Mapping[str, Any], origin: str) -> LibraryTokenizer:
    """Returns the tokenizer that ``metadata`` describes.

    Args:
        metadata: the file's own keys and values.
        origin: the file's name, for messages.

    Raises:
        TokenizerError: a part is missing or contradicts another, or the model or pre-tokenizer is not known here.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        return _from_pieces(metadata, origin)
    if kind != "gpt2":
        raise TokenizerError(
            f"{origin}: the tokenizer model {kind!r} is not read; 'gpt2' (byte-level BPE) and 'llama' (SentencePiece) "
            "are. Serve the model's folder with its tokenizer.json instead"
        )
    name = str(metadata.get("tokenizer.ggml.pre", ""))
    name = _ALIASES.get(name, name)
    tokens = _array(metadata, "tokenizer.ggml.tokens", origin)
    types = _types(metadata, tokens, origin)
    library = _library(name, tokens, _merges(metadata, origin), origin)
    library.add_tokens(_added(tokens, types, _USER_DEFINED))
    library.add_special_tokens(_added(tokens, types, _CONTROL))
    begin = _token_id(metadata, "tokenizer.ggml.bos_token_id", tokens, origin)
    end = _token_id(metadata, "tokenizer.ggml.eos_token_id", tokens, origin)
    adds_begin = bool(metadata.get("tokenizer.ggml.add_bos_token", name == "llama-bpe"))
    adds_end = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    return LibraryTokenizer(
        library,
        byte_level_bytes,
        bos_token="" if begin is None else tokens[begin],
        eos_token="" if end is None else tokens[end],
        surround=(
            [begin] if adds_begin and begin is not None else [],
            [end] if adds_end and end is not None else [],
        ),
    )


def _from_pieces(metadata: Mapping[str, Any], origin: str) -> LibraryTokenizer:
    """SentencePiece's pieces with their scores; a space stands in front of each text between two special tokens."""
    tokens = _array(metadata, "tokenizer.ggml.tokens", origin)
    types = _types(metadata, tokens, origin)
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise TokenizerError(f"{origin}: tokenizer.ggml.scores has not one number for each of {len(tokens)} tokens")
    try:
        pieces = [Piece(*each) for each in zip(tokens, map(float, scores), map(PieceKind, types), strict=True)]
    except ValueError as error:
        raise TokenizerError(f"{origin}: tokenizer.ggml.token_type: {error}") from error
    ids = {
        name: _token_id(metadata, f"tokenizer.ggml.{name}_token_id", tokens, origin)
        for name in ("unknown", "bos", "eos")
    }
    unknown, begin, end = (-1 if at is None else at for at in ids.values())
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    model = SentencePieceModel(
        pieces=pieces,
        kind="bpe",
        unknown=unknown,
        begin=begin,
        end=end,
        characters=b"",
        dummy_prefix=prefix,
        trims=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
    )
    return build_from_pieces(
        model,
        origin,
        added_tokens(own_tokens(model)),
        ends=("", ""),
        adds=(
            bool(metadata.get("tokenizer.ggml.add_bos_token", True)),
            bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        ),
        prefix=prefix,
        legacy=True,
    )


def _types(metadata: Mapping[str, Any], tokens: list[str], origin: str) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise TokenizerError(f"{origin}: {len(tokens)} tokens, but {len(types)} token types: the file is damaged")
    return list(types)


def _library(name: str, tokens: list[str], merges: list[tuple[str, str]], origin: str) -> Library:
    """The byte-level BPE model behind the pre-tokenizer ``name``."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splitters: dict[str, list[Any]] = {
        "gpt-2": [byte_level],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), byte_level],
        "qwen2": [pre_tokenizers.Split(Regex(_QWEN2), "isolated"), bytes_only],
        "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), bytes_only],
    }
    if name not in splitters:
        raise TokenizerError(
            f"{origin}: the pre-tokenizer {name!r} is not known; {', '.join(sorted(splitters))} are. "
            "Serve the model's folder with its tokenizer.json instead"
        )
    try:
        model = models.BPE(
            vocab={token: at for at, token in enumerate(tokens)}, merges=merges, ignore_merges=name == "llama-bpe"
        )
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{origin}: merges and tokens do not fit together: {error}") from error
    library = Library(model)
    if name == "qwen2":
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence(splitters[name])
    library.decoder = decoders.ByteLevel()
    return library


def _added(tokens: list[str], types: list[int], wanted: int) -> list[AddedToken]:
    return [
        AddedToken(token, special=wanted == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == wanted
    ]


def _array(metadata: Mapping[str, Any], key: str, origin: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise TokenizerError(f"{origin}: {key} is missing or no list of strings: the file holds no usable tokenizer")
    return value


def _merges(metadata: Mapping[str, Any], origin: str) -> list[tuple[str, str]]:
    pairs = []
    for merge in _array(metadata, "tokenizer.ggml.merges", origin):
        left, space, right = merge.partition(" ")
        if not space:
            raise TokenizerError(f"{origin}: the merge {merge!r} is no pair: the file is damaged")
        pairs.append((left, right))
    return pairs


def _token_id(metadata: Mapping[str, Any], key: str, tokens: list[str], origin: str) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        raise TokenizerError(f"{origin}: {key} is {value!r}, outside the vocabulary of {len(tokens)}")
    return value
