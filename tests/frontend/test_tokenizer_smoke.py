"""The vocabulary of random models: bytes, the family's tokens, pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.frontend.family_text import FAMILY_TEXTS, PLAIN, family_text
from tokenspeed.frontend.text_assets import load_text_assets
from tokenspeed.frontend.tokenizer import TokenizerError, decode
from tokenspeed.frontend.tokenizer_bytes import ByteTokenizer
from tokenspeed.frontend.tokenizer_smoke import PIECES, SmokeTokenizer, smoke_tokenizer
from tokenspeed.recipes.resolved import ModelSource


@pytest.mark.parametrize("architecture", [*FAMILY_TEXTS, "llama"])
def test_a_familys_vocabulary(architecture: str) -> None:
    text = family_text(architecture)
    tokenizer = smoke_tokenizer(512, text)
    names = [tokenizer.token_name(at) for at in range(512)]
    assert all(names) and len(set(names)) == 512, "every id that a model may draw has a text"
    assert names[256 : 256 + len(text.special)] == list(text.special)
    assert tokenizer.special_ids == set(range(256, 256 + len(text.special)))
    assert (tokenizer.bos_token_id, tokenizer.bos_token, tokenizer.eos_token) == (256, text.begin, text.end)
    for name in (*text.special, *text.tags):
        assert len(tokenizer.encode(name, add_special_tokens=False)) == 1


def test_pieces_are_learnt_and_tags_are_text() -> None:
    tokenizer = smoke_tokenizer(512, family_text("qwen3"))
    said = "<|im_start|>user\nthe scheduler<think>"
    ids = tokenizer.encode(said, add_special_tokens=True)
    assert ids[0] == 256 and len(ids) < len(said) - 20
    assert decode(tokenizer, ids) == "user\nthe scheduler<think>"
    assert tokenizer.encode("é", add_special_tokens=False) == [0xC3, 0xA9], "ids below 256 are bytes"


@given(st.text(max_size=40))
def test_round_trip(text: str) -> None:
    tokenizer = smoke_tokenizer(512, PLAIN)
    assert decode(tokenizer, tokenizer.encode(text, False), skip_special_tokens=False) == text


def test_a_larger_vocabulary_shows_its_ids() -> None:
    tokenizer = smoke_tokenizer(600, PLAIN)
    assert isinstance(tokenizer, SmokeTokenizer) and tokenizer.vocab_size == 600
    assert decode(tokenizer, [104, 599, 600]) == "h⟨599⟩"


def test_a_small_vocabulary_has_bytes_and_the_familys_tokens() -> None:
    text = family_text("kimi_k25")
    tokenizer = smoke_tokenizer(300, text)
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("<|im_user|>x", add_special_tokens=False) == [256 + text.special.index("<|im_user|>"), 120]
    with pytest.raises(TokenizerError, match="at least 268"):
        smoke_tokenizer(267, text)


def test_the_pieces_are_enough_for_every_family() -> None:
    most = 256 - min(len(text.special) + len(text.tags) for text in [PLAIN, *FAMILY_TEXTS.values()])
    assert len(PIECES.read_text("utf-8").splitlines()) >= most


def test_a_model_inside_another_is_found() -> None:
    config = '{"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {"vocab_size": 512}}'
    assets = load_text_assets(ModelSource(kind="random", random_config=config))
    assert assets.tokenizer.eos_token == "[EOS]" and "tool_declare" in assets.chat_template
