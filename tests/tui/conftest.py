"""What the dashboard's tests share: snapshots as an engine makes them, text snapshots, a server that answers HTTP."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dashboards import HandFed

from tokenspeed.telemetry.snapshot import (
    STATES,
    CounterSnapshot,
    EventSnapshot,
    FlowSnapshot,
    GroupSnapshot,
    HeadroomSnapshot,
    LatencySnapshot,
    QuantileSnapshot,
    RequestSnapshot,
    StateSnapshot,
    StepSnapshot,
)
from tokenspeed_tui.app import Dashboard
from tokenspeed_tui.observation import RECORDING_VERSION, Observation, Probe

EPOCH = 1_750_000_000.0
URL = "http://127.0.0.1:8000"
NOT_IN_THE_FUSED_ROLE = ("Bootstrapping", "RemotePrefilling", "PrefillAwaitingResult")


CELLS = "hhhhhhch" * 12 + "hhhccc.c" * 8 + "hhccc..." * 8 + "hhcc...." * 4
"""One character a block: 132 held, 76 cached, 48 free."""


def _requests(moment: float) -> list[RequestSnapshot]:
    """By interest: one that waits, one in prefill, six that decode, the largest first."""
    waiting = RequestSnapshot(
        handle=8,
        request_id="chatcmpl-00000008",
        state="Submitted",
        age_rounds=61,
        priority=-1,
        prompt_tokens=1_800,
        computed_tokens=0,
        generated_tokens=0,
        cached_tokens=0,
        blocks=0,
        retractions=0,
        reason="its turn has not come",
        age_s=1.25,
        arrived=EPOCH + moment - 1.25,
        output_limit=128,
    )
    prefilling = RequestSnapshot(
        handle=7,
        request_id="chatcmpl-00000007",
        state="Prefilling",
        age_rounds=3,
        priority=0,
        prompt_tokens=1_536,
        computed_tokens=768,
        generated_tokens=0,
        cached_tokens=256,
        blocks=12,
        retractions=0,
        age_s=0.5,
        arrived=EPOCH + moment - 2.0,
        output_limit=256,
    )
    decoding = [
        RequestSnapshot(
            handle=handle,
            request_id=f"chatcmpl-{handle:08x}",
            state="Decoding",
            age_rounds=40 + 7 * handle,
            priority=0,
            prompt_tokens=300 + 211 * handle,
            computed_tokens=300 + 211 * handle + round(10 * moment),
            generated_tokens=round(10 * moment) + handle,
            cached_tokens=64 * handle,
            blocks=6 + 4 * handle,
            retractions=handle // 4,
            age_s=3.0 * handle + moment,
            arrived=EPOCH - 4.0 * handle,
            host_blocks=2 * (handle // 4),
            output_limit=512,
        )
        for handle in range(6, 0, -1)
    ]
    return [waiting, prefilling, *decoding]


def _events() -> list[EventSnapshot]:
    return [
        EventSnapshot(
            sequence=1,
            time=EPOCH - 95.0,
            kind="retraction",
            request_id="chatcmpl-00000004",
            text="gave way to chatcmpl-00000002: 22 blocks went to the host pool",
        ),
        EventSnapshot(
            sequence=2, time=EPOCH - 12.0, kind="abort", request_id="chatcmpl-00000005", text="the client went away"
        ),
    ]


def make_snapshot(moment: float = 0.0, **changes: Any) -> StateSnapshot:
    """A fused engine at work, ``moment`` seconds into the story: 300 prefill and 60 decode tokens a second."""
    states: dict[str, int | None] = dict.fromkeys(STATES, 0)
    states.update(dict.fromkeys(NOT_IN_THE_FUSED_ROLE, None))
    states.update(Submitted=1, Prefilling=1, Decoding=6, Finished=204 + round(moment))
    snapshot = StateSnapshot(
        time=EPOCH + moment,
        uptime_s=3_725.0 + moment,
        role="fused",
        states=states,
        groups=[
            GroupSnapshot(
                group_id="full",
                kind="full_history",
                block_granularity=64,
                bytes_per_block=2_949_120,
                total=256,
                held=132,
                cached=76,
                free=48,
                pinned=0,
                map=CELLS,
            )
        ],
        flows=[
            FlowSnapshot("Submitted", "Prefilling", 211 + round(2 * moment)),
            FlowSnapshot("Prefilling", "PrefillDone", 210 + round(2 * moment)),
            FlowSnapshot("Prefilling", "Retracted", 3),
            FlowSnapshot("PrefillDone", "Decoding", 210 + round(2 * moment)),
            FlowSnapshot("Decoding", "Finishing", 190 + round(moment)),
            FlowSnapshot("Decoding", "Finished", 14),
            FlowSnapshot("Finishing", "Finished", 190 + round(moment)),
        ],
        counters=CounterSnapshot(
            rounds=91_000 + round(30 * moment),
            steps=90_000 + round(25 * moment),
            prefill_tokens=812_345 + round(300 * moment),
            decode_tokens=123_456 + round(60 * moment),
            prefix_query_tokens=900_000 + round(500 * moment),
            prefix_hit_tokens=360_000 + round(200 * moment),
            finished=200 + round(moment),
            aborted=4,
            retractions=3,
            nan_rows=0,
            failed_steps=0,
            ignored_results=2,
        ),
        step=StepSnapshot(plan_ms=0.21, device_ms=31.4, commit_ms=0.64, bubble_ms=1.9),
        running=7,
        waiting=1,
        last_progress=EPOCH + moment - 0.04,
        has_work=True,
        requests=_requests(moment),
        headroom=HeadroomSnapshot(tokens=7_936, largest=2_048, requests=5, typical_tokens=1_485),
        events=_events(),
        latency=LatencySnapshot(
            requests=61,
            ttft_ms=QuantileSnapshot(p50=118.0, p90=260.0, p99=412.0),
            inter_token_ms=QuantileSnapshot(p50=33.1, p90=36.0, p99=71.5),
            end_to_end_ms=QuantileSnapshot(p50=2_310.0, p90=4_100.0, p99=6_020.0),
            queue_ms=QuantileSnapshot(p50=4.2, p90=61.0, p99=180.0),
        ),
    )
    return msgspec.structs.replace(snapshot, **changes)


def make_state(snapshot: StateSnapshot | None, **changes: Any) -> dict[str, Any]:
    """The body of ``GET /v1/internal/state`` around a snapshot."""
    state = {
        "snapshot": msgspec.to_builtins(snapshot),
        "model": "smollm2-135m",
        "recipe": "smollm2-135m",
        "profile": "cpu",
        "recipe_hash": "3f9a17c2",
        "phase": "ready",
        "detail": "",
        "error": "",
        "vendor": "cpu",
        "devices": 1,
        "ready": True,
        "lost": 0,
        "open_choices": 8,
        "facts": {"max_model_len": 2048, "kernels": {"linear": "cpu"}},
        "age_s": 0.1,
        "server_time": (snapshot.time if snapshot else EPOCH) + 0.1,
    }
    return state | changes


def make_configuration(**changes: Any) -> dict[str, Any]:
    """The body of ``GET /v1/internal/configuration`` of that engine."""
    given = [
        ("kv.bytes", 754_974_720, "the plan"),
        ("scheduler.max_seqs", 7, "SET scheduler.max_seqs"),
        ("api.port", 8197, "--port"),
        ("api.default_sampling.temperature", 0.2, "recipe (smollm2-135m.yaml:29)"),
        ("api.default_sampling.top_p", 0.9, "recipe (smollm2-135m.yaml:29)"),
        ("log.file", "/var/log/tokenspeed/the-one-of-this-server.log", "profile cpu (smollm2-135m.yaml:41)"),
        ("env.HF_TOKEN", "***", "profile cpu (smollm2-135m.yaml:44)"),
    ]
    defaults = [
        ("served_name", ""),
        ("kv.granularity", 64),
        ("kv.fraction", None),
        ("scheduler.chunk", 256),
        ("scheduler.mixed", True),
        ("scheduler.headroom", 4096),
        ("scheduler.journal", ""),
        ("api.host", "127.0.0.1"),
        ("api.default_sampling.repetition_penalty", None),
        ("api.max_body_bytes", 33_554_432),
        ("threads", 0),
        ("drain_s", 30.0),
    ]
    keys = [{"key": key, "value": value, "source": "default"} for key, value in defaults]
    keys[3:3] = [{"key": key, "value": value, "source": source} for key, value, source in given]
    body = {
        "model": "smollm2-135m",
        "recipe": "smollm2-135m",
        "profile": "cpu",
        "recipe_hash": "3f9a17c2",
        "started": EPOCH - 3_730.0,
        "keys": keys,
        "memory": {
            "predicted": {
                "weights": 269_000_000,
                "workspace": 31_000_000,
                "libraries": 25_165_824,
                "host pool": 0,
                "KV cache": 754_974_720,
                "sum": 1_080_140_544,
            },
            "observed": {
                "weights": 269_000_000,
                "workspace": 31_500_000,
                "KV cache": 754_974_720,
                "libraries": 31_457_280,
                "state": 4_194_304,
                "sum": 1_091_126_304,
            },
        },
    }
    return body | changes


def make_observation(moment: float = 0.0, **changes: Any) -> Observation:
    """One look at that engine, a tenth of a second after the snapshot."""
    passed = Probe(status=200)
    observation = Observation(
        version=RECORDING_VERSION,
        time=EPOCH + moment + 0.1,
        url=URL,
        live=passed,
        ready=passed,
        progress=passed,
        state=make_state(make_snapshot(moment)),
    )
    return msgspec.structs.replace(observation, **changes)


class Story:
    """The makers above, as one fixture: test files import nothing from each other."""

    epoch = EPOCH
    url = URL
    snapshot = staticmethod(make_snapshot)
    state = staticmethod(make_state)
    observation = staticmethod(make_observation)
    configuration = staticmethod(make_configuration)


@pytest.fixture
def story() -> type[Story]:
    return Story


@pytest.fixture
def check_text() -> Callable[[str, str], None]:
    """Compares a text with snapshots/NAME.txt; TOKENSPEED_UPDATE_SNAPSHOTS=1 writes the file instead."""

    def check(name: str, text: str) -> None:
        path = Path(__file__).parent / "snapshots" / f"{name}.txt"
        if os.environ.get("TOKENSPEED_UPDATE_SNAPSHOTS") == "1":
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run once with TOKENSPEED_UPDATE_SNAPSHOTS=1 and look at the result"
        assert text == path.read_text(encoding="utf-8")

    return check


class TinyServer:
    """A real HTTP server with the four answers the dashboard asks for.

    ``answers`` maps a path to (status, body); the state's body may be a function, called for each request. ``asked``
    has each path with the key that came along, ``posted`` the body of each POST.
    """

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {path: (200, {}) for path in ("/live", "/ready", "/progress")}
        self.asked: list[tuple[str, str | None]] = []
        self.posted: list[tuple[str, object]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                outer.posted.append((self.path, json.loads(self.rfile.read(length))))
                self.do_GET()

            def do_GET(self) -> None:
                outer.asked.append((self.path, self.headers.get("Authorization")))
                status, body = outer.answers.get(self.path, (404, {}))
                body = body() if callable(body) else body
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 (the base class names it so)
                """Keeps the test's output clean."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        """Stops answering; the port is free afterwards."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def tiny_server() -> Iterator[TinyServer]:
    server = TinyServer()
    yield server
    server.close()


@pytest.fixture
def source() -> HandFed:
    return HandFed()


@pytest.fixture
def dashboard(source: HandFed, story: Any) -> Dashboard:
    return Dashboard(source, story.url, interval=0.1)
