"""The official Anthropic client against the real server."""

from collections.abc import AsyncIterator

import anthropic
import pytest
from anthropic.types import MessageParam
from scripted_engine import MODEL, Stack, say, tokens

MESSAGES: list[MessageParam] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def official(url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_create(official: anthropic.AsyncAnthropic, stack: Stack) -> None:
    stack.engine.script = say("Grüße 🙂")
    message = await official.messages.create(model=MODEL, messages=MESSAGES, max_tokens=50, system="Be brief")
    (block,) = message.content
    assert isinstance(block, anthropic.types.TextBlock) and block.text == "Grüße 🙂"
    assert message.stop_reason == "end_turn" and message.usage.cache_read_input_tokens == 3
    assert message._request_id == message.id.removeprefix("msg_")


async def test_stream(official: anthropic.AsyncAnthropic, stack: Stack) -> None:
    stack.engine.script = say("Grüße 🙂")
    async with official.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=50) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        message = await stream.get_final_message()
    whole = await official.messages.create(model=MODEL, messages=MESSAGES, max_tokens=50)
    assert text == "Grüße 🙂"
    ours, theirs = message.model_dump(exclude={"id"}), whole.model_dump(exclude={"id"})
    for block in ours["content"]:
        block.pop("parsed_output", None)  # the client's own, of streams only
    assert ours == theirs


async def test_every_event_of_a_stream_is_known(official: anthropic.AsyncAnthropic) -> None:
    kinds = []
    async for event in await official.messages.create(model=MODEL, messages=MESSAGES, max_tokens=50, stream=True):
        kinds.append(type(event))
    assert kinds[:2] == [anthropic.types.RawMessageStartEvent, anthropic.types.RawContentBlockStartEvent]
    assert set(kinds[2:-3]) == {anthropic.types.RawContentBlockDeltaEvent}
    assert kinds[-3:] == [
        anthropic.types.RawContentBlockStopEvent,
        anthropic.types.RawMessageDeltaEvent,
        anthropic.types.RawMessageStopEvent,
    ]


async def test_count_tokens(official: anthropic.AsyncAnthropic) -> None:
    assert (await official.messages.count_tokens(model=MODEL, messages=MESSAGES)).input_tokens == 22


async def test_errors_are_the_clients_own(official: anthropic.AsyncAnthropic, stack: Stack) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        await official.messages.create(model=MODEL, messages=MESSAGES, max_tokens=5, extra_body={"temperature": 9})
    with pytest.raises(anthropic.NotFoundError, match=MODEL):
        await official.messages.create(model="other", messages=MESSAGES, max_tokens=5)
    stack.engine.script = lambda submit: tokens(submit, [65])
    stream = await official.messages.create(model=MODEL, messages=MESSAGES, max_tokens=5, stream=True)
    assert isinstance(await anext(aiter(stream)), anthropic.types.RawMessageStartEvent)
    stack.connection.engine_lost("SIGKILL")
    with pytest.raises(anthropic.APIError, match="SIGKILL"):
        async for _ in stream:
            pass


async def test_a_stream_that_is_closed_frees_the_engine(official: anthropic.AsyncAnthropic, stack: Stack) -> None:
    stack.engine.script = lambda submit: tokens(submit, *([65] for _ in range(3)))
    async with official.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=50) as stream:
        await anext(aiter(stream))
    await stack.engine.heard(lambda: stack.engine.aborts)
    assert stack.llm.open_choices == 0
