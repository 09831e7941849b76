"""The tokenizer inside a GGUF, against the library that everybody trains with."""

import dataclasses
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from tokenspeed.frontend.text_assets import TextAssets, load_text_assets
from tokenspeed.frontend.tokenizer import TokenizerError, decode
from tokenspeed.frontend.tokenizer_gguf import build_gguf_tokenizer
from tokenspeed.frontend.tokenizer_library import LibraryTokenizer
from tokenspeed.recipes.gguf_file import read_gguf_header
from tokenspeed.recipes.resolved import ModelSource

TEXTS = [
    "Hello, world!",
    "  leading, trailing  ",
    "tabs\tand\n\nnew lines \r\n mixed   spaces",
    "numbers 1 22 333 4444 and 3.14159, 1e-9, ½ ²",
    "don't won't I'LL they'Ve",
    "def f(x):\n    return {'a': x ** 2}  # comment\n",
    "Grüße aus Köln, naïve café, ẞ",
    "你好，世界。日本語のテキスト 한국어",
    "🙂👍🏽👩‍👩‍👧‍👦 emoji",
    "مرحبا بالعالم שלום",
    "e\u0301 decomposed, é composed",
    "<|im_start|>user\nhi<|im_end|>",
    "<|im_start|> spelled <|endoftext|> out",
    "\x00\x07 control \x7f",
    "",
    "a" * 300,
]


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    """transformers' reading of the same file, with the pre-tokenizer that the file names (it leaves the digits out)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_equals_transformers(smollm2_text: TextAssets, reference: Any, text: str) -> None:
    ids = smollm2_text.tokenizer.encode(text, add_special_tokens=True)
    assert ids == reference.encode(text)
    assert decode(smollm2_text.tokenizer, ids) == reference.decode(ids, skip_special_tokens=True)
    assert decode(smollm2_text.tokenizer, ids, skip_special_tokens=False) == text


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_equals_transformers_on_any_text(smollm2_text: TextAssets, reference: Any, text: str) -> None:
    ids = smollm2_text.tokenizer.encode(text, add_special_tokens=True)
    assert ids == reference.encode(text)
    # not always the text itself: this vocabulary has no token for the byte 0xF1, and so on, of unassigned planes
    assert decode(smollm2_text.tokenizer, ids, skip_special_tokens=False) == reference.decode(ids)


def test_digits_stand_alone(smollm2_text: TextAssets) -> None:
    ids = smollm2_text.tokenizer.encode("x  12", add_special_tokens=False)
    names = [smollm2_text.tokenizer.token_name(i) for i in ids]
    assert names == ["x", "ĠĠ", "1", "2"]


def test_special_tokens_and_template(smollm2_text: TextAssets) -> None:
    tokenizer = smollm2_text.tokenizer
    assert (tokenizer.bos_token, tokenizer.bos_token_id, tokenizer.eos_token) == ("<|im_start|>", 1, "<|im_end|>")
    assert tokenizer.vocab_size == 49152
    assert {0, 1, 2} <= tokenizer.special_ids and len(tokenizer.special_ids) == 17
    assert "<|im_start|>" in smollm2_text.chat_template


@pytest.fixture(scope="module")
def metadata(smollm2: Path) -> dict[str, Any]:
    return dict(read_gguf_header(smollm2).metadata)


WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "qwen2": WORDS + r"\p{N}" + REST,
    "llama-bpe": WORDS + r"\p{N}{1,3}" + REST,
}
"""The expressions that these names stand for, to be run by another engine than the library's."""


@pytest.fixture(scope="module")
def built(metadata: dict[str, Any]) -> dict[str, LibraryTokenizer]:
    """The vocabulary of the file behind each pre-tokenizer."""
    names = [*PATTERNS, "llama3"]
    return {name: build_gguf_tokenizer(metadata | {"tokenizer.ggml.pre": name}, "the file") for name in names}


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="aZé你'sLlrev 12½٣\n\r\t\u3000.,!_🙂\u0301", max_size=30))
@example("I'LL be\n\n  back  12345")
@example("x\r\n\t y ½ naïve don't")
def test_other_pre_tokenizers(built: dict[str, LibraryTokenizer], text: str) -> None:
    for name, pattern in PATTERNS.items():
        words = regex.findall(pattern, text)
        assert "".join(words) == text
        ids = built[name].encode(text, False)
        if name != "qwen2" or unicodedata.is_normalized("NFC", text):
            pieces = built[name]._library.pre_tokenizer.pre_tokenize_str(text)
            assert [text[start:end] for _, (start, end) in pieces] == words
            assert decode(built[name], ids) == text
    assert built["llama3"].encode(text, False) == built["llama-bpe"].encode(text, False)


