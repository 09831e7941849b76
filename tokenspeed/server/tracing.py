"""OpenTelemetry spans of requests, where an endpoint is configured; only then is its library imported.

A request that makes work is one span (of kind server), a child of the caller's where a W3C ``traceparent`` came along.
Below it are spans of what was done for it: ``queue`` until the engine's first step, ``prefill`` until the first token,
``decode`` until the end. Attributes have OpenTelemetry's names, of HTTP and of generative models, where it has one.
"""

import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from tokenspeed.frontend.generation import Generation
from tokenspeed.server.version import own_version
from tokenspeed.telemetry import logs

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
EXPORT_TIMEOUT_S = 5.0


class TracingError(ValueError):
    """Spans are asked for and cannot be made; the message says what mends that."""


class Trace:
    """One request on its way, and the moment it came by two clocks: nanoseconds since the epoch, monotonic seconds."""

    def __init__(self, span: Any) -> None:
        self.span = span
        self.began_ns = time.time_ns()
        self.began = time.monotonic()
        self.generations: list[Generation] = []

    def at(self, moment: float) -> int:
        """Returns a monotonic moment, in seconds, as nanoseconds since the epoch."""
        return self.began_ns + int((moment - self.began) * 1e9)


class Tracing:
    """Makes the spans of one server and sends them, in the background, by OTLP over HTTP."""

    def __init__(self, endpoint: str, environment: Mapping[str, str]) -> None:
        """``endpoint`` is a collector's base URL, "" for what OpenTelemetry's variables say. Raises TracingError."""
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            where = f"api.otlp_endpoint is {endpoint}" if endpoint else f"{_variable(environment)} is set"
            raise TracingError(
                f"{where}, but OpenTelemetry is not installed ({error}): install opentelemetry-sdk and "
                "opentelemetry-exporter-otlp-proto-http (the extra otel), or take the endpoint away"
            ) from error
        self._api = trace
        exporter = OTLPSpanExporter(
            endpoint=f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None, timeout=EXPORT_TIMEOUT_S
        )
        resource = Resource.create(
            {"service.name": environment.get("OTEL_SERVICE_NAME", "tokenspeed"), "service.version": own_version()}
        )
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tokenspeed.server", own_version())
        self._propagator = TraceContextTextMapPropagator()
        self._running: ContextVar[Trace | None] = ContextVar("trace", default=None)

    def begin(self, scope: Scope) -> Trace:
        """Begins the span of a request, for the running task."""
        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        parent = self._propagator.extract(carrier)
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        span = self._tracer.start_span(
            f"{scope['method']} {scope['path']}", context=parent, kind=self._api.SpanKind.SERVER, attributes=attributes
        )
        trace = Trace(span)
        self._running.set(trace)
        return trace

    def note(self, generation: Generation) -> None:
        """The running task's request has the engine work on this."""
        trace = self._running.get()
        if trace is not None:
            trace.generations.append(generation)

    def end(self, trace: Trace, route: str, status: int, key: str) -> None:
        """Ends the span of a request and makes those of what was done for it."""
        span = trace.span
        failed = next((one.error for one in trace.generations if one.error is not None), None)
        attributes: dict[str, Any] = {"http.response.status_code": status, "tokenspeed.api_key": key}
        if route != "none":
            attributes["http.route"] = route
            span.update_name(f"POST {route}")
        for generation in trace.generations:
            usage, timings = generation.usage, generation.timings
            attributes |= {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": timings.tokens,
                "tokenspeed.cached_tokens": usage.cached_tokens,
                "tokenspeed.request_id": logs.request_id.get(),
            }
            if timings.first_token_s is not None:
                attributes["gen_ai.server.time_to_first_token"] = timings.first_token_s
            self._parts(trace, generation)
        if failed is not None:
            attributes["error.type"] = failed.code
        if failed is not None or status >= 500:
            span.set_status(self._api.StatusCode.ERROR, failed.message if failed is not None else "")
        span.set_attributes(attributes)
        span.end()

    def close(self) -> None:
        """Sends what there is, for some seconds at most."""
        self._provider.shutdown()

    def _parts(self, trace: Trace, generation: Generation) -> None:
        """The child spans; a part whose end was not reached ends with the request."""
        timings = generation.timings
        ended = time.monotonic() if timings.ended_at is None else timings.ended_at
        began = timings.started_at
        stepped = ended if timings.queue_s is None else began + timings.queue_s
        first = ended if timings.first_token_at is None else timings.first_token_at
        parts = [("queue", began, min(stepped, first))]
        if timings.queue_s is not None:
            parts.append(("prefill", min(stepped, first), first))
        if timings.first_token_at is not None:
            parts.append(("decode", first, ended))
        parent = self._api.set_span_in_context(trace.span)
        for name, start, end in parts:
            child = self._tracer.start_span(name, context=parent, start_time=trace.at(start))
            child.end(end_time=trace.at(max(end, start)))


def make_tracing(endpoint: str, environment: Mapping[str, str]) -> Tracing | None:
    """Returns what makes spans, None where no endpoint is configured. Raises TracingError."""
    return Tracing(endpoint, environment) if endpoint or _variable(environment) else None


def _variable(environment: Mapping[str, str]) -> str:
    """The variable that names an endpoint, "" for none."""
    return next((name for name in VARIABLES if environment.get(name)), "")
