"""Job metrics for `/metrics`, read from Redis at each scrape."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from serve_app.domain.jobs import Backlog, JobKind
from serve_app.stores.job_reader import JobReader

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


async def render_metrics(jobs: JobReader) -> bytes:
    """Render the metrics in Prometheus' text format. Raises `StoreUnavailable`."""
    registry = CollectorRegistry()
    registry.register(
        JobMetrics(backlogs={kind: await jobs.backlog(kind) for kind in JobKind}, counts=await jobs.counts())
    )
    return generate_latest(registry)


@dataclass(frozen=True, slots=True, eq=False)
class JobMetrics(Collector):
    """The backlog by kind of job, and the jobs counted since the first."""

    backlogs: Mapping[JobKind, Backlog]
    counts: Mapping[str, int]

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("jobs_ready", "Jobs waiting for a worker.", "ready")
        yield self._gauge("jobs_leased", "Jobs being worked on.", "leased")
        yield self._gauge("jobs_delayed", "Jobs waiting for their next attempt.", "delayed")
        yield self._gauge("backlog_seconds", "Work not yet done, in seconds of one replica.", "seconds")
        yield self._gauge("oldest_job_age_seconds", "Age of the oldest waiting job.", "oldest_age_s")
        events = CounterMetricFamily(
            "atelier_jobs", "Jobs accepted, requeued, fenced, and ended by state.", labels=["event"]
        )
        for event, count in sorted(self.counts.items()):
            events.add_metric([event], count)
        yield events

    def _gauge(self, name: str, meaning: str, field: str) -> Metric:
        gauge = GaugeMetricFamily(f"atelier_{name}", meaning, labels=["kind"])
        for kind, backlog in self.backlogs.items():
            gauge.add_metric([kind], getattr(backlog, field))
        return gauge
