#!/usr/bin/env python3
"""Measures what the dashboard costs: a frame of each page, and taking in an answer of the server.

    python scripts/measure_dashboard.py                 # 120x40, 200 requests
    python scripts/measure_dashboard.py --width 80 --height 24 --requests 20

A frame is rendering (picture to lines of text) and painting (lines to the terminal's segments), each the median of
many. Nothing is sent anywhere.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from tokenspeed.telemetry.snapshot import STATES
from tokenspeed_tui.controls import Controls, Shown
from tokenspeed_tui.machine import SUCCESSORS
from tokenspeed_tui.observation import RECORDING_VERSION, Observation, Probe
from tokenspeed_tui.picture import Picture, advance
from tokenspeed_tui.render import render_screen
from tokenspeed_tui.themes import THEMES

EPOCH = 1_750_000_000.0
PAGES: tuple[Shown, ...] = ("main", "requests", "cache", "rates", "events", "configuration", "help")


def observation(step: int, requests: int) -> Observation:
    """What a busy engine answers, half a second after the answer before."""
    moment = EPOCH + step / 2
    rows = [
        {
            "handle": handle,
            "request_id": f"chatcmpl-{handle:08x}",
            "state": "Submitted" if handle < requests // 4 else "Decoding",
            "age_rounds": step,
            "age_s": 12.5,
            "priority": 0,
            "prompt_tokens": 1_000 + handle,
            "computed_tokens": 1_000 + handle,
            "generated_tokens": step,
            "cached_tokens": 640,
            "blocks": 17,
            "retractions": handle % 3,
            "reason": "capacity: short by 19 blocks" if handle < requests // 4 else "",
            "arrived": moment - 20.0,
            "host_blocks": 0,
            "output_limit": 512,
        }
        for handle in range(requests)
    ]
    group = {
        "group_id": "full",
        "kind": "full_history",
        "block_granularity": 64,
        "bytes_per_block": 2_949_120,
        "total": 256,
        "held": 132,
        "cached": 76,
        "free": 48,
        "pinned": 0,
        "map": "hhhhhhch" * 16 + "hhccc..." * 16,
    }
    snapshot: dict[str, Any] = {
        "time": moment,
        "uptime_s": 3_600.0 + step / 2,
        "states": dict.fromkeys(STATES, 7),
        "groups": [group, group | {"group_id": "window", "kind": "sliding_window"}],
        "flows": [
            [source, target, step * number] for number, source in enumerate(STATES) for target in SUCCESSORS[source]
        ],
        "counters": {"steps": 25 * step, "decode_tokens": 700 * step, "prefill_tokens": 3_000 * step},
        "step": {"plan_ms": 0.2, "device_ms": 31.0, "commit_ms": 0.6, "bubble_ms": 1.9},
        "running": requests,
        "waiting": requests // 4,
        "last_progress": moment,
        "has_work": True,
        "requests": rows,
        "host": [group],
    }
    state = {"snapshot": snapshot, "model": "model", "phase": "ready", "vendor": "cpu", "devices": 1, "age_s": 0.1}
    passed = Probe(status=200)
    return Observation(
        version=RECORDING_VERSION,
        time=moment + 0.1,
        url="http://127.0.0.1:8000",
        live=passed,
        ready=passed,
        progress=passed,
        state=state,
    )


def median_ms(work: Callable[[], object], times: int) -> float:
    """The median of some runs, in milliseconds."""
    spans = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        spans.append(1000 * (time.perf_counter() - start))
    return statistics.median(spans)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=120)
    parser.add_argument("--height", type=int, default=40)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--times", type=int, default=100)
    arguments = parser.parse_args()
    width, height, times = arguments.width, arguments.height - 1, arguments.times
    picture = Picture(url="http://127.0.0.1:8000")
    for step in range(200):
        picture = advance(picture, observation(step, arguments.requests))
    after = observation(200, arguments.requests)
    console = Console(theme=THEMES["dark"], width=width)
    print(f"{arguments.width}x{arguments.height}, {arguments.requests} requests, median of {times}, in ms")
    for page in PAGES:
        controls = Controls(shown=page)
        lines = render_screen(picture, controls, EPOCH + 100.2, width, height)
        rendering = median_ms(lambda: render_screen(picture, controls, EPOCH + 100.2, width, height), times)  # noqa: B023
        painting = median_ms(lambda: [list(line.render(console)) for line in lines], times)  # noqa: B023
        print(f"  {page:14} render {rendering:6.2f}  paint {painting:6.2f}")
    print(f"  {'an answer':14} read and folded {median_ms(lambda: advance(picture, after), times):6.2f}")


if __name__ == "__main__":
    main()