def test_qwen2_composes_characters(metadata: dict[str, Any]) -> None:
    tokenizer = build_gguf_tokenizer(metadata | {"tokenizer.ggml.pre": "qwen2"}, "the file")
    assert tokenizer.encode("e\u0301", add_special_tokens=False) == tokenizer.encode("é", add_special_tokens=False)


@pytest.mark.parametrize(
    ("changes", "begins", "ends"),
    [
        ({"tokenizer.ggml.add_bos_token": True}, [1], []),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [1], [2]),
        ({"tokenizer.ggml.add_bos_token": False}, [], []),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": None}, [1], []),
    ],
)
def test_what_surrounds_a_text(
    metadata: dict[str, Any], changes: dict[str, Any], begins: list[int], ends: list[int]
) -> None:
    merged = {key: value for key, value in (metadata | changes).items() if value is not None}
    tokenizer = build_gguf_tokenizer(merged, "the file")
    bare = tokenizer.encode("Hi", add_special_tokens=False)
    assert tokenizer.encode("Hi", add_special_tokens=True) == [*begins, *bare, *ends]
    if begins:
        assert tokenizer.encode("<|im_start|>Hi", add_special_tokens=True)[:2] == [1, bare[0]]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not read"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores has not one number"),
        (
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.scores": [0.0] * 49152,
                "tokenizer.ggml.token_type": [9] * 49152,
            },
            "tokenizer.ggml.token_type: 9",
        ),
        ({"tokenizer.ggml.pre": "falcon"}, "'falcon' is not known"),
        ({"tokenizer.ggml.pre": None}, "'' is not known"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.merges": ["ab"]}, "'ab' is no pair"),
        ({"tokenizer.ggml.merges": ["qq 1z"]}, "do not fit together"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "49152 tokens, but 2 token types"),
        ({"tokenizer.ggml.bos_token_id": 49152}, "outside the vocabulary of 49152"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(metadata: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    merged = {key: value for key, value in (metadata | changes).items() if value is not None}
    with pytest.raises(TokenizerError, match=says) as raised:
        build_gguf_tokenizer(merged, "the file")
    assert "the file" in str(raised.value)


def test_user_defined_tokens_are_text_and_unused_ones_are_not_matched(metadata: dict[str, Any]) -> None:
    tokens, types = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])
    at, unused = len(tokens), len(tokens) + 1
    merged = metadata | {
        "tokenizer.ggml.tokens": [*tokens, "<tool>", "[PAD]"],
        "tokenizer.ggml.token_type": [*types, 4, 5],
    }
    tokenizer = build_gguf_tokenizer(merged, "the file")
    assert at in tokenizer.encode("a<tool>b", add_special_tokens=False) and at not in tokenizer.special_ids
    assert unused not in tokenizer.encode("[PAD]", add_special_tokens=False)
    assert decode(tokenizer, [at]) == "<tool>"


def test_llama_bpe_takes_a_word_that_is_a_token_whole(metadata: dict[str, Any]) -> None:
    merged = metadata | {
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], "qzxjk"],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 1],
    }
    encoded = {
        name: build_gguf_tokenizer(merged | {"tokenizer.ggml.pre": name}, "the file").encode("qzxjk", False)
        for name in ("llama-bpe", "gpt-2")
    }
    assert encoded["llama-bpe"] == [49152] and len(encoded["gpt-2"]) > 1, "no merge leads to it"


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(TokenizerError, match=r"model\.gguf"):
        load_text_assets(ModelSource(kind="gguf", path=str(path)))


def test_text_assets_are_plain_data(smollm2_text: TextAssets) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        smollm2_text.chat_template = ""  # type: ignore[misc]
