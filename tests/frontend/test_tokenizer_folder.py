"""Tokenizers of model folders, and the built-in byte tokenizer."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tokenspeed.frontend.family_text import WITHOUT_TEMPLATE, family_text
from tokenspeed.frontend.text_assets import folder_chat_template, load_text_assets
from tokenspeed.frontend.token_bytes import byte_level_alphabet, byte_level_bytes
from tokenspeed.frontend.tokenizer import TokenizerError, decode
from tokenspeed.frontend.tokenizer_bytes import ByteTokenizer
from tokenspeed.frontend.tokenizer_folder import load_folder_tokenizer
from tokenspeed.recipes.model_config import ARCHITECTURES
from tokenspeed.recipes.resolved import ModelSource

CORPUS = ["the quick brown fox jumps over the lazy dog", "naïve café 你好", "hello hello world"] * 4


def byte_level(folder: Path, **config: object) -> Path:
    """A folder as most models ship it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool｜call>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16)
    return written(folder, tokenizer, bos_token="<s>", eos_token={"content": "</s>"}, **config)


def word_pieces(folder: Path) -> Path:
    """A folder as SentencePiece models ship it: U+2581 for spaces, bytes as a fallback."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi", "你"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: at for at, piece in enumerate(pieces)},
            merges=[("▁", "h"), ("▁h", "i")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return written(folder, tokenizer, bos_token="<s>", eos_token="</s>")


def written(folder: Path, tokenizer: Tokenizer, **config: object) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_byte_level_folder(tmp_path: Path) -> None:
    tokenizer = load_folder_tokenizer(byte_level(tmp_path))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.bos_token_id) == ("<s>", "</s>", 0)
    assert tokenizer.special_ids == {0, 1}
    text = "the naïve 🙂 fox" * 20
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids[0] == 0 and len(ids) > 16, "nothing is cut and nothing is padded"
    assert decode(tokenizer, ids) == text
    assert tokenizer.encode("<s>" + text, add_special_tokens=True) == ids, "the begin token is not doubled"
    added = tokenizer.encode("<tool｜call>", add_special_tokens=False)
    assert len(added) == 1 and decode(tokenizer, added) == "<tool｜call>"
    assert tokenizer.token_name(0) == "<s>" and tokenizer.token_name(10**6) == "" == tokenizer.token_name(-1)
    assert tokenizer.token_bytes(10**6) == b""


@given(st.text(max_size=40))
def test_byte_level_round_trip(byte_level_folder: Path, text: str) -> None:
    tokenizer = load_folder_tokenizer(byte_level_folder)
    assert decode(tokenizer, tokenizer.encode(text, False), skip_special_tokens=False) == text


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("byte-level"))


def test_word_piece_folder(tmp_path: Path) -> None:
    tokenizer = load_folder_tokenizer(word_pieces(tmp_path))
    ids = tokenizer.encode("hi 你é hi", add_special_tokens=False)
    assert decode(tokenizer, ids) == " hi 你é hi", "the first space belongs to what stands before"
    assert [tokenizer.token_bytes(i) for i in ids if tokenizer.token_name(i).startswith("<0x")] == [b"\xc3", b"\xa9"]


def test_other_decoders_are_refused_by_name(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        load_folder_tokenizer(written(tmp_path, tokenizer))


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json, tiktoken\.model, tokenizer\.model\. Copy"):
        load_folder_tokenizer(tmp_path)
    (tmp_path / "qwen.tiktoken").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"qwen\.tiktoken is there"):
        load_folder_tokenizer(tmp_path)
    for text in ("{", "[]", '{"decoder": null}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
            load_folder_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        (None, ""),
        ("plain", "plain"),
        ([{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}], "yes"),
    ],
)
def test_where_the_template_comes_from(tmp_path: Path, entry: object, found: str) -> None:
    byte_level(tmp_path, chat_template=entry)
    assert load_text_assets(ModelSource(kind="folder", path=str(tmp_path))).chat_template == found
    (tmp_path / "chat_template.jinja").write_text("file wins")
    assert folder_chat_template(tmp_path) == "file wins"


def test_a_template_of_ours_where_checkpoints_bring_an_encoder(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert folder_chat_template(tmp_path) == ""
    for name in WITHOUT_TEMPLATE:
        if name in ARCHITECTURES.values():
            (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
            assert folder_chat_template(tmp_path) == family_text(name).chat_template()
    (tmp_path / "chat_template.jinja").write_text("its own wins")
    assert folder_chat_template(tmp_path) == "its own wins"


@pytest.mark.parametrize("entry", [[{"name": "rag", "template": "x"}], [1], 7])
def test_a_template_entry_that_makes_no_sense_is_named(tmp_path: Path, entry: object) -> None:
    byte_level(tmp_path, chat_template=entry)
    with pytest.raises(TokenizerError, match="chat_template"):
        folder_chat_template(tmp_path)


@given(st.text(max_size=40))
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer(300)
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids[0] == 256 and ids[1:] == list(text.encode())
    assert decode(tokenizer, ids) == text


def test_bytes_of_a_token() -> None:
    assert byte_level_bytes("ĠhÃ©") == " hé".encode()
    assert byte_level_bytes("你") == "你".encode(), "what is outside the alphabet stands for itself"
    assert sorted(byte_level_bytes(chr(point))[0] for point in byte_level_alphabet()) == list(range(256))


def test_byte_tokenizer() -> None:
    tokenizer = ByteTokenizer(300)
    assert tokenizer.encode("<|im_start|>é<|im_end|>x", add_special_tokens=False) == [258, 0xC3, 0xA9, 259, 120]
    assert tokenizer.encode("<|bos|>x", add_special_tokens=True) == [256, 120]
    assert decode(tokenizer, [258, 104, 259, 105, 299, 300]) == "hi⟨299⟩"
    assert [tokenizer.token_name(i) for i in (-1, 0, 257, 299, 300)] == ["", "<0x00>", "<|eos|>", "⟨299⟩", ""]
    with pytest.raises(TokenizerError, match="at least 260"):
        ByteTokenizer(259)


def test_a_random_model_without_a_vocabulary_is_named() -> None:
    with pytest.raises(TokenizerError, match="vocab_size"):
        load_text_assets(ModelSource(kind="random", random_config="{}"))
