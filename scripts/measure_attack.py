"""What clients that mean no good cost one that does.

    python -m scripts.measure_attack --url http://127.0.0.1:8000 --name MODEL [--seconds 20] [--connections 1000]

Asks in a quiet server, among the attackers of hostile_clients.py, and among clients that mean well and have as much of
the engine as the attackers had, in turns. Prints the good clients' latencies and their ratios, how long the API process
let a probe wait, what the attackers did and were answered, and what the server holds afterwards.

The attackers are a process of their own with little claim to the processor (--nice), as if they had machines of their
own: what they take from the good client is then what the server spends on them. Their rate is printed, because an
attacker that does not get to run harms nobody.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from scripts.hostile_clients import ATTACKS, Target, attack, good_requests
from tokenspeed.cli.bench.wire import Wire

PROBE_S = 0.01
"""Between probes of the API process."""

LOAD_S = 0.25
"""Between looks at the engine's load."""

LET_GO_S = 60
"""The server has so long to end what the attackers left."""


async def waits(target: Target, until: Callable[[], bool]) -> list[float]:
    """Asks whether the server lives, again and again; returns the seconds that each answer took. Nothing else is done
    for it: it waits for the event loop."""
    wire = target.wire()
    times: list[float] = []
    while not until():
        began = time.perf_counter()
        await wire.fetch("GET", "/live", b"")
        times.append(time.perf_counter() - began)
        await asyncio.sleep(PROBE_S)
    wire.close()
    return times


async def read_state(wire: Wire) -> dict[str, Any]:
    _, answer = await wire.fetch("GET", "/v1/internal/state", b"")
    return dict(json.loads(answer))


async def loads(target: Target, until: Callable[[], bool]) -> list[int]:
    """Returns how many choices the engine worked on, four times a second."""
    wire = target.wire()
    counts: list[int] = []
    while not until():
        counts.append((await read_state(wire))["open_choices"])
        await asyncio.sleep(LOAD_S)
    wire.close()
    return counts


@contextlib.asynccontextmanager
async def company(target: Target, streams: int) -> AsyncIterator[None]:
    """While the block runs, so many clients that mean well ask for long answers, and read them."""

    async def talk() -> None:
        wire = target.wire()
        try:
            while True:
                await wire.fetch("POST", "/v1/completions", target.streamed(max_tokens=400))
        finally:
            wire.close()

    talks = [asyncio.create_task(talk()) for _ in range(streams)]
    yield
    for one in talks:
        one.cancel()
    await asyncio.gather(*talks, return_exceptions=True)


@dataclass(frozen=True)
class Attackers:
    """What the process of attackers is told.

    Attributes:
        url, name, seed, key: see Target.
        connections: idle ones.
        attacks: names of those that are made.
        nice: how little claim to the processor it has.
    """

    url: str
    name: str
    seed: int
    key: str
    connections: int
    attacks: tuple[str, ...]
    nice: int

    @contextlib.contextmanager
    def at_work(self, target: Target) -> Iterator[None]:
        """They work while the block runs; ``target`` then has what they did."""
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("spawn").Process(target=self.work, args=(theirs,))
        child.start()
        try:
            assert ours.recv() == "begun"
            yield
        finally:
            ours.send("end")
            statuses, tried = ours.recv()
            child.join()
            target.statuses.update(statuses)
            target.tried.update(tried)

    def work(self, parent: Connection) -> None:
        """What runs in the process."""
        _give_way(self.nice)
        target = Target.at(self.url, self.name, self.seed, self.key)

        async def until_told() -> None:
            stop = asyncio.Event()
            asyncio.get_running_loop().add_reader(parent.fileno(), stop.set)
            parent.send("begun")
            await attack(target, stop, self.connections, [one for one in ATTACKS if one.__name__ in self.attacks])
            asyncio.get_running_loop().remove_reader(parent.fileno())

        asyncio.run(until_told())
        parent.send((target.statuses, target.tried))


@dataclass
class Seen:
    """What was measured of one kind of time.

    Attributes:
        requests, waits: seconds that good requests and probes took.
        loads: how many choices the engine worked on.
        seconds: for how long.
    """

    requests: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    seconds: float = 0.0

    async def go_on(self, target: Target, users: int, seconds: float) -> None:
        began = time.perf_counter()

        def over(_: int = 0) -> bool:
            return time.perf_counter() > began + seconds

        each = asyncio.gather(*(good_requests(target, over) for _ in range(users)))
        waited, counts, times = await asyncio.gather(waits(target, over), loads(target, over), each)
        self.waits += waited
        self.loads += counts
        self.requests += [took for one in times for took in one]
        self.seconds += time.perf_counter() - began

    @property
    def load(self) -> float:
        return sum(self.loads) / len(self.loads)

    def shown(self) -> str:
        asked, waited = (
            ", ".join(f"p{share} {1000 * quantile(times, share / 100):.1f}" for share in (50, 90, 99))
            for times in (self.requests, self.waits)
        )
        longest = 1000 * max(self.waits)
        return (
            f"{len(self.requests)} requests, {asked} ms; probes {waited}, longest {longest:.1f} ms; "
            f"{self.load:.1f} choices at a time"
        )

    def ratio(self, other: "Seen") -> str:
        p50, p99 = (quantile(self.requests, share) / quantile(other.requests, share) for share in (0.5, 0.99))
        return f"p50 {p50:.2f}, p99 {p99:.2f}"


