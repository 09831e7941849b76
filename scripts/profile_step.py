"""Where the time of a decode step goes, from the plan to the client's bytes, at several numbers of streams.

    python scripts/profile_step.py [MODEL] [--streams 1,8,32,256] [--tokens 96] [FLAG OF tokenspeed serve ...]

Runs the model twice, with and without the HTTP server. Of each number of streams it prints, for one step:

    step       wall time between two tokens of a stream
    plan       the scheduler, in the engine's loop
    device     the forward thread: inputs, forward, sampling
    commit     the engine's loop behind the step: results, the scheduler's advance, the message to the API process
    between    time in which the device waited for the loop, plan and commit included
    frontend   CPU time of the API process without HTTP: the engine's message, detokenization, the consumer's queue
    http       CPU time that the server adds to it: JSON, events, sockets

The engine's four are its own running means, taken while all streams run; the last two run on other cores, beside the
next steps, and slow them only where there are no other cores.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tokenspeed import AsyncLLM
from tokenspeed.cli.records import running_servers
from tokenspeed.cli.temporary_server import temporary_server
from tokenspeed.frontend.request import GenerationRequest

PROMPT_TOKENS = 32
CLOCK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Load:
    """What a number of streams took: wall seconds of a step, and CPU seconds of the process behind them."""

    step_s: float
    cpu_s: float
    engine: dict[str, float]


def prompt() -> list[int]:
    """Token ids that no cache has seen."""
    return [random.randrange(300, 1000) for _ in range(PROMPT_TOKENS)]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK


async def stream(client: httpx.AsyncClient, model: str, tokens: int) -> None:
    """One streamed completion; its bytes are thrown away."""
    body = {
        "model": model,
        "prompt": prompt(),
        "max_tokens": tokens,
        "min_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for _ in response.aiter_raw():
            pass


async def over_http(url: str, pid: int, model: str, streams: int, tokens: int) -> Load:
    """Streams through the server."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:
        await stream(client, model, 2)
        before, began = cpu_seconds(pid), time.monotonic()
        running = asyncio.gather(*(stream(client, model, tokens) for _ in range(streams)))
        step: dict[str, float] = {}
        while not running.done():
            state = (await client.get("/v1/internal/state")).json()["snapshot"]
            if state["running"] == streams or not step:
                step = state["step"]
            await asyncio.wait([running], timeout=0.2)
        await running
        wall, cpu = time.monotonic() - began, cpu_seconds(pid) - before
    return Load(wall / tokens, cpu / tokens, step)


def cpu_of_this_process() -> float:
    """User and system time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def without_http(llm: Any, streams: int, tokens: int) -> float:
    """CPU seconds of this process for a step of so many streams."""

    async def consume() -> None:
        request = GenerationRequest(prompt=prompt(), max_tokens=tokens, min_tokens=tokens, temperature=0)
        async for _ in llm.generate(request):
            pass

    await consume()
    before = cpu_of_this_process()
    await asyncio.gather(*(consume() for _ in range(streams)))
    return (cpu_of_this_process() - before) / tokens


def settings_of(flags: list[str]) -> dict[str, str | int | float]:
    """``--max-num-seqs 8`` as ``{"max_num_seqs": 8}``."""
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags[::2]]
    values = [
        int(text) if text.isdigit() else float(text) if text.replace(".", "").isdigit() else text
        for text in flags[1::2]
    ]
    return dict(zip(names, values, strict=True))


async def frontend_costs(model: str, flags: list[str], streams: list[int], tokens: int) -> list[float]:
    """CPU seconds a step without HTTP, for each number of streams."""
    async with AsyncLLM.launch(model, **settings_of(flags)) as llm:
        return [await without_http(llm, count, tokens) for count in streams]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32, 256])
    parser.add_argument("--tokens", type=int, default=96)
    arguments, flags = parser.parse_known_args()
    flags += ["--max-num-seqs", str(max(arguments.streams))]
    frontend = asyncio.run(frontend_costs(arguments.model, flags, arguments.streams, arguments.tokens))
    print("streams  step ms     plan   device   commit  between | CPU ms  frontend     http   between of a step")
    with temporary_server(["serve", arguments.model, *flags], arguments.model) as url:
        pid = next(record.pid for record in running_servers() if record.url == url)
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            model = json.load(answer)["data"][0]["id"]
        for count, without in zip(arguments.streams, frontend, strict=True):
            load = asyncio.run(over_http(url, pid, model, count, arguments.tokens))
            engine = [load.engine[f"{part}_ms"] for part in ("plan", "device", "commit", "bubble")]
            share = engine[3] / (engine[1] + engine[3])
            http = max(0.0, load.cpu_s - without)
            print(
                f"{count:>7}  {load.step_s * 1e3:>7.2f}  {engine[0]:>7.3f}  {engine[1]:>7.2f}  {engine[2]:>7.3f}  "
                f"{engine[3]:>7.3f} |         {without * 1e3:>8.3f} {http * 1e3:>8.3f}   {share:.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
