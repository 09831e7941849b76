"""Tokenizers of SentencePiece files, against the library that the files are made for."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenspeed.frontend.detokenizer import IncrementalDetokenizer
from tokenspeed.frontend.sentencepiece_file import read_sentencepiece
from tokenspeed.frontend.tokenizer import TokenizerError, decode
from tokenspeed.frontend.tokenizer_folder import load_folder_tokenizer
from tokenspeed.frontend.tokenizer_gguf import build_gguf_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
WORDS = [
    "▁",
    "h",
    "i",
    "▁h",
    "▁hi",
    "你",
    "e",
    "l",
    "o",
    "lo",
    "el",
    "▁hel",
    "▁hello",
    "!",
    "a",
    "b",
    "ab",
    "ba",
    "aba",
]
PIECES = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    ("<tool>", 0.0, USER_DEFINED),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    *((word, -float(at), NORMAL) for at, word in enumerate(sorted(WORDS, key=len, reverse=True))),
]


def number(field: int, value: int) -> bytes:
    return bytes((*varint(field << 3), *varint(value)))


def varint(value: int) -> Iterator[int]:
    while value >= 0x80:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value


def message(field: int, content: bytes) -> bytes:
    return bytes((*varint(field << 3 | 2), *varint(len(content)))) + content


def model(kind: int, pieces: list[tuple[str, float, int]] = PIECES, *, trims: bool = False) -> bytes:
    """A model file, as the library writes it."""
    parts = [
        message(1, message(1, text.encode()) + b"\x15" + struct.pack("<f", score) + number(3, what))
        for text, score, what in pieces
    ]
    trainer = number(3, kind) + number(35, 1) + number(40, 0) + number(41, 1) + number(42, 2)
    return b"".join(parts) + message(2, trainer) + message(3, message(1, b"identity") + number(4, int(trims)))


def written(folder: Path, content: bytes, **config: Any) -> Path:
    (folder / "tokenizer.model").write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session", params=[(1, False), (1, True), (2, False), (2, True)], ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, trims = request.param
    made = tmp_path_factory.mktemp("pieces")
    return written(made, model(kind, trims=trims), legacy=False, add_bos_token=False)


@settings(max_examples=150, deadline=None)
@given(
    st.text(st.sampled_from("hi elo!ab 你好🙂\n "), max_size=30) | st.sampled_from([" hi", "<tool> hi", "hi  <tool>"])
)
@example("hello hi  ababa")
@example("  <tool>aba")
def test_equals_sentencepiece(folder: Path, text: str) -> None:
    library = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer = load_folder_tokenizer(folder)
    assert tokenizer.encode(text, add_special_tokens=True) == library.encode(text)


def test_bytes_stand_in_for_unknown_characters(folder: Path) -> None:
    tokenizer = load_folder_tokenizer(folder)
    ids = tokenizer.encode("hi é", add_special_tokens=False)
    assert [tokenizer.token_name(token) for token in ids] == ["▁hi", "▁", "<0xC3>", "<0xA9>"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push_one(token) for token in ids] == [" hi", " ", "", "é"]


def test_special_tokens_and_added_ones(tmp_path: Path) -> None:
    added = {str(len(PIECES)): {"content": "<|end|>", "special": True}, "1": {"content": "<s>", "special": True}}
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<extra>": len(PIECES) + 1}))
    written(tmp_path, model(2), eos_token="<|end|>", add_eos_token=True, added_tokens_decoder=added)
    tokenizer = load_folder_tokenizer(tmp_path)
    assert (tokenizer.bos_token, tokenizer.bos_token_id, tokenizer.eos_token) == ("<s>", 1, "<|end|>")
    ids = tokenizer.encode("hi<extra>", add_special_tokens=True)
    assert ids[0] == 1 and ids[-2:] == [len(PIECES) + 1, len(PIECES)]
    assert tokenizer.special_ids == {0, 1, 2, len(PIECES)}
    assert decode(tokenizer, ids) == " hi<extra>", "the first space belongs to what stands before"
    assert tokenizer.encode("<s>hi", add_special_tokens=True).count(1) == 1, "a begin token is not doubled"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"legacy": True}, ["<s>", "▁hi", "</s>", "▁hi"]),
        ({}, ["<s>", "▁hi", "</s>", "▁hi"]),
        ({"legacy": False}, ["<s>", "h", "i", "</s>", "h", "i"]),
        ({"legacy": False, "add_prefix_space": True}, ["<s>", "h", "i", "</s>", "h", "i"]),
        ({"legacy": True, "add_prefix_space": False}, ["<s>", "h", "i", "</s>", "h", "i"]),
    ],
)
def test_spaces_behind_special_tokens(tmp_path: Path, config: dict[str, Any], expected: list[str]) -> None:
    tokenizer = load_folder_tokenizer(written(tmp_path, model(2), **config))
    ids = tokenizer.encode("<s>hi</s>hi", add_special_tokens=False)
    assert [tokenizer.token_name(token) for token in ids] == expected


def test_the_same_pieces_out_of_a_gguf(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _, _ in PIECES],
        "tokenizer.ggml.scores": [score for _, score, _ in PIECES],
        "tokenizer.ggml.token_type": [kind for _, _, kind in PIECES],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    read, ours = load_folder_tokenizer(written(tmp_path, model(2))), build_gguf_tokenizer(metadata, "the file")
    for text in ("hello hi 你é", "<s>hi</s>hi<tool>", "  aba", ""):
        assert ours.encode(text, True) == read.encode(text, True)
        assert decode(ours, ours.encode(text, True)) == decode(read, read.encode(text, True))
    assert (ours.bos_token, ours.eos_token, ours.special_ids) == (read.bos_token, read.eos_token, read.special_ids)
    bare = build_gguf_tokenizer(metadata | {"tokenizer.ggml.add_space_prefix": False}, "the file")
    assert [bare.token_name(token) for token in bare.encode("hi", False)] == ["h", "i"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty one"),
        (b"\xff\xff", "no SentencePiece model"),
        (model(2)[:-3], "ends within a field"),
        (model(3), "unigram and bpe are read"),
        (model(2, [*PIECES, ("x", 0.0, 9)]), "no SentencePiece model"),
        (b"\x0b\x01", "wire type 3"),
        (b"\x80" * 11, "more than ten bytes"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    with pytest.raises(TokenizerError, match=rf"tokenizer\.model: .*{says}"):
        load_folder_tokenizer(written(tmp_path, content))


@pytest.mark.parametrize(
    "added", [{"7": {"content": "other"}}, {str(len(PIECES) + 4): {"content": "far"}}, {"x": 1}, {"1": {}}]
)
def test_added_tokens_that_make_no_sense_are_named(tmp_path: Path, added: Any) -> None:
    with pytest.raises(TokenizerError):
        load_folder_tokenizer(written(tmp_path, model(2), added_tokens_decoder=added))


def test_what_the_file_says(tmp_path: Path) -> None:
    read = read_sentencepiece(written(tmp_path, model(1, trims=True)) / "tokenizer.model")
    assert (read.kind, read.unknown, read.begin, read.end, read.trims, read.dummy_prefix) == (
        "unigram",
        0,
        1,
        2,
        True,
        True,
    )
    assert len(read.pieces) == len(PIECES) and read.characters == b""
