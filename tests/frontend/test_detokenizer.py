"""Text while it arrives: whole characters only, and nothing lost."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.frontend.detokenizer import IncrementalDetokenizer
from tokenspeed.frontend.text_assets import TextAssets
from tokenspeed.frontend.tokenizer import decode
from tokenspeed.frontend.tokenizer_bytes import ByteTokenizer

TOKENIZER = ByteTokenizer(300)
IDS = st.lists(st.integers(0, 310), max_size=40)


def pieces_of(ids: list[int], cuts: list[int], skip: bool = True) -> list[str]:
    """The text piece by piece, ``ids`` cut at the given places."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, skip)
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    pieces = [detokenizer.push(ids[start:end]) for start, end in pairwise(bounds)]
    return [*pieces, detokenizer.finish()]


@given(IDS, st.lists(st.integers(0, 50)), st.booleans())
def test_pieces_joined_equal_the_whole(ids: list[int], cuts: list[int], skip: bool) -> None:
    assert "".join(pieces_of(ids, cuts, skip)) == decode(TOKENIZER, ids, skip)


@given(st.text(max_size=20))
def test_no_piece_ends_inside_a_character(text: str) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    shown = ""
    for fed, token in enumerate(text.encode(), 1):
        shown += detokenizer.push_one(token)
        assert text.startswith(shown)
        assert detokenizer.holds_bytes == (len(shown.encode()) < fed)
    assert shown == text and detokenizer.finish() == ""


def test_an_emoji_is_held_until_whole() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    pieces = [detokenizer.push_one(token) for token in "a🙂b".encode()]
    assert pieces == ["a", "", "", "", "🙂", "b"]


def test_bytes_that_never_become_a_character_are_replaced() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert detokenizer.push([0xF0, 0x9F]) == "" and detokenizer.holds_bytes
    assert detokenizer.push([ord("a")]) == "\ufffda"
    assert detokenizer.push([0xE2]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_real_tokens_that_are_parts_of_characters(smollm2_text: TextAssets) -> None:
    tokenizer = smollm2_text.tokenizer
    text = "𝔘𝔫𝔦 🦜 ༀ 你好"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert any(b"\x80" <= tokenizer.token_bytes(i)[-1:] <= b"\xff" for i in ids)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push_one(i) for i in ids]
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    assert "" in pieces, "at least one token of these is half a character"
