"""What the door takes: HTTP, tokenization and detokenization over an engine that answers at once.

    python scripts/measure_door.py [--model /tmp/tiny] [--streams 1,32,256] [--tokens 128] [--seconds 4]
    python scripts/measure_door.py --url http://127.0.0.1:8000 --name MODEL --pid PID [...]

The first form starts the real application over an engine process that only says tokens, as fast as it is asked (with
``--model`` the vocabulary and tokenizer of that folder, else one token a byte). The second asks a server that runs;
``--pid`` is its API process. Of each number of connections, which ask again as soon as they are answered, it prints:

    whole     requests a second with one token each, not streamed
    streamed  tokens a second of streams of --tokens
    CPU       of the API process: microseconds for each of these, the figure that other load on the machine moves least
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
import zmq

from tokenspeed.cli.bench.wire import MessageReader, Wire
from tokenspeed.frontend.async_llm import AsyncLLM
from tokenspeed.frontend.connection import ZmqEngineConnection
from tokenspeed.launch.connections import ConnectionBounds, bounded_protocol
from tokenspeed.messages import (
    PROTOCOL_VERSION,
    EngineInput,
    EngineOutput,
    EngineStatus,
    RequestOutput,
    decode_input,
    encode,
)
from tokenspeed.recipes.resolved import ModelSource, ResolvedConfig
from tokenspeed.server.app import create_app

CLOCK = os.sysconf("SC_CLK_TCK")
WORDS = "The quick brown fox jumps over the lazy dog. " * 4
CONTEXT = 4096


def say_tokens(endpoints: tuple[str, str]) -> None:
    """The engine process: every request gets a token a round, and rounds follow each other at once."""
    context: zmq.Context[Any] = zmq.Context()
    heard, said = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    heard.connect(endpoints[0])
    said.connect(endpoints[1])
    facts: dict[str, Any] = {"max_model_len": CONTEXT}
    said.send(encode(EngineStatus(version=PROTOCOL_VERSION, phase="ready", facts=facts)))
    left: dict[int, int] = {}
    number, parent = 0, os.getppid()
    while os.getppid() == parent:
        while heard.poll(0 if left else 1000):
            message: EngineInput = decode_input(heard.recv())
            left.update({submit.handle: submit.max_new_tokens for submit in message.submits})
            for handle in (*(finish.handle for finish in message.finishes), *message.aborts):
                left.pop(handle, None)
        if not left:
            continue
        outputs = [
            RequestOutput(handle=handle, token_ids=[97 + number % 26], finish_reason="length" if rest == 1 else None)
            for handle, rest in left.items()
        ]
        left = {handle: rest - 1 for handle, rest in left.items() if rest > 1}
        number += 1
        said.send(encode(EngineOutput(version=PROTOCOL_VERSION, round=number, outputs=outputs)))


def configuration(folder: str) -> ResolvedConfig:
    """A model by its folder, or a random one whose tokens are bytes."""
    random_config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
    }
    model = (
        ModelSource(kind="folder", path=folder)
        if folder
        else ModelSource(kind="random", random_config=json.dumps(random_config))
    )
    return ResolvedConfig(
        name="door", served_name="door", model=model, recipe="door", profile="smoke", recipe_hash="none", seed=7
    )


def serve(folder: str, listener: socket.socket) -> None:
    """The API process."""
    asyncio.run(_serve(folder, listener))


async def _serve(folder: str, listener: socket.socket) -> None:
    connection = ZmqEngineConnection()
    llm = AsyncLLM(configuration(folder), connection)
    spawn = multiprocessing.get_context("spawn")
    engine = spawn.Process(target=say_tokens, args=(connection.rebind(),), daemon=True)
    engine.start()
    await llm.engine.wait_ready()
    bounds = ConnectionBounds(most=2048, slow_reader_s=30.0, refused=lambda _: None, cut=lambda _: None)
    config = uvicorn.Config(
        create_app(llm), http=bounded_protocol(bounds), log_config=None, access_log=False, lifespan="off"
    )
    try:
        await uvicorn.Server(config).serve([listener])
    finally:
        engine.terminate()
        connection.close()


@contextmanager
def own_server(folder: str) -> Iterator[tuple[str, int]]:
    """URL and process id of an API process over the engine that says tokens."""
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        process = multiprocessing.get_context("fork").Process(target=serve, args=(folder, listener))
        process.start()
        assert process.pid is not None
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", process.pid
        finally:
            process.terminate()
            process.join(10)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, in seconds; 0 for no process."""
    if not pid:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK


async def load(url: str, body: dict[str, Any], connections: int, seconds: float) -> tuple[int, int, float]:
    """Asks for ``seconds``; returns answers and chunks of answers that ended, and how long that took."""
    wire = Wire(url)
    data = json.dumps(body).encode()
    answers = chunks = 0
    until = time.perf_counter() + seconds

    def count(_reader: MessageReader, piece: bytes) -> None:
        nonlocal chunks
        chunks += piece.count(b'"text"')

    async def user() -> None:
        nonlocal answers
        while time.perf_counter() < until:
            status = await wire.ask("POST", "/v1/completions", data, count)
            if status != 200:
                raise SystemExit(f"the server answered {status} to {body}")
            answers += 1

    began = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(connections)))
    took = time.perf_counter() - began
    wire.close()
    return answers, chunks, took


def measure(url: str, pid: int, name: str, streams: list[int], tokens: int, seconds: float) -> None:
    """Prints a line for each number of connections."""
    print(f"{'connections':>11} {'whole/s':>9} {'CPU us':>8} {'streamed tok/s':>15} {'CPU us':>8}")
    asked = {"model": name, "prompt": WORDS, "ignore_eos": True}
    asyncio.run(load(url, {**asked, "max_tokens": 1}, 1, 0.1))  # which waits until the server has started
    for connections in streams:
        before = cpu_seconds(pid)
        answers, _, took = asyncio.run(load(url, {**asked, "max_tokens": 1}, connections, seconds))
        middle = cpu_seconds(pid)
        body = {**asked, "max_tokens": tokens, "stream": True}
        ended, _, streamed_took = asyncio.run(load(url, body, connections, seconds))
        after = cpu_seconds(pid)
        print(
            f"{connections:>11} {answers / took:>9.0f} {1e6 * (middle - before) / answers:>8.0f}"
            f" {ended * tokens / streamed_took:>15.0f} {1e6 * (after - middle) / (ended * tokens):>8.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a model's folder; without it a token is a byte")
    parser.add_argument("--url", default="", help="a server that runs, instead of one of its own")
    parser.add_argument("--name", default="door", help="with --url: the served name")
    parser.add_argument("--pid", type=int, default=0, help="with --url: its API process")
    parser.add_argument("--streams", default="1,32,256")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    options = parser.parse_args()
    streams = [int(one) for one in options.streams.split(",")]
    if options.url:
        measure(options.url, options.pid, options.name, streams, options.tokens, options.seconds)
        return
    with own_server(options.model) as (url, pid):
        measure(url, pid, "door", streams, options.tokens, options.seconds)


if __name__ == "__main__":
    main()
