"""One choice: text, tokens, log-probabilities and count always tell the same story."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from tokenspeed.frontend.choice import Choice
from tokenspeed.frontend.parsing.parser import AnswerParser, Parsing
from tokenspeed.frontend.parsing.parts import put_together
from tokenspeed.frontend.request import Delta
from tokenspeed.frontend.tokenizer import decode
from tokenspeed.frontend.tokenizer_bytes import ByteTokenizer
from tokenspeed.messages import RequestOutput, TokenLogprobs

TOKENIZER = ByteTokenizer(300)
EOS = 257


def run(
    tokens: list[int],
    cuts: list[int] = [],  # noqa: B006
    *,
    stop: list[str] = [],  # noqa: B006
    min_tokens: int = 0,
    include_stop: bool = False,
    ends: bool = True,
    parser: AnswerParser | None = None,
) -> tuple[Choice, list[Delta]]:
    """Feeds ``tokens`` in rounds cut at ``cuts``; the last round ends the choice, by EOS or by length."""
    choice = Choice(
        0,
        TOKENIZER,
        stop=stop,
        min_tokens=min_tokens,
        include_stop=include_stop,
        skip_special_tokens=True,
        parser=parser,
    )
    everything = [*tokens, EOS] if ends else tokens
    bounds = sorted({0, len(everything), *(min(cut, len(everything)) for cut in cuts)})
    deltas = []
    for start, end in pairwise(bounds):
        last = end == len(everything)
        output = RequestOutput(
            handle=1,
            token_ids=everything[start:end],
            logprobs=[TokenLogprobs(token, -1.0, [], []) for token in everything[start:end]],
            finish_reason=("stop" if ends else "length") if last else None,
            stop_token_id=EOS if last and ends else -1,
        )
        delta = choice.push(output)
        if delta is not None:
            deltas.append(delta)
        if choice.finished:
            break
    return choice, deltas


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


BYTES = st.lists(st.sampled_from([*b"abcab", *"é🙂".encode(), 258, 299]), min_size=1, max_size=25)
CUTS = st.lists(st.integers(0, 30))
STOPS = st.lists(st.sampled_from(["ab", "abc", "c", "é", "b🙂", "\ufffd", "⟨2"]), max_size=3)


@example([258, 99], [1], ["c"], 0, False, False)
@given(BYTES, CUTS, STOPS, st.integers(0, 6), st.booleans(), st.booleans())
def test_rounds_do_not_matter(
    tokens: list[int], cuts: list[int], stop: list[str], min_tokens: int, include_stop: bool, ends: bool
) -> None:
    whole, at_once = run(tokens, stop=stop, min_tokens=min_tokens, include_stop=include_stop, ends=ends)
    choice, deltas = run(tokens, cuts, stop=stop, min_tokens=min_tokens, include_stop=include_stop, ends=ends)
    assert text_of(deltas) == text_of(at_once)
    assert tokens_of(deltas) == tokens_of(at_once)
    assert choice.generated == whole.generated
    assert (deltas[-1].finish_reason, deltas[-1].matched_stop) == (at_once[-1].finish_reason, at_once[-1].matched_stop)
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert [entry.token_id for delta in deltas for entry in delta.logprobs] == tokens_of(deltas)
    assert choice.finished


@given(BYTES, CUTS, STOPS)
def test_without_a_match_nothing_is_lost(tokens: list[int], cuts: list[int], stop: list[str]) -> None:
    choice, deltas = run(tokens, cuts, stop=stop)
    if deltas[-1].matched_stop == EOS:
        assert text_of(deltas) == decode(TOKENIZER, tokens)
        assert tokens_of(deltas) == tokens
        assert choice.generated == len(tokens) + 1


@given(BYTES, CUTS, STOPS)
def test_a_match_shows_no_part_of_a_stop_string(tokens: list[int], cuts: list[int], stop: list[str]) -> None:
    choice, deltas = run(tokens, cuts, stop=stop)
    if isinstance(deltas[-1].matched_stop, str):
        text = text_of(deltas)
        assert not any(one in text for one in stop)
        assert (text + deltas[-1].matched_stop) in decode(TOKENIZER, tokens)
        kept = tokens_of(deltas)
        assert choice.generated == len(kept)
        assert decode(TOKENIZER, kept).startswith(text)


def test_kept_is_exactly_what_the_text_needs() -> None:
    choice, deltas = run(list(b"one two END three"), [3, 9, 10, 12], stop=["END"])
    assert text_of(deltas) == "one two " and deltas[-1].matched_stop == "END"
    assert choice.generated == 8 and len(tokens_of(deltas)) == 8
    choice, deltas = run(list(b"END"), stop=["END"])
    assert (choice.generated, text_of(deltas), deltas[-1].finish_reason) == (0, "", "stop")


def test_a_stop_that_begins_inside_a_token_keeps_that_token() -> None:
    tokens = [*b"a", 299, *b"z"]  # the text of 299 is ⟨299⟩
    choice, deltas = run(tokens, stop=["9⟩z"])
    assert text_of(deltas) == "a⟨29" and choice.generated == 2 and tokens_of(deltas) == [ord("a"), 299]


def test_a_character_over_several_tokens_is_dropped_whole() -> None:
    choice, deltas = run([*b"a", *"🙂".encode(), *b"b"], [2, 3, 4], stop=["🙂"])
    assert text_of(deltas) == "a" and choice.generated == 1 and tokens_of(deltas) == [ord("a")]


def test_the_stop_string_can_be_kept() -> None:
    choice, deltas = run(list(b"xENDy"), stop=["END"], include_stop=True)
    assert text_of(deltas) == "xEND" and choice.generated == 4


def test_the_ending_token_counts_but_is_not_text() -> None:
    choice, deltas = run(list(b"hi"))
    assert choice.generated == 3 and tokens_of(deltas) == list(b"hi") and deltas[-1].matched_stop == EOS


def test_stop_strings_wait_for_min_tokens() -> None:
    choice, deltas = run(list(b"ab ab ab"), stop=["ab"], min_tokens=4)
    assert text_of(deltas) == "ab ab " and choice.generated == 6
    choice, deltas = run(list(b"ab"), stop=["ab"], min_tokens=1)
    assert text_of(deltas) == "ab" and deltas[-1].matched_stop == EOS


def test_what_was_held_back_comes_with_the_end() -> None:
    choice, deltas = run([*b"EN", 0xF0, 0x9F], [1, 2, 3], stop=["END"], ends=False)
    assert text_of(deltas) == "EN\ufffd" and deltas[-1].finish_reason == "length" and choice.generated == 4


PARSED = '<think>\na\n</think>\n\nbé<tool_call>{"name": "f", "arguments": {"k": "🙂"}}</tool_call>c'
F = [{"type": "function", "function": {"name": "f"}}]


@given(CUTS, st.lists(st.sampled_from(["</t", "é", "k", "c", "zz", "\n\n"]), max_size=2), st.booleans(), st.booleans())
def test_rounds_do_not_matter_to_what_it_is(cuts: list[int], stop: list[str], include_stop: bool, ends: bool) -> None:
    """Parts are those of the text, and the count of reasoning tokens is the same, however the rounds fell."""
    found = []
    for each in ([], cuts, list(range(200))):
        parser = AnswerParser(Parsing(tool_format="hermes", reasoning_format="qwen3", tools=F))
        choice, deltas = run(
            list(PARSED.encode()), each, stop=stop, include_stop=include_stop, ends=ends, parser=parser
        )
        answer = put_together(part for delta in deltas for part in delta.parts)
        for call in answer.calls:
            call.id = ""
        assert choice.reasoning_tokens <= choice.generated
        found.append((answer, choice.reasoning_tokens, choice.generated, text_of(deltas)))
    assert found[0] == found[1] == found[2]
    if deltas[-1].matched_stop == EOS:
        assert (found[0][0].reasoning, found[0][0].content, len(found[0][0].calls)) == ("a", "béc", 1)


def test_a_special_token_that_a_parser_needs_is_shown_to_it_alone() -> None:
    tokenizer = ByteTokenizer(300, ("<|bos|>", "<|eos|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|im_end|>"))
    parsing = Parsing(tool_format="kimi_k2", tools=F)
    shown = parsing.marker_ids(tokenizer)
    assert shown == {258, 259}
    choice = Choice(
        0, tokenizer, stop=(), min_tokens=0, include_stop=False, skip_special_tokens=True,
        parser=AnswerParser(parsing), shown=shown,
    )  # fmt: skip
    tokens = [*b"a", 260, 258, *b"functions.f:3<|tool_call_argument_begin|>{}", 259, *b"b"]
    delta = choice.push(RequestOutput(handle=1, token_ids=tokens, finish_reason="length"))
    assert delta is not None
    answer = put_together(delta.parts)
    assert (answer.content, answer.calls[0].id, answer.calls[0].arguments) == ("ab", "functions.f:3", "{}")
