"""Traces each job from its request to its images with OpenTelemetry spans.

Without an endpoint nothing is made or imported.
"""

import re
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal

from serve_app.domain.errors import AtelierError
from serve_app.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan


Kind = Literal["internal", "server", "consumer"]
Attributes = Mapping[str, str | int]

CLOSE_S = 3.0
"""A process that stops waits this long for spans that were not sent yet."""
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_caller: ContextVar[str] = ContextVar("traceparent", default="")


class TracesUnavailable(AtelierError):
    """The environment asks for traces, and the library that sends them is not installed."""


def set_caller(traceparent: str) -> None:
    """Remember the `traceparent` header of the current request; an invalid one counts as absent."""
    if traceparent:
        _caller.set(traceparent if _TRACEPARENT.fullmatch(traceparent) else "")


def caller() -> str:
    return _caller.get()


class Span:
    """A part of a trace; `traceparent` names it to its children, in this process or another."""

    def __init__(self, traceparent: str, span: "OtelSpan | None" = None) -> None:
        self.traceparent = traceparent
        self._span = span

    def end(self, at: float | None = None) -> None:
        """End now, or at a time in Unix seconds."""
        if self._span is not None:
            self._span.end(None if at is None else _nanoseconds(at))


class Traces:
    """Starts spans, and sends them by OTLP.

    When it is off, a span has its parent's name, so that a caller's trace goes on in later services.
    """

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("atelier")

    @property
    def is_on(self) -> bool:
        return self._tracer is not None

    def start(
        self,
        name: str,
        parent: str,
        *,
        at: float | None = None,
        kind: Kind = "internal",
        attributes: Attributes | None = None,
    ) -> Span:
        """Start a span now, or at a time in Unix seconds; without a parent it is the first of a new trace."""
        if self._tracer is None:
            return Span(parent)
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        span = self._tracer.start_span(
            name,
            context=propagator.extract({"traceparent": parent}) if parent else None,
            kind=trace.SpanKind[kind.upper()],
            attributes=attributes,
            start_time=None if at is None else _nanoseconds(at),
        )
        carrier: dict[str, str] = {}
        propagator.inject(carrier, trace.set_span_in_context(span))
        return Span(carrier["traceparent"], span)

    def close(self) -> None:
        """Send what is left, for `CLOSE_S` at most, so that no collector holds up a stop."""
        if self._provider is not None:
            sending = threading.Thread(target=self._provider.shutdown, daemon=True, name="last spans")
            sending.start()
            sending.join(CLOSE_S)


def open_traces(settings: Settings) -> Traces:
    """Open traces by the standard `OTEL_*` variables. Raises `TracesUnavailable`."""
    if not settings.trace_endpoint or settings.otel_disabled:
        return Traces()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as missing:
        raise TracesUnavailable(
            f"OTEL_EXPORTER_OTLP_ENDPOINT is set, and {missing.name} is missing: pip install 'atelier[otel]'"
        ) from missing
    resource = Resource.create({"service.name": settings.otel_service_name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
