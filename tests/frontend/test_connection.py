"""The wire to the engine: one message a turn, fresh endpoints a generation, and an end that everybody hears of."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from scripted_engine import Stack, say, snapshot

from tokenspeed.frontend.connection import ZmqEngineConnection
from tokenspeed.frontend.errors import EngineFailed, EngineUnavailable
from tokenspeed.frontend.request import GenerationRequest
from tokenspeed.messages import PROTOCOL_VERSION, EngineStatus, encode


async def test_what_is_said_in_one_turn_is_one_message(stack: Stack) -> None:
    stack.engine.pause()
    generation = await stack.llm.start([GenerationRequest(prompt=f"p{at}", n=3) for at in range(5)])
    await stack.engine.heard(lambda: len(stack.engine.submits) == 15)
    assert stack.engine.messages == 1
    generation.cancel()
    await stack.engine.heard(lambda: len(stack.engine.aborts) == 15)
    assert stack.engine.messages == 2


async def test_submit_and_abort_of_one_turn_stay_in_order(stack: Stack) -> None:
    generation = await stack.llm.start([GenerationRequest(prompt="x")])
    generation.cancel()
    await stack.engine.heard(lambda: stack.engine.aborts)
    assert stack.engine.aborts == [stack.engine.submits[0].handle]
    assert stack.llm.open_choices == 0


async def test_each_engine_has_endpoints_of_its_own(stack: Stack) -> None:
    first = stack.engine
    folder = Path(stack.connection._folder)
    assert folder.stat().st_mode & 0o077 == 0
    stack.connection.engine_lost("it fell over")
    second = await stack.new_engine()
    await first.send_snapshot(snapshot(running=1))  # a dead engine's last words go nowhere
    await second.send_snapshot(snapshot(running=2))
    while stack.llm.engine.snapshot is None:
        await stack.llm.engine.changed()
    assert stack.llm.engine.snapshot.running == 2
    second.script = say("ok")
    deltas = [delta async for delta in stack.llm.generate(GenerationRequest(prompt="x"))]
    assert "".join(delta.text for delta in deltas) == "ok"
    assert not first.submits


async def test_requests_that_were_not_sent_die_with_the_engine(stack: Stack) -> None:
    generation = await stack.llm.start([GenerationRequest(prompt="x")])
    stack.connection.engine_lost("SIGKILL")
    with pytest.raises(EngineFailed, match="SIGKILL"):
        await generation.next_batch()
    engine = await stack.new_engine()
    engine.script = say("y")
    assert [delta async for delta in stack.llm.generate(GenerationRequest(prompt="b"))]
    assert len(engine.submits) == 1


async def test_an_engine_of_another_version_is_an_engine_lost(stack: Stack) -> None:
    stack.engine.pause()
    generation = await stack.llm.start([GenerationRequest(prompt="x")])
    await stack.engine.send_raw(encode(EngineStatus(version=PROTOCOL_VERSION + 1, phase="ready")))
    with pytest.raises(EngineFailed, match="protocol version"):
        await generation.next_batch()
    assert not stack.llm.engine.ready
    assert "protocol version" in stack.llm.engine.last_error


async def test_an_error_while_handling_a_message_does_not_end_the_listening(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    broken = msgspec.structs.replace(snapshot())
    original = stack.llm.engine.set_snapshot
    stack.llm.engine.set_snapshot = lambda state: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    await stack.engine.send_snapshot(broken)
    deltas = [delta async for delta in stack.llm.generate(GenerationRequest(prompt="x"))]
    assert deltas[-1].finish_reason == "stop"
    assert "could not be handled" in caplog.text
    stack.llm.engine.set_snapshot = original  # type: ignore[method-assign]


async def test_given_up(stack: Stack) -> None:
    stack.connection.engine_lost("out of memory")
    with pytest.raises(EngineUnavailable, match=r"not ready yet.*out of memory"):
        await stack.llm.start([GenerationRequest(prompt="x")])
    waiting = asyncio.create_task(stack.llm.engine.wait_ready())
    await asyncio.sleep(0)
    stack.connection.engine_given_up("out of memory")
    with pytest.raises(EngineUnavailable, match="out of memory"):
        await waiting
    assert stack.llm.engine.gave_up


async def test_endpoints_that_cannot_be_bound_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    connection = ZmqEngineConnection()
    with pytest.raises(OSError, match="TMPDIR"):
        connection.rebind()
    connection.close()


async def test_closing_leaves_nothing_behind() -> None:
    connection = ZmqEngineConnection()
    connection.rebind()
    folder = Path(connection._folder)
    assert sorted(path.name for path in folder.iterdir()) == ["1.in", "1.out"]
    connection.rebind()
    connection.close()
    assert not folder.exists()
