"""Builds the tokenizer of a model folder that has a SentencePiece file and no tokenizer.json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import Tokenizer as Library

from tokenspeed.frontend.rank_merges import merges_of
from tokenspeed.frontend.sentencepiece_file import PieceKind, SentencePieceModel, read_sentencepiece
from tokenspeed.frontend.token_bytes import word_piece_bytes
from tokenspeed.frontend.tokenizer import TokenizerError
from tokenspeed.frontend.tokenizer_library import LibraryTokenizer, read_json, token_text

_SPACE = "\u2581"


def load_sentencepiece(path: Path, config: Mapping[str, Any]) -> LibraryTokenizer:
    """Returns the tokenizer.

    Args:
        path: the .model file; added_tokens.json may lie beside it.
        config: what tokenizer_config.json says: bos_token, eos_token, add_bos_token (true unless it says otherwise),
            add_eos_token, added_tokens_decoder, add_prefix_space, and ``legacy``: whether each text between two special
            tokens is taken by itself and gets a space in front, as in the first readings of Llama's tokenizer; true
            unless it says otherwise.

    Raises:
        TokenizerError: the file is damaged, or its parts do not fit together.
    """
    model = read_sentencepiece(path)
    asked = config.get("add_prefix_space")
    return build_from_pieces(
        model,
        str(path),
        _added(model, path, config),
        ends=(token_text(config.get("bos_token")), token_text(config.get("eos_token"))),
        adds=(bool(config.get("add_bos_token", True)), bool(config.get("add_eos_token", False))),
        prefix=model.dummy_prefix if asked is None else bool(asked),
        legacy=config.get("legacy", True) is not False,
    )


def build_from_pieces(
    model: SentencePieceModel,
    origin: str,
    added: Sequence[AddedToken],
    *,
    ends: tuple[str, str],
    adds: tuple[bool, bool],
    prefix: bool,
    legacy: bool,
) -> LibraryTokenizer:
    """Returns the tokenizer of ``model``.

    Args:
        model: pieces and what is done to characters.
        origin: the file's name, for messages.
        added: tokens that are looked for before all else, by id.
        ends: the tokens that begin and end a text; where "" is given, the model's own.
        adds: whether ``add_special_tokens`` puts them around a text.
        prefix, legacy: whether a text gets a space in front, and each part between special tokens too.

    Raises:
        TokenizerError: the pieces do not make a tokenizer.
    """
    library = _library(model, origin)
    spaces = _Spaces(model, prefix=prefix, special=[token.content for token in added if token.special])
    library.normalizer = spaces.normalizer(of_parts=legacy)
    library.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for token in added:
        library.add_tokens([token])
    begin, end = (given or _named(model, own) for given, own in zip(ends, (model.begin, model.end), strict=True))
    around = [
        [at] if wanted and name and (at := library.token_to_id(name)) is not None else []
        for name, wanted in zip((begin, end), adds, strict=True)
    ]
    return LibraryTokenizer(
        library,
        word_piece_bytes,
        begin,
        end,
        surround=(around[0], around[1]),
        prepare=None if legacy else spaces.prepare,
    )


def own_tokens(model: SentencePieceModel) -> dict[int, tuple[str, bool]]:
    """The pieces that are looked for before all else, by id, and whether they steer: control and user-defined ones."""
    return {
        at: (piece.text, piece.kind != PieceKind.USER_DEFINED)
        for at, piece in enumerate(model.pieces)
        if piece.kind in (PieceKind.CONTROL, PieceKind.UNKNOWN, PieceKind.USER_DEFINED)
    }


def added_tokens(found: Mapping[int, tuple[str, bool]]) -> list[AddedToken]:
    """The library's form of own_tokens, by id."""
    return [AddedToken(text, special=steers, normalized=False) for _, (text, steers) in sorted(found.items())]


class _Spaces:
    """What a model does to characters and spaces: normalise, trim, put a space in front."""

    def __init__(self, model: SentencePieceModel, *, prefix: bool, special: Sequence[str]) -> None:
        self._special = tuple(special)
        self._prefix = prefix
        self._steps: list[Any] = [normalizers.Precompiled(model.characters)] if model.characters else []
        if model.trims:
            self._steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        self._whole = normalizers.Sequence(self._steps)

    def normalizer(self, *, of_parts: bool) -> Any:
        """For what stands between special tokens: all of it ``of_parts``, else the marks of spaces alone."""
        own = [*self._steps, *([normalizers.Prepend(_SPACE)] if self._prefix else [])] if of_parts else []
        return normalizers.Sequence([*own, normalizers.Replace(" ", _SPACE)])

    def prepare(self, text: str) -> str:
        """The same for a whole text; none is put in front of a special token."""
        text = self._whole.normalize_str(text)
        return f" {text}" if text and self._prefix and not text.startswith(self._special) else text


def _library(model: SentencePieceModel, origin: str) -> Library:
    bytes_too = any(piece.kind == PieceKind.BYTE for piece in model.pieces)
    texts = [piece.text for piece in model.pieces]
    try:
        if model.kind == "unigram":
            scored = [(piece.text, piece.score) for piece in model.pieces]
            return Library(models.Unigram(scored, unk_id=max(model.unknown, 0), byte_fallback=bytes_too))
        ranked = sorted(
            (piece for piece in model.pieces if piece.kind == PieceKind.NORMAL), key=lambda piece: -piece.score
        )
        known = frozenset(piece.text for piece in ranked)
        return Library(
            models.BPE(
                vocab={text: at for at, text in enumerate(texts)},
                merges=merges_of([piece.text for piece in ranked], known),
                unk_token=texts[model.unknown] if model.unknown >= 0 else None,
                fuse_unk=True,
                byte_fallback=bytes_too,
            )
        )
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{origin}: pieces do not make a tokenizer: {error}") from error


def _added(model: SentencePieceModel, path: Path, config: Mapping[str, Any]) -> list[AddedToken]:
    """Control and user-defined pieces, then what other files add behind the vocabulary, by id."""
    found = own_tokens(model)
    beside = path.parent / "added_tokens.json"
    more = {int(at): (str(text), False) for text, at in read_json(beside).items()} if beside.is_file() else {}
    try:
        for at, entry in (config.get("added_tokens_decoder") or {}).items():
            more[int(at)] = (str(entry["content"]), bool(entry.get("special", False)))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise TokenizerError(f"{path.parent / 'tokenizer_config.json'}: added_tokens_decoder: {error!r}") from error
    behind = sorted(at for at in more if at >= len(model.pieces))
    if behind != list(range(len(model.pieces), len(model.pieces) + len(behind))):
        raise TokenizerError(
            f"{path.parent}: added tokens have the ids {behind}, the vocabulary {len(model.pieces)} tokens"
        )
    for at, (text, steers) in more.items():
        if at < len(model.pieces) and model.pieces[at].text != text:
            raise TokenizerError(
                f"{path}: token {at} is {model.pieces[at].text!r} here and {text!r} in tokenizer_config.json: "
                "the files do not belong together"
            )
        found[at] = (text, steers)
    return added_tokens(found)


def _named(model: SentencePieceModel, at: int) -> str:
    return model.pieces[at].text if 0 <= at < len(model.pieces) else ""
