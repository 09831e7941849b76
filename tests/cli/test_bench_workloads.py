"""What is asked: lengths, what prompts have in common, how sessions grow; and options that do not go together."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in_endpoint import Manner, stand_in

from tokenspeed.cli.bench.answers import Request
from tokenspeed.cli.bench.endpoint import Api, Endpoint, connect
from tokenspeed.cli.bench.load import Load
from tokenspeed.cli.bench.options import ServeOptions
from tokenspeed.cli.bench.prompts import Lengths, PromptMaker
from tokenspeed.cli.bench.serve import bench_serve
from tokenspeed.cli.bench.workloads import (
    Asker,
    FileWorkload,
    RandomWorkload,
    SessionsWorkload,
    SharedPrefixWorkload,
    Workload,
)
from tokenspeed.cli.records import ServerError


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with stand_in(Manner()) as where:
        yield where


async def asker_of(url: str, api: Api = "completions") -> Asker:
    endpoint = await connect(url)
    return Asker(endpoint, await PromptMaker.of(endpoint, api), api)


def body(request: Request | None) -> dict[str, Any]:
    assert request is not None
    return dict(json.loads(request.payload))


async def firsts(workload: Workload, asker: Asker, count: int) -> list[dict[str, Any]]:
    talks = workload.conversations(asker, random.Random(7), count)
    return [body(await talk.next(None)) for talk in talks]


async def test_random_prompts_have_nothing_in_common_and_come_again_with_their_seed(url: str) -> None:
    asker = await asker_of(url)
    workload = RandomWorkload(Lengths(20, 40), Lengths(5, 9))
    made = await firsts(workload, asker, 12)
    assert all(20 <= len(one["prompt"]) <= 40 and 5 <= one["max_tokens"] == one["min_tokens"] <= 9 for one in made)
    assert len({tuple(one["prompt"][:16]) for one in made}) == 12
    assert made == await firsts(workload, asker, 12)
    asker.endpoint.wire.close()


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_groups_share_their_prefix(url: str, api: Api) -> None:
    asker = await asker_of(url, api)
    made = await firsts(SharedPrefixWorkload(30, 2, Lengths(10, 10), Lengths(4, 4)), asker, 6)
    prompts = [one["messages"][0]["content"].split() if api == "chat" else one["prompt"] for one in made]
    assert {len(prompt) for prompt in prompts} == {40}
    assert prompts[0][:30] == prompts[2][:30] == prompts[4][:30] != prompts[1][:30] == prompts[3][:30]
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 6
    asker.endpoint.wire.close()


async def converse(endpoint: Endpoint, workload: SessionsWorkload, asker: Asker) -> list[list[dict[str, Any]]]:
    """The bodies of all turns of two sessions."""
    sessions = []
    for talk in workload.conversations(asker, random.Random(7), 2):
        bodies, request = [], await talk.next(None)
        while request is not None:
            bodies.append(body(request))
            request = await talk.next(await endpoint.send(request))
        sessions.append(bodies)
    return sessions


async def test_sessions_grow_by_answer_and_result(url: str) -> None:
    asker = await asker_of(url)
    workload = SessionsWorkload(3, 30, Lengths(10, 10), Lengths(4, 4))
    first, second = await converse(asker.endpoint, workload, asker)
    assert [len(turn["prompt"]) for turn in first] == [40, 40 + 4 + 10, 40 + 2 * 14]
    for before, after in itertools.pairwise(first):
        assert after["prompt"][: len(before["prompt"])] == before["prompt"]
        assert after["prompt"][len(before["prompt"]) :][:4] == [4] * 4  # the stand-in says a word of four letters
    assert first[0]["prompt"][:30] == second[0]["prompt"][:30]
    assert first[0]["prompt"][30:] != second[0]["prompt"][30:]
    asker.endpoint.wire.close()


async def test_sessions_of_a_chat_keep_every_message(url: str) -> None:
    asker = await asker_of(url, "chat")
    first, _ = await converse(asker.endpoint, SessionsWorkload(3, 30, Lengths(10, 10), Lengths(4, 4)), asker)
    assert [[message["role"] for message in turn["messages"]] for turn in first] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user", "assistant", "user", "assistant", "user"],
    ]
    assert first[2]["messages"][:4] == first[1]["messages"]
    assert first[1]["messages"][2]["content"] == "word " * 4
    asker.endpoint.wire.close()


async def test_sessions_where_prompts_are_text() -> None:
    with stand_in(Manner(tokenize="")) as url:
        asker = await asker_of(url)
        first, _ = await converse(asker.endpoint, SessionsWorkload(2, 30, Lengths(10, 10), Lengths(4, 4)), asker)
        asker.endpoint.wire.close()
    assert first[1]["prompt"].startswith(first[0]["prompt"] + " word word word word")


async def test_a_session_ends_with_its_first_failure() -> None:
    with stand_in(Manner(breaks="error")) as url:
        asker = await asker_of(url)
        sessions = await converse(asker.endpoint, SessionsWorkload(3, 30, Lengths(10, 10), Lengths(4, 4)), asker)
        asker.endpoint.wire.close()
    assert [len(turns) for turns in sessions] == [1, 1]


async def test_a_file_is_asked_in_its_order_and_again(url: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"prompt": [1, 2], "max_tokens": 3}\n')
    workload = FileWorkload.read(path, Lengths(8, 8), random.Random(1))
    assert (workload.api, workload.described) == ("completions", "2 prompts of p.jsonl")
    asker = await asker_of(url)
    made = await firsts(workload, asker, 3)
    assert [(one["prompt"], one["max_tokens"]) for one in made] == [("one", 8), ([1, 2], 3), ("one", 8)]
    path.write_text('{"messages": [{"role": "user", "content": "hello"}]}')
    chat = FileWorkload.read(path, Lengths(8, 8), random.Random(1))
    assert (await firsts(chat, asker, 1))[0]["messages"] == [{"role": "user", "content": "hello"}]
    asker.endpoint.wire.close()


FILES = [
    ("", "holds no prompt"),
    ("{", ":1: no JSON"),
    ('{"prompt": "a"}\n{"text": "b"}', ':2: a line is an object with "prompt" or "messages"'),
    ('{"prompt": "a", "messages": []}\n[]', ':2: a line is an object with "prompt" or "messages"'),
    ('{"prompt": [1, "a"]}', ':1: "prompt" is text or a list of token ids'),
    ('{"messages": "hello"}', ':1: "messages" is a list of objects'),
    ('{"prompt": "a", "max_tokens": 0}', ':1: "max_tokens" is a whole number from 1 up'),
    ('{"prompt": "a"}\n{"messages": [{"role": "user"}]}', "mixes prompt and messages"),
]


@pytest.mark.parametrize(("content", "told"), FILES)
def test_a_file_that_is_wrong_is_named_with_its_line(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(ServerError) as raised:
        FileWorkload.read(path, Lengths(8, 8), random.Random(1))
    assert str(path) in str(raised.value) and told in str(raised.value)


@given(low=st.integers(1, 500), more=st.integers(0, 500), seed=st.integers())
def test_lengths_are_drawn_from_what_is_written(low: int, more: int, seed: int) -> None:
    lengths = Lengths.parse(f"{low}:{low + more}", "--input-len")
    assert low <= lengths.draw(random.Random(seed)) <= low + more
    assert Lengths.parse(str(lengths), "--input-len") == lengths


@pytest.mark.parametrize("text", ["", "0", "-1", "a", "5:4", "1:", ":3", "1:2:3", "1.5", "²"])
def test_a_length_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ServerError, match="--input-len"):
        Lengths.parse(text, "--input-len")


TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"concurrency": "1", "rate": "2"}, "--concurrency and --rate exclude each other"),
    ({"arrivals": "burst"}, "--arrivals needs --rate"),
    ({"rate": "1", "burst": 3}, "--burst needs --arrivals burst"),
    ({"turns": 3}, "--turns means nothing to the workload random: sessions only"),
    ({"workload": "mixture", "rate": "1"}, "--rate means nothing to the workload mixture"),
    ({"workload": "sessions", "requests": 4}, "--requests means nothing to the workload sessions"),
    ({"workload": "file"}, "the workload file needs --file"),
    ({"json": Path("/absent/r.json")}, "--json /absent/r.json: there is no folder /absent"),
    ({"concurrency": "8,x"}, "--concurrency x: one number above 0, or several"),
    ({"concurrency": "0"}, "--concurrency 0: one number above 0"),
    ({"rate": "1,inf"}, "--rate inf: one number above 0"),
    ({"workload": "mixture", "input_len": "1:2"}, "mixture takes no ranges"),
]


@pytest.mark.parametrize(("given_options", "told"), TOGETHER)
def test_options_that_do_not_go_together_are_named(given_options: dict[str, Any], told: str) -> None:
    with pytest.raises(ServerError) as raised:
        bench_serve(ServeOptions(url="http://127.0.0.1:9", dry_run=True, **given_options))
    assert told in str(raised.value)


def count(load: Load, **options: Any) -> int | None:
    made = ServeOptions(**options)
    workload = made.build(random.Random(1))
    return made.count(load, workload)  # type: ignore[arg-type]


def test_how_much_is_asked_where_nobody_says() -> None:
    assert [load.label for load in ServeOptions().loads()] == ["8 at once"]
    assert [load.label for load in ServeOptions(rate="0.5,4").loads()] == ["0.5/s", "4/s"]
    assert [load.label for load in ServeOptions(workload="sessions", sessions=6).loads()] == ["6 at once"]
    assert ServeOptions(workload="mixture").loads() == []
    assert (count(Load(concurrency=2)), count(Load(concurrency=32)), count(Load(rate=2.0))) == (16, 128, 60)
    assert (count(Load(concurrency=2), duration=3.0), count(Load(concurrency=2), duration=3.0, requests=5)) == (None, 5)
    assert count(Load(concurrency=3), workload="sessions") == 3
    assert count(Load(concurrency=3), workload="sessions", sessions=9) == 9
