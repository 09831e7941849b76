"""Long texts delay nobody: they are worked on beside the event loop, one at a time, and no further than they need."""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import CONTEXT, Stack

from tokenspeed.frontend.errors import ContextLengthExceeded, RequestRefused
from tokenspeed.frontend.long_texts import (
    ALONE_ABOVE_CHARACTERS,
    MARGIN,
    PIECE_CHARACTERS,
    THREAD_ABOVE_CHARACTERS,
    PromptBound,
    TextDesk,
)
from tokenspeed.frontend.request import GenerationRequest
from tokenspeed.frontend.text_assets import TextAssets
from tokenspeed.frontend.tokenizer import Tokenizer


@contextmanager
def counting() -> Iterator[list[int]]:
    """Counts on another thread, as long as the interpreter lets it; nobody is made to let go of the interpreter."""
    turns, ended, begun = [0], threading.Event(), threading.Event()

    def count() -> None:
        while not ended.is_set():
            turns[0] += 1
            begun.set()
            time.sleep(0)  # gives the interpreter away, and gets it back when the other thread lets it go

    interval = sys.getswitchinterval()
    counter = threading.Thread(target=count)
    counter.start()
    begun.wait()
    sys.setswitchinterval(60)
    try:
        yield turns
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        counter.join()


def test_other_threads_go_on_while_a_text_is_tokenized(smollm2_text: TextAssets) -> None:
    text = "word and more " * 20_000
    smollm2_text.tokenizer.encode("warm", add_special_tokens=True)
    with counting() as turns:
        before = turns[0]
        smollm2_text.tokenizer.encode(text, add_special_tokens=True)
        assert turns[0] > before


@pytest.mark.parametrize(
    ("characters", "in_thread"), [(THREAD_ABOVE_CHARACTERS, False), (THREAD_ABOVE_CHARACTERS + 1, True)]
)
async def test_short_texts_stay_on_the_event_loop(characters: int, in_thread: bool) -> None:
    ran = await TextDesk().work(threading.current_thread, characters)
    assert (ran is not threading.current_thread()) == in_thread


async def test_very_long_texts_take_turns_and_others_do_not_wait() -> None:
    desk, go_on, running = TextDesk(), threading.Event(), []

    def long(name: str) -> str:
        running.append(name)
        assert go_on.wait(30)
        return name

    first, second = (
        asyncio.create_task(desk.work(partial(long, name), ALONE_ABOVE_CHARACTERS + 1)) for name in ("first", "second")
    )
    while not running:
        await asyncio.sleep(0)
    assert await desk.work(lambda: "between", ALONE_ABOVE_CHARACTERS) == "between"
    assert running == ["first"]
    go_on.set()
    assert [await first, await second] == ["first", "second"]


async def test_a_text_far_beyond_the_context_is_refused_by_its_beginning(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    original = stack.llm.tokenizer.encode

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        read.append(len(text))
        return original(text, add_special_tokens)

    monkeypatch.setattr(stack.llm.tokenizer, "encode", encode)
    text = "x" * (20 * PIECE_CHARACTERS)
    with pytest.raises(ContextLengthExceeded, match=rf"context length is {CONTEXT} .* more than \d+ tokens"):
        await stack.llm.start([GenerationRequest(prompt=text)])
    with pytest.raises(ContextLengthExceeded, match="more than"):
        await stack.llm.render_chat([{"role": "user", "content": text}], bound=stack.llm.prompt_bound)
    assert read == [PIECE_CHARACTERS, PIECE_CHARACTERS]
    assert len(await stack.llm.encode(text)) == len(text) + 1, "whoever only counts gets the whole"


def test_what_a_bound_says(smollm2_text: TextAssets) -> None:
    tokenizer, text = smollm2_text.tokenizer, "word " * 40_000
    PromptBound(context=50_000, most=0).check_text(tokenizer, text)
    with pytest.raises(RequestRefused, match=r"more than \d+ tokens, and this server takes 500 at most") as raised:
        PromptBound(context=50_000, most=500).check_text(tokenizer, text)
    assert (raised.value.code, raised.value.param) == ("prompt_too_long", "prompt")
    PromptBound(context=300, most=0).check_messages(300)
    with pytest.raises(ContextLengthExceeded, match="more than 301 tokens"):
        PromptBound(context=300, most=0).check_messages(301)


@given(
    text=st.text(min_size=1, max_size=60) | st.text("x \n\u00e9'1", min_size=1, max_size=60),
    repeats=st.integers(1, 400),
    piece=st.integers(64, 4096),
)
def test_pieces_have_less_than_twice_the_tokens_of_the_whole(
    smollm2_text: TextAssets, text: str, repeats: int, piece: int
) -> None:
    """What the margin stands on, with pieces far smaller, and cuts far more, than it is used with."""
    whole = text * repeats
    pieces = (whole[at : at + piece] for at in range(0, len(whole), piece))
    count = partial(_count, smollm2_text.tokenizer)
    assert sum(map(count, pieces)) <= MARGIN * count(whole)


def _count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))
