"""What telemetry costs the engine's loop, against a step: docs/metrics.md has the figures.

    python scripts/measure_telemetry.py [--running 256] [--waiting 1000] [--model qwen3-8b] [--json]

Composes a whole engine of a recipe's smoke profile in this process, has ``running`` requests decode while ``waiting``
wait for a row, and times a step, what every round pays, and a snapshot as it is sent, encoded: one that only counts,
and a complete one with 200 rows. Beside it the map of a pool of 100,000 blocks, which only a complete one draws.
Telemetry is CPU time of the loop's thread, and the step is the shortest one: other work on the machine makes no share
look smaller than it is.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from tokenspeed.device.handle import StepTimings
from tokenspeed.engine.held import HeldRequests
from tokenspeed.engine.statistics import SNAPSHOT_INTERVAL_S
from tokenspeed.launch.compose import Engine, compose_engine
from tokenspeed.messages import PROTOCOL_VERSION, EngineInput, EngineMessage, SamplingParameters, Submit, encode
from tokenspeed.recipes.prepare import resolve_model
from tokenspeed.recipes.resolved import ResolvedConfig
from tokenspeed_scheduler import CacheGroup, ForwardResult, Scheduler, SchedulerConfig

PROMPT_TOKENS = 32
MAX_LEN = 512
BLOCKS = 100_000


class EncodingChannel:
    """Gives the loop what it is to hear and encodes what it says."""

    def __init__(self) -> None:
        self.inbox: list[EngineInput] = []

    def receive(self, timeout_ms: int) -> list[EngineInput]:
        del timeout_ms
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: EngineMessage) -> None:
        encode(message)


def configuration(model: str, running: int) -> ResolvedConfig:
    """The smoke profile with a row, and blocks for the longest, for each of ``running``."""
    config = resolve_model(model, {}, profile="smoke")
    rows = {"max_seqs": running, "max_len": MAX_LEN, "chunk": 8 * running, "max_recorded_seqs": running}
    return config.model_copy(
        update={
            "scheduler": config.scheduler.model_copy(update=rows),
            "kv": config.kv.model_copy(update={"bytes": 0}),
        }
    )


def submits(count: int) -> list[Submit]:
    random = np.random.default_rng(0)
    return [
        Submit(
            handle=handle,
            request_id=f"chatcmpl-{handle:032x}",
            prompt=random.integers(0, 256, PROMPT_TOKENS, dtype=np.int32).tobytes(),
            max_new_tokens=MAX_LEN - PROMPT_TOKENS,
            sampling=SamplingParameters(top_k=1),
        )
        for handle in range(1, count + 1)
    ]


def median_us(call: Callable[[], object], times: int) -> float:
    """The median CPU time of a call in this thread, in microseconds."""
    took = []
    for _ in range(times):
        started = time.thread_time()
        call()
        took.append(time.thread_time() - started)
    return statistics.median(took) * 1e6


def shortest_us(call: Callable[[], object], times: int) -> float:
    """The shortest time of a call, in microseconds."""
    took = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        took.append(time.perf_counter() - started)
    return min(took) * 1e6


def every_round(engine: Engine) -> Callable[[], None]:
    """What a round does for telemetry, each call as the loop makes it."""
    loop = engine.loop
    counted, telemetry, held = loop._statistics, loop._telemetry, HeldRequests(None)
    plan = loop._scheduler.plan()  # of no rows: everybody's last step has landed; its cost does not depend on them
    timings = StepTimings(queued=0.0, prepare=0.0, forward=1e-3, sample=0.0)

    def pay() -> None:
        telemetry.stamp()
        counted.step_started(plan)
        counted.step_landed(timings)
        telemetry.stamp()
        telemetry.answers(held, False)
        counted.snapshot_is_due()
        counted.round_ended(1e-4, 1e-4)

    return pay


def measure_engine(model: str, running: int, waiting: int) -> dict[str, float]:
    """Microseconds of a step, of what every round pays, and of both kinds of snapshot."""
    channel = EncodingChannel()
    engine = compose_engine(configuration(model, running), channel, lambda *_args, **_more: None)
    try:
        loop = engine.loop
        channel.inbox.append(EngineInput(version=PROTOCOL_VERSION, submits=submits(running + waiting)))
        while loop._scheduler.snapshot().running < running:
            loop.round()
        for _ in range(4):
            loop.round()
        step = shortest_us(loop.round, 100)
        light = median_us(loop.publish_snapshot, 100)
        loop._statistics.watch(3600)
        complete = median_us(loop.publish_snapshot, 100)
        counts = loop._scheduler.snapshot()
        while loop._in_flight:
            loop._scheduler.advance(loop._commit(loop._in_flight.popleft()))
        round_us = median_us(every_round(engine), 2000)
    finally:
        engine.shutdown()
    return {
        "running": counts.running,
        "waiting": counts.waiting,
        "step": step,
        "every round": round_us,
        "snapshot that counts": light,
        "complete snapshot": complete,
    }


def measure_map() -> float:
    """Microseconds of the map of a pool of BLOCKS blocks, half of them held in requests of 1,000."""
    group = CacheGroup(group_id="full", kind="full_history", block_granularity=1)
    scheduler = Scheduler(
        SchedulerConfig(
            groups=[group],
            num_parents=BLOCKS,
            prefix_granularity=1,
            max_num_seqs=64,
            max_scheduled_tokens=BLOCKS,
            max_model_len=4000,
        )
    )
    random = np.random.default_rng(0)
    for handle in range(1, BLOCKS // 2000 + 1):
        scheduler.submit(handle, random.integers(0, 50_000, 1000, dtype=np.int32), max_new_tokens=8)
    plan = scheduler.plan()
    scheduler.advance([ForwardResult(plan.forward_id, np.full(plan.num_rows, 7, np.int32))])
    return median_us(lambda: scheduler.maps(256), 50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256, help="requests that decode")
    parser.add_argument("--waiting", type=int, default=1000, help="requests that wait for a row")
    parser.add_argument("--model", default="qwen3-8b", help="a recipe, whose smoke profile runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    figures = measure_engine(arguments.model, arguments.running, arguments.waiting)
    figures["map of 100,000 blocks"] = measure_map()
    step, per_second = figures["step"], 1 / SNAPSHOT_INTERVAL_S
    shares = {
        "unwatched": figures["every round"] / step + figures["snapshot that counts"] * per_second / 1e6,
        "watched": figures["every round"] / step + figures["complete snapshot"] * per_second / 1e6,
    }
    if arguments.json:
        print(json.dumps({"us": figures, "share of the loop's time": shares}))
        return
    for name, value in figures.items():
        print(f"{name:>24} {value:>12,.1f}{'' if name in ('running', 'waiting') else ' µs'}")
    for name, share in shares.items():
        print(f"{name:>24} {100 * share:>12.2f} % of the time of a step")


if __name__ == "__main__":
    main()
