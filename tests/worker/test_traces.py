"""The trace of a job, from the request over the queue to the image, as a collector receives it."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from serve_app.domain.jobs import JobState
from serve_app.domain.requests import Variant
from serve_app.settings import Settings
from serve_app.tracing import set_caller
from tests.api.app import BODY_A, client_of
from tests.composition import open_resources
from tests.support import Answering, serving
from tests.worker.scripted_executor import ScriptedExecutor, until, working

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Span]]:
    """Collect spans as an OTLP collector receives them over HTTP.

    The environment names it as OpenTelemetry's standard says.
    """
    spans: list[Span] = []

    class Collector(Answering):
        def do_POST(self) -> None:
            body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            spans.extend(s for r in body.resource_spans for scope in r.scope_spans for s in scope.spans)
            self.answer(200)

    with serving(Collector) as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        yield spans


async def test_a_trace_goes_from_the_request_to_the_stored_image(collected: list[Span], settings: Settings) -> None:
    set_of_caller = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    settings = Settings(**{name: getattr(settings, name) for name in settings.model_fields_set})
    async with open_resources(settings) as resources:
        account = await resources.accounts.create("acme")
        _, key = await resources.api_keys.create(account.id, interfaces=frozenset(Variant))
        async with client_of(resources.app()) as client:
            headers = {"Authorization": f"Bearer {key}"} | set_of_caller
            answer = await client.post("/v1/generate", json=BODY_A | {"num_images": 2}, headers=headers)
        job_id = answer.json()["request_id"]
        async with working(resources, ScriptedExecutor()):  # a process of its own knows only the record
            await until(resources, job_id, JobState.COMPLETED)
    assert {span.trace_id.hex() for span in collected} == {TRACE}
    named = {span.name: span for span in collected}
    names = {span.span_id: span.name for span in collected} | {bytes.fromhex(CALLER): "caller"}
    parents = {span.name: names[span.parent_span_id] for span in collected}
    inside = dict.fromkeys(("load", "denoise", "decode", "store", "finish"), "attempt")
    assert parents == {"accept": "caller", "wait": "accept", "attempt": "accept"} | inside
    assert Counter(span.name for span in collected if span.name in ("denoise", "decode", "store", "load")) == {
        "load": 1,
        "denoise": 2,
        "decode": 2,
        "store": 2,
    }
    attempt = named["attempt"]
    for name in inside:
        assert attempt.start_time_unix_nano <= named[name].start_time_unix_nano <= named[name].end_time_unix_nano
        assert named[name].end_time_unix_nano <= attempt.end_time_unix_nano
    assert {a.key: a.value.string_value for a in attempt.attributes}["job_id"] == job_id


async def test_without_an_endpoint_no_span_is_made_and_a_callers_trace_is_kept(
    settings: Settings, tmp_path: Path
) -> None:
    async with open_resources(settings) as resources:
        assert not resources.traces.is_on
        assert resources.traces.start("accept", "given").traceparent == "given"


def test_what_is_no_traceparent_is_no_parent() -> None:
    from serve_app import tracing

    for text in ("00-" + "0" * 32 + f"-{CALLER}-01", f"00-{TRACE}-{CALLER}", "x", f"00-{TRACE}-{CALLER}-01\n"):
        set_caller(text)
        assert tracing.caller() == ""
