"""Real connections: the official client, clients that leave, keys, and the small endpoints."""

import asyncio
from pathlib import Path

import httpx
import openai
import pytest
from scripted_engine import CONTEXT, EOS, MODEL, Stack, say, scripted_config, tokens

from tokenspeed.server.app import create_app
from tokenspeed.telemetry.api_keys import ApiKeyError

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def official(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def test_the_official_client(official: openai.AsyncOpenAI, stack: Stack) -> None:
    stack.engine.script = say("Grüße 🙂")
    whole = await official.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2)  # type: ignore[arg-type]
    assert whole.choices[0].message.content == "Grüße 🙂"
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 3
    text = ""
    stream = await official.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)  # type: ignore[arg-type]
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
    assert text == "Grüße 🙂"
    legacy = await official.completions.create(model=MODEL, prompt="x", echo=True, logprobs=1)
    assert legacy.choices[0].text == "xGrüße 🙂"
    assert [model.id async for model in official.models.list()] == [MODEL]
    assert (await official.models.retrieve(MODEL)).id == MODEL


async def test_the_official_client_sees_errors_as_such(official: openai.AsyncOpenAI, stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await official.completions.create(model=MODEL, prompt="x", temperature=9)
    with pytest.raises(openai.NotFoundError, match=MODEL):
        await official.completions.create(model="other", prompt="x")
    stack.engine.script = lambda submit: tokens(submit, [65])
    stream = await official.completions.create(model=MODEL, prompt="x", stream=True)
    assert (await anext(aiter(stream))).choices[0].text == "A"
    stack.connection.engine_lost("SIGKILL")
    with pytest.raises(openai.APIError, match="SIGKILL"):
        async for _ in stream:
            pass
    with pytest.raises(openai.InternalServerError, match="SIGKILL"):
        await official.completions.create(model=MODEL, prompt="x")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "what"), [("completions", {"prompt": "x"}), ("chat/completions", {"messages": MESSAGES})]
)
async def test_a_client_that_leaves_before_the_first_token(
    stack: Stack, url: str, stream: bool, path: str, what: dict[str, object]
) -> None:
    stack.engine.pause()
    async with httpx.AsyncClient() as client:
        body = {"model": MODEL, "n": 2, "stream": stream, **what}
        task = asyncio.create_task(client.post(f"{url}/v1/{path}", json=body))
        await stack.engine.heard(lambda: len(stack.engine.submits) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await stack.engine.heard(lambda: len(stack.engine.aborts) == 2)
    assert stack.llm.open_choices == 0
    async with httpx.AsyncClient() as client:
        counted = (await client.get(f"{url}/metrics")).text
    assert 'status="500"' not in counted
    assert not stream or f'path="/v1/{path}",status="499"}} 1.0' in counted


async def test_a_client_that_leaves_in_mid_stream(stack: Stack, url: str) -> None:
    stack.engine.script = lambda submit: tokens(submit, *([65] for _ in range(3)))
    body = {"model": MODEL, "messages": MESSAGES, "stream": True}
    async with httpx.AsyncClient() as client, client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        await anext(answer.aiter_lines())
    await stack.engine.heard(lambda: stack.engine.aborts)
    assert stack.llm.open_choices == 0
    found = await metric(url, 'tokenspeed_choices_finished_total{reason="abort"}')
    assert found == 1


async def metric(url: str, name: str) -> float:
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"{url}/metrics")).text
    (line,) = [line for line in page.splitlines() if line.startswith(name)]
    return float(line.rsplit(" ", 1)[1])


async def test_many_streams_at_once(stack: Stack, url: str) -> None:
    stack.engine.script = lambda submit: say(f"answer {submit.handle} " * 5)(submit)
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:

        async def one(leaves: bool) -> str | None:
            body = {"model": MODEL, "prompt": "x", "stream": True}
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                if leaves:
                    await anext(answer.aiter_lines())
                    return None
                return (await answer.aread()).decode()

        texts = await asyncio.gather(*(one(at % 4 == 3) for at in range(64)))
    whole = [text for text in texts if text is not None]
    assert len(whole) == 48 and all(text.endswith("data: [DONE]\n\n") for text in whole)
    while stack.llm.open_choices:  # the last clients that left are noticed a moment later
        await asyncio.sleep(0)
    assert len(stack.engine.submits) == 64 and len(stack.engine.aborts) <= 16


async def test_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# for the tests\n\nfirst-key\nsecond-key  \n")
    stack = Stack(scripted_config(api_key_file=str(path)))
    await stack.new_engine()
    transport = httpx.ASGITransport(create_app(stack.llm))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first-key"}):
            for route in ("/v1/models", "/metrics", "/v1/internal/state", "/nothing", "/openapi.json"):
                answer = await client.get(route, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        for route in ("/live", "/ready", "/progress"):
            assert (await client.get(route)).status_code == 200
        for key in ("first-key", "second-key"):
            answer = await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        page = (await client.get("/metrics", headers={"Authorization": "Bearer first-key"})).text
        assert 'status="401"' in page and "first-key" not in page
    await stack.close()


@pytest.mark.parametrize("content", [None, "", "# nothing\n"])
async def test_a_key_file_without_a_key_stops_the_start(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    stack = Stack(scripted_config(api_key_file=str(path)))
    with pytest.raises(ApiKeyError, match="keys"):
        create_app(stack.llm)
    await stack.close()


async def test_models(client: httpx.AsyncClient) -> None:
    body = (await client.get("/v1/models")).json()
    (card,) = body["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", CONTEXT)
    assert (await client.get(f"/v1/models/{MODEL}")).json() == card


async def test_tokenize_and_detokenize(client: httpx.AsyncClient) -> None:
    body = (await client.post("/tokenize", json={"prompt": "é!", "return_token_strs": True})).json()
    assert body == {
        "count": 4,
        "max_model_len": CONTEXT,
        "tokens": [256, 0xC3, 0xA9, 33],
        "token_strs": ["<|bos|>", "<0xC3>", "<0xA9>", "<0x21>"],
    }
    bare = (await client.post("/tokenize", json={"prompt": "é!", "add_special_tokens": False, "model": MODEL})).json()
    assert bare["tokens"] == [0xC3, 0xA9, 33] and "token_strs" not in bare
    chat = (await client.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False})).json()
    assert chat["tokens"] == [256, 258, *b"user\nHi", 259, 10]
    text = (await client.post("/detokenize", json={"tokens": [256, *"é!".encode(), EOS]})).json()["prompt"]
    assert text == "<|bos|>é!<|eos|>"
    asked = {"tokens": [256, *"é!".encode()], "skip_special_tokens": True}
    assert (await client.post("/detokenize", json=asked)).json() == {"prompt": "é!"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"promt": "x"}, "promt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
)
async def test_tokenize_refuses_by_name(client: httpx.AsyncClient, path: str, body: object, param: str) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
