"""Spans of requests, received by a collector inside the test, over HTTP."""

import http.server
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_engine import MODEL, Stack, say, scripted_config, tokens

from tokenspeed.messages import RequestOutput, Submit
from tokenspeed.server import tracing
from tokenspeed.server.app import create_app
from tokenspeed.server.tracing import TracingError, make_tracing

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(http.server.ThreadingHTTPServer):
    """Takes what is exported; ``spans`` are all of them, by name, and ``service`` is who sent them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: dict[str, list[Any]] = {}
        self.service = ""
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        import gzip

        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        data = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        self.server.paths.append(self.path)
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.server.service = attributes(resource.resource)["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.server.spans.setdefault(span.name, []).append(span)
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def attributes(holder: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in holder.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@asynccontextmanager
async def traced(**api: object) -> AsyncIterator[tuple[Stack, httpx.AsyncClient]]:
    """The spans have been sent when the block has ended."""
    stack = Stack(scripted_config(**api))
    await stack.new_engine()
    app = create_app(stack.llm)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield stack, client
    finally:
        app.state.context.close()
        await stack.close()


async def test_a_request_and_its_parts(collector: Collector) -> None:
    async with traced(otlp_endpoint=f"{collector.url}/") as (stack, client):
        stack.engine.script = say("abcd")
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "X-Request-Id": "mine"}
        asked = {"model": MODEL, "prompt": "abc", "stream": True}
        assert (await client.post("/v1/completions", json=asked, headers=headers)).status_code == 200
        await client.get("/v1/models")
    assert set(collector.paths) == {"/v1/traces"} and collector.service == "tokenspeed"
    assert sorted(collector.spans) == ["POST /v1/completions", "decode", "prefill", "queue"], "reading makes no spans"
    (span,) = collector.spans["POST /v1/completions"]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    told = attributes(span)
    assert (told["http.route"], told["http.response.status_code"]) == ("/v1/completions", 200)
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (4, 5)
    assert (told["tokenspeed.cached_tokens"], told["tokenspeed.request_id"]) == (3, "mine")
    assert told["gen_ai.server.time_to_first_token"] > 0 and span.status.code == 0
    parts = [collector.spans[name][0] for name in ("queue", "prefill", "decode")]
    for part in parts:
        assert (part.trace_id, part.parent_span_id) == (span.trace_id, span.span_id)
    moments = [moment for part in parts for moment in (part.start_time_unix_nano, part.end_time_unix_nano)]
    assert moments == sorted(moments) and span.start_time_unix_nano <= moments[0]


async def test_variables_name_the_collector_too(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    async with traced() as (_, client):
        assert (await client.post("/v1/completions", json={"model": MODEL, "temperature": "hot"})).status_code == 400
    (span,) = collector.spans["POST /v1/completions"]
    assert collector.service == "ours" and attributes(span)["http.response.status_code"] == 400
    assert not span.parent_span_id and span.status.code == 0, "the client's fault is no error of the server"
    assert list(collector.spans) == ["POST /v1/completions"]


def broken(submit: Submit) -> Iterator[RequestOutput]:
    """A token, then an error."""
    yield from tokens(submit, [65])
    yield RequestOutput(handle=submit.handle, finish_reason="error", error="no numbers", error_code="nan_logits")


async def test_what_fails_is_an_error(collector: Collector, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ann: of-ann\n")
    async with traced(otlp_endpoint=collector.url, api_key_file=str(tmp_path / "keys")) as (stack, client):
        stack.engine.script = broken
        asked = {"model": MODEL, "prompt": "abc", "stream": True}
        await client.post("/v1/completions", json=asked, headers={"x-api-key": "of-ann"})
        assert (await client.post("/v1/completions", json=asked)).status_code == 401
    late, unknown = collector.spans["POST /v1/completions"]
    assert attributes(late)["error.type"] == "nan_logits" and late.status.code == 2
    assert attributes(late)["tokenspeed.api_key"] == "ann" and attributes(unknown)["tokenspeed.api_key"] == ""
    assert collector.spans["decode"][0].end_time_unix_nano <= late.end_time_unix_nano


async def test_a_collector_that_is_gone_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "EXPORT_TIMEOUT_S", 0.2)
    async with traced(otlp_endpoint="http://127.0.0.1:9") as (_, client):
        assert (await client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})).status_code == 200


def test_without_an_endpoint_nothing_is_made() -> None:
    assert make_tracing("", {}) is None and make_tracing("", {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) is None


def test_a_missing_library_is_named() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from tokenspeed.server.tracing import TracingError, make_tracing\n"
        "for endpoint, environment in (('http://x', {}), ('', {'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://x'})):\n"
        "    try: make_tracing(endpoint, environment)\n"
        "    except TracingError as error: print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = ended.stdout.splitlines()
    assert "api.otlp_endpoint is http://x" in first and "OTEL_EXPORTER_OTLP_ENDPOINT is set" in second
    assert "the extra otel" in first and issubclass(TracingError, ValueError)