def quantile(times: list[float], share: float) -> float:
    return sorted(times)[min(int(share * len(times)), len(times) - 1)]


async def compare(target: Target, attackers: Attackers, users: int, seconds: float, rounds: int) -> None:
    """Prints the good clients' latencies in quiet, among attackers, and in company as large as the attackers' share of
    the engine was, in turns."""
    quiet, hostile, polite = Seen(), Seen(), Seen()
    for _ in range(rounds):
        await quiet.go_on(target, users, seconds / rounds)
        with attackers.at_work(target):
            await hostile.go_on(target, users, seconds / rounds)
        await held_afterwards(target)
        async with company(target, max(round(hostile.load) - users, 0)):
            await polite.go_on(target, users, seconds / rounds)
    for name, seen in (("quiet", quiet), ("hostile", hostile), ("company", polite)):
        print(f"{name:>8}: {seen.shown()}")
    print(f"   ratio: {hostile.ratio(quiet)} to quiet; {hostile.ratio(polite)} to company")
    rates = ", ".join(f"{name} {count / hostile.seconds:.1f}" for name, count in sorted(target.tried.items()))
    print(f" attacks: {sum(target.tried.values()) / hostile.seconds:.1f} a second ({rates})")
    for (kind, status), count in sorted(target.statuses.items()):
        print(f"{kind:>20}: {status} x {count}")


async def held_afterwards(target: Target) -> str:
    """Waits until the server has ended what the attackers left; returns what it holds all the same, "" for nothing."""
    wire = target.wire()
    end = time.monotonic() + LET_GO_S
    while True:
        state = await read_state(wire)
        choices, blocks = state["open_choices"], sum(group["held"] for group in state["snapshot"]["groups"])
        if (not choices and not blocks) or time.monotonic() > end:
            wire.close()
            return f"{choices} choices and {blocks} blocks" if choices or blocks else ""
        await asyncio.sleep(LOAD_S)


def _give_way(nice: int) -> None:
    """Lowers this process's claim to the processor, also against the sessions of others, where Linux weighs these."""
    os.nice(nice)
    os.setsid()
    with contextlib.suppress(FileNotFoundError):
        Path("/proc/self/autogroup").write_text(str(nice), encoding="ascii")


def memory_mb(pid: int) -> float:
    """What a process and its children hold for themselves."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(kb) for kb in re.findall(r"RssAnon:\s+(\d+) kB", status)) / 1024 + sum(
        map(memory_mb, map(int, children))
    )


async def hour(target: Target, attackers: Attackers, options: argparse.Namespace) -> None:
    before = memory_mb(options.pid) if options.pid else 0.0
    await compare(target, attackers, options.users, options.seconds, options.rounds)
    print(f"   holds: {await held_afterwards(target) or 'no choice, no block'}")
    if options.pid:
        print(f"  memory: {before:.0f} MB before, {memory_mb(options.pid):.0f} MB after")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted({one.__name__ for one in ATTACKS})
    parser.add_argument("--url", required=True)
    parser.add_argument("--name", required=True, help="the served name")
    parser.add_argument("--seconds", type=float, default=20.0, help="of quiet, and of attacks")
    parser.add_argument("--rounds", type=int, default=2, help="in which they take turns")
    parser.add_argument("--connections", type=int, default=1000, help="idle ones beside the attackers")
    parser.add_argument("--users", type=int, default=4, help="good ones")
    parser.add_argument("--only", action="append", choices=names, help="some attacks; again for another")
    parser.add_argument("--nice", type=int, default=19, help="how little claim to the processor the attackers have")
    parser.add_argument("--key", default="", help="API key of those who mean well")
    parser.add_argument("--attackers-key", default="", help="API key of the attackers")
    parser.add_argument("--pid", type=int, default=0, help="the server's process, for its memory")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    place = (options.url, options.name, options.seed)
    attackers = Attackers(
        *place, options.attackers_key, options.connections, tuple(options.only or names), options.nice
    )
    asyncio.run(hour(Target.at(*place, options.key), attackers, options))


if __name__ == "__main__":
    main()
